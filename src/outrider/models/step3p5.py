"""Step-3.5-Flash, and the text part of Step-3.7: gated heads, two kinds of attention that differ in everything but the
keys, sigmoid-routed experts beside a shared one, and three multi-token-prediction modules with heads of their own."""

import re
from typing import Any

import torch
from torch import Tensor, nn

from outrider.kernels.activation import Activation, ClampedSilu, sigmoid, silu_mul
from outrider.kernels.norm import Normed
from outrider.layers.attention import AttentionShape, SelfAttention
from outrider.layers.block import DecoderBlock, block_weights, mlp_weights
from outrider.layers.embedding import Embedding, Head
from outrider.layers.linear import Linear
from outrider.layers.mlp import GatedMLP
from outrider.layers.moe import (
    Experts,
    ExpertShape,
    MixtureMLP,
    SigmoidRouter,
    SigmoidRouting,
    experts_by_number,
    rows_in_order,
)
from outrider.layers.mtp import MtpModule
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import Rotary
from outrider.models.base import Mtp, Target, nested_text, refuse, require, targets
from outrider.types import Weight

NORM_OFFSET = 1.0  # norms multiply by 1 + weight
# transformers' names of what published checkpoints call otherwise
ALIASES = {
    "num_key_value_heads": "num_attention_groups",
    "n_routed_experts": "moe_num_experts",
    "num_experts_per_tok": "moe_top_k",
    "share_expert_dims": "share_expert_dim",
    "num_mtp_layers": "num_nextn_predict_layers",
}
SUPPORTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu",),
    "att_impl_type": ("GQA",),
    "use_head_wise_attn_gate": (True,),
    "gating": (True, "per-head"),
    "use_qk_norm": (True,),
    "zero_centered": (True,),
    "sink": (False,),
    "use_bidirectional_attention": (False,),
    "use_rope_layers": ([],),
    "use_moe": (True,),
    "use_moe_router_bias": (True,),
    "moe_router_activation": ("sigmoid",),
}


class GatedAttention(SelfAttention):
    """Every head's answer is scaled by a gate that the layer's input opens."""

    def __init__(self, shape: AttentionShape, rotary: Rotary) -> None:
        super().__init__(shape, rotary)
        self.gate = Linear(shape.hidden_size, self.heads)

    def finish(
        self, attended: Tensor, x: Tensor | Normed, residual: Tensor | None = None, *, overwrite: bool = False
    ) -> Tensor:
        return super().finish(attended * sigmoid(self.gate(x))[..., None], x, residual, overwrite=overwrite)


@targets.register("Step3p5ForCausalLM", "Step3p7ForConditionalGeneration")
class Step3p5(Target):
    """Layers are asked for by number; those after the last are the blocks of the multi-token-prediction modules, and
    the config's lists go on for them."""

    ignored = (*Target.ignored, r"^(model\.)?(vision_model|vit_large_projector|multi_modal_projector)\.")

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(_published(config))
        for key, supported in SUPPORTED.items():
            refuse(self.config, key, *supported)
        vocab_size, hidden_size, num_layers = require(self.config, "vocab_size", "hidden_size", "num_hidden_layers")
        self.rotaries: dict[str, Rotary] = {}  # by their settings: layers alike share one
        self.mixtures = _mixtures(self.config)
        # LLM Compressor, which writes this format, takes the stacked experts apart.
        quantisation = config.get("quantization_config") or self.config.get("quantization_config") or {}
        self.experts_stacked = quantisation.get("quant_method") != "compressed-tensors"
        self.embed = Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(self.block(number) for number in range(num_layers))
        self.norm = self.make_norm()
        tied = self.config.get("tie_word_embeddings", False)
        self.head = Head(vocab_size, hidden_size, tied=self.embed if tied else None)

    def make_norm(self) -> RMSNorm:
        return RMSNorm(self.config["hidden_size"], self.eps, offset=NORM_OFFSET)

    @property
    def eps(self) -> float:
        return self.config.get("rms_norm_eps", 1e-5)

    # ---- what the config says of one layer ----

    def layer_type(self, number: int) -> str:
        kind = _entry(self.config, "layer_types", number)
        if kind not in ("full_attention", "sliding_attention"):
            raise ValueError(f"config.json: layer_types has {kind!r}; supported are full_attention, sliding_attention")
        return kind

    def attention_shape(self, number: int) -> AttentionShape:
        config, kind = self.config, self.layer_type(number)
        other = config.get("attention_other_setting") or {}
        if kind == other.get("attention_type", "sliding_attention"):
            config = {**config, **other}
        num_heads, num_groups, head_dim = require(config, "num_attention_heads", "num_attention_groups", "head_dim")
        refuse(config, "true_head_dim", head_dim)
        written = (config.get("per_layer_config") or {}).get(str(number), {})
        if written.items() - {"num_attention_heads": num_heads}.items():
            raise ValueError(f"config.json: per_layer_config of layer {number} is not supported: {written}")
        scalar = config.get("query_pre_attn_scalar")
        bias = bool(config.get("attention_bias", False))
        return AttentionShape(
            hidden_size=config["hidden_size"],
            num_heads=num_heads,
            num_kv_heads=num_groups,
            head_dim=head_dim,
            window=(config.get("sliding_window") or 0) if kind == "sliding_attention" else 0,
            scale=None if scalar is None else scalar**-0.5,
            qkv_bias=bias,
            output_bias=bias,
            head_norm_eps=self.eps,
            head_norm_offset=NORM_OFFSET,
        )

    def rotary(self, number: int, head_dim: int) -> Rotary:
        settings = _rope(self.config, number, self.layer_type(number))
        key = f"{head_dim} {sorted(settings.items())}"
        if key not in self.rotaries:
            length = {"max_position_embeddings": self.max_len}
            self.rotaries[key] = Rotary.from_config({"rope_parameters": settings, **length}, head_dim)
        return self.rotaries[key]

    def activation(self, key: str, number: int) -> Activation:
        """The config's limits are one list for routed experts, and one for all other MLPs."""
        limits = self.config.get(key) or []
        limit = limits[number] if number < len(limits) else None
        return ClampedSilu(float(limit)) if limit else silu_mul

    # ---- the network ----

    def block(self, number: int) -> DecoderBlock:
        shape = self.attention_shape(number)
        attention = GatedAttention(shape, self.rotary(number, shape.head_dim))
        mlp = self.mixture(number) if number in self.mixtures else self.mlp("intermediate_size", number)
        return DecoderBlock(attention, mlp, self.eps, norm_offset=NORM_OFFSET)

    def mlp(self, key: str, number: int) -> GatedMLP:
        hidden_size, size = require(self.config, "hidden_size", key)
        activation = self.activation("swiglu_limits_shared", number)
        return GatedMLP(hidden_size, size, bias=bool(self.config.get("mlp_bias", False)), activation=activation)

    def mixture(self, number: int) -> MixtureMLP:
        config, hidden_size = self.config, self.config["hidden_size"]
        count, num_chosen, size = require(config, "moe_num_experts", "moe_top_k", "moe_intermediate_size")
        routing = SigmoidRouting(
            count,
            num_chosen,
            renormalise=bool(config.get("norm_expert_weight", True)),
            scale=float(config.get("moe_router_scaling_factor", 1.0)),
        )
        routed = Experts(ExpertShape(count, hidden_size, size, activation=self.activation("swiglu_limits", number)))
        return MixtureMLP(SigmoidRouter(hidden_size, routing), routed, self.mlp("share_expert_dim", number))

    @property
    def mtp(self) -> Mtp | None:
        num_modules = self.config.get("num_nextn_predict_layers") or 0
        if not num_modules:
            return None
        return Mtp(num_modules, self.mtp_module, self.mtp_weights, reads_normed=False, feeds_normed=False)

    def mtp_module(self, index: int) -> MtpModule:
        norms = [self.make_norm() for _ in range(3)]
        block = self.block(self.num_layers + index)
        return MtpModule(norms, [block], head=Head(self.vocab_size, self.hidden_size), embed=None)

    # ---- weights ----

    def weights(self) -> dict[str, Weight]:
        weights = self.frame_weights()
        for number, block in enumerate(self.layers):
            assert isinstance(block, DecoderBlock)
            weights |= self.block_weights(block, number, f"layers.{number}.")
        return weights

    def block_weights(self, block: DecoderBlock, number: int, name: str) -> dict[str, Weight]:
        source = f"model.layers.{number}."
        weights = block_weights(block, source)
        weights["attention.gate.weight"] = Weight((f"{source}self_attn.g_proj.weight",))
        if isinstance(block.mlp, MixtureMLP):
            weights |= self.mixture_weights(block.mlp, source)
        return {f"{name}{inner}": weight for inner, weight in weights.items()}

    def mixture_weights(self, mixture: MixtureMLP, source: str) -> dict[str, Weight]:
        assert isinstance(mixture.shared, GatedMLP)
        weights = {
            "mlp.router.gate.weight": Weight((f"{source}moe.gate.weight",)),
            "mlp.router.bias": Weight((f"{source}moe.router_bias",)),
            **mlp_weights(mixture.shared, f"{source}share_expert.", "mlp.shared."),
        }
        if not self.experts_stacked:
            return weights | experts_by_number(mixture.experts.shape, f"{source}moe.experts.", "mlp.experts.")
        stacked = [f"{source}moe.{part}_proj.weight" for part in ("gate", "up", "down")]
        count = mixture.experts.shape.num_experts
        weights["mlp.experts.up"] = Weight(
            tuple(stacked[:2]), _gate_over_up, lambda parts: rows_in_order(count, parts, lambda rows: rows)
        )
        weights["mlp.experts.down"] = Weight((stacked[2],))
        return weights

    def mtp_weights(self, index: int, module: MtpModule) -> dict[str, Weight]:
        number = self.num_layers + index
        (block,) = module.blocks
        assert isinstance(block, DecoderBlock)
        own = {
            "embedding_norm": "enorm",
            "hidden_norm": "hnorm",
            "projection": "eh_proj",
            "norm": "transformer.shared_head.norm",
            "head": "transformer.shared_head.output",
        }
        weights = {f"{name}.weight": Weight((f"model.layers.{number}.{part}.weight",)) for name, part in own.items()}
        return weights | self.block_weights(block, number, "blocks.0.")

    def canonical(self, name: str) -> str:
        if self.experts_stacked and re.search(r"\.moe\.(experts\.)?\d+\.", name):
            raise ValueError(
                f"{name}: experts by number are known of checkpoints whose quant_method is compressed-tensors; of "
                "others, use one with stacked experts (moe.gate_proj.weight and so on)"
            )
        return re.sub(r"^model\.language_model\.", "model.", name)

    def ignores(self, name: str) -> bool:
        layer = re.match(r"model\.layers\.(\d+)\.", name)
        num_modules = self.config.get("num_nextn_predict_layers") or 0
        of_mtp = layer is not None and 0 <= int(layer[1]) - self.num_layers < num_modules
        return super().ignores(name) or of_mtp


def _published(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's config under the names of Step-3.5's publication, whoever wrote it."""
    config = dict(nested_text(config))
    for alias, name in ALIASES.items():
        if alias in config and config.setdefault(name, config[alias]) != config[alias]:
            raise ValueError(f"config.json: {alias} = {config[alias]} contradicts {name} = {config[name]}; remove one")
    if config.get("num_sliding_attention_heads") and not config.get("attention_other_setting"):
        config["attention_other_setting"] = {"num_attention_heads": config["num_sliding_attention_heads"]}
    for key in ("layer_types", "mlp_layer_types"):
        # transformers cuts the lists, and puts what they say of MTP modules elsewhere
        if config.get(f"mtp_{key}") and len(config[key]) == config["num_hidden_layers"]:
            config[key] = config[key] + config[f"mtp_{key}"]
    return config


def _entry(config: dict[str, Any], key: str, number: int) -> Any:
    """What a list with an entry for every layer says of one, or a single value of all."""
    (values,) = require(config, key)
    if not isinstance(values, list):
        return values
    if number >= len(values):
        raise ValueError(f"config.json: {key} has {len(values)} entries, none of them for layer {number}; add them")
    return values[number]


def _mixtures(config: dict[str, Any]) -> set[int]:
    """The layers that have experts."""
    if config.get("mlp_layer_types"):
        return {number for number, kind in enumerate(config["mlp_layer_types"]) if kind == "sparse"}
    (numbers,) = require(config, "moe_layers_enum")
    try:
        return {int(number) for number in (numbers.split(",") if isinstance(numbers, str) else numbers)}
    except ValueError as error:
        raise ValueError(f"config.json: moe_layers_enum must list layers by number, not {numbers!r}") from error


def _rope(config: dict[str, Any], number: int, kind: str) -> dict[str, Any]:
    """Rotary settings of a layer: transformers writes them by type of layer, the publication by number."""
    parameters = config.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in parameters.values()):
        (settings,) = require(parameters, kind)
        return dict(settings)
    settings = {"rope_theta": _entry(config, "rope_theta", number)}
    if config.get("partial_rotary_factors"):
        settings["partial_rotary_factor"] = _entry(config, "partial_rotary_factors", number)
    scaling = {**(config.get("rope_scaling") or {}), **parameters}
    if not scaling or (config.get("yarn_only_types") and kind not in config["yarn_only_types"]):
        return settings
    if not ("rope_type" in scaling or "type" in scaling):
        raise ValueError(f"config.json: rope_scaling does not say its rope_type: {scaling}")
    return {**scaling, **settings}


def _gate_over_up(tensors: list[Tensor]) -> Tensor:
    """[E, I, H] twice -> [E, 2 I, H]."""
    return torch.stack(tensors, dim=1).flatten(1, -2)
