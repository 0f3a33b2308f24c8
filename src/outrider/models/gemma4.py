"""Gemma 4, by itself or as the text part of a multimodal checkpoint: Gemma 3 with two head sizes, layers that read the
keys and values of an earlier one, inputs for every layer, and experts beside the MLP."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from outrider.kernels.moe import softmax_top
from outrider.kernels.norm import rms_norm
from outrider.layers.attention import AttentionShape, SelfAttention
from outrider.layers.embedding import Embedding
from outrider.layers.linear import Linear
from outrider.layers.mlp import GatedMLP
from outrider.layers.moe import Experts, ExpertShape, check_choice
from outrider.layers.narrow import all_rows
from outrider.layers.norm import RMSNorm
from outrider.layers.per_layer import PER_LAYER, PerLayerGate, PerLayerInputs
from outrider.layers.rotary import Rotary
from outrider.layers.sandwich import SandwichBlock
from outrider.layers.shared_attention import (
    SharedAttention,
    ValueNormAttention,
    shared_attention_weights,
    value_norm_weights,
)
from outrider.models.base import Vision, refuse, require, targets
from outrider.models.gemma3 import DEFAULTS as GEMMA3_DEFAULTS
from outrider.models.gemma3 import FULL, SLIDING, Gemma3, gated_activation, rope_parameters
from outrider.types import Batch, Weight

DEFAULTS: dict[str, Any] = {
    **{key: value for key, value in GEMMA3_DEFAULTS.items() if key != "query_pre_attn_scalar"},
    "vocab_size": 262144,
    "num_hidden_layers": 30,
    "sliding_window": 512,
    "global_head_dim": 512,
    "hidden_size_per_layer_input": 256,
    "vocab_size_per_layer_input": 262144,
    "num_kv_shared_layers": 0,
}
DEFAULT_ROPE = {
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    SLIDING: {"rope_type": "default", "rope_theta": 1e4},
}
AROUND_IMAGE = {"boi_token_id": 255999, "eoi_token_id": 258882}
PLACEHOLDERS = {"image_token_id": 258880, "audio_token_id": 258881, "video_token_id": 258884}

# parameters of a block -> tensors on disk
PER_LAYER_NAMES = {
    "per_layer.gate.weight": "per_layer_input_gate.weight",
    "per_layer.projection.weight": "per_layer_projection.weight",
    "per_layer.norm.weight": "post_per_layer_input_norm.weight",
}
MIXTURE_NAMES = {
    "mixture.router.gate.weight": "router.proj.weight",
    "mixture.router.scale": "router.scale",
    "mixture.router.expert_scale": "router.per_expert_scale",
    "mixture.experts.up": "experts.gate_up_proj",
    "mixture.experts.down": "experts.down_proj",
    "mixture.mlp_norm.weight": "post_feedforward_layernorm_1.weight",
    "mixture.input_norm.weight": "pre_feedforward_layernorm_2.weight",
    "mixture.answer_norm.weight": "post_feedforward_layernorm_2.weight",
}


class TextEmbedding(Embedding):
    """An id that only marks the place of an image or a sound is looked up as padding."""

    def __init__(self, vocab_size: int, hidden_size: int, placeholders: Sequence[int], padding: int) -> None:
        super().__init__(vocab_size, hidden_size, scale=hidden_size**0.5)
        self.placeholders = placeholders
        self.padding = padding

    def text_ids(self, ids: Tensor) -> Tensor:
        for placeholder in self.placeholders:
            ids = torch.where(ids == placeholder, self.padding, ids)
        return ids

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(self.text_ids(ids))


class Gemma4Router(nn.Module):
    """Sees the stream normed and scaled; every expert has a weight on its share."""

    def __init__(self, hidden_size: int, num_experts: int, num_chosen: int, eps: float) -> None:
        super().__init__()
        check_choice(num_chosen, num_experts)
        self.gate = Linear(hidden_size, num_experts)
        self.scale = nn.Parameter(torch.empty(hidden_size))
        self.expert_scale = nn.Parameter(torch.empty(num_experts))
        self.num_chosen = num_chosen
        self.eps = eps

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [T, H] -> the experts of each row [T, k], and their shares [T, k]."""
        x = rms_norm(x, None, self.eps) * self.scale * x.shape[-1] ** -0.5
        ids, shares = softmax_top(self.gate(x), self.num_chosen, renormalise=True)
        return ids, shares * self.expert_scale[ids]


class SideMixture(nn.Module):
    """Experts that answer beside the MLP, from the residual stream itself."""

    def __init__(self, router: Gemma4Router, routed: Experts, norms: Sequence[RMSNorm]) -> None:
        """norms: of the MLP's answer, of the experts' input, of the experts' answer."""
        super().__init__()
        self.router = router
        self.experts = routed
        self.mlp_norm, self.input_norm, self.answer_norm = norms

    def forward(self, answer: Tensor, x: Tensor) -> Tensor:
        """The MLP's answer and the residual stream, both [T, H] -> the answer of both."""
        routed = self.experts(self.input_norm(x), *self.router(x))
        return self.mlp_norm(answer) + self.answer_norm(routed)


class Gemma4Block(SandwichBlock):
    def __init__(
        self,
        attention: nn.Module,
        mlp: GatedMLP,
        norms: Sequence[RMSNorm],
        mixture: SideMixture | None,
        per_layer: PerLayerGate | None,
    ) -> None:
        super().__init__(attention, mlp, norms)
        self.mixture = mixture
        self.per_layer = per_layer
        self.scalar = nn.Parameter(torch.empty(1))

    def feed(self, x: Tensor, normed: Tensor | None) -> Tensor:
        answer = super().feed(x, normed)
        return answer if self.mixture is None else self.mixture(answer, x)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        if self.per_layer is None:
            return super().forward(x, batch) * self.scalar
        with all_rows(batch):
            x = super().forward(x, batch)
        return self.per_layer(x, batch) * self.scalar


def head_shapes(config: Mapping[str, Any], kinds: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Head size and number of key/value heads of each kind of layer, as published configs say it (`global_head_dim`,
    `num_global_key_value_heads`) or as newer ones do (`per_layer_config`)."""
    special = {"head_dim": config["global_head_dim"]}
    if config.get("attention_k_eq_v") and config.get("num_global_key_value_heads"):
        special["num_key_value_heads"] = config["num_global_key_value_heads"]
    given = config.get("per_layer_config")
    if given is None:
        given = {number: special for number, kind in enumerate(kinds) if kind == FULL}
    overrides = {int(number): layer for number, layer in given.items()}
    unknown = {key for layer in overrides.values() for key in layer} - {"head_dim", "num_key_value_heads"}
    if unknown:
        raise ValueError(f"config.json: per_layer_config sets {', '.join(sorted(unknown))}, which is not supported")
    found: dict[str, set[tuple[int, int]]] = {}
    for number, kind in enumerate(kinds):
        layer = {**config, **overrides.get(number, {})}
        found.setdefault(kind, set()).add((layer["head_dim"], layer["num_key_value_heads"]))
    for kind, shapes in found.items():
        if len(shapes) > 1:
            raise ValueError(f"config.json: per_layer_config gives {kind} layers different heads; not supported")
    return {kind: shape for kind, (shape,) in found.items()}


@targets.register("Gemma4ForCausalLM", "Gemma4ForConditionalGeneration")
class Gemma4(Gemma3):
    embed: TextEmbedding
    defaults = DEFAULTS
    ignored = (*Gemma3.ignored, r"^(model\.)?(audio_tower|embed_audio|embed_vision)\.")

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        self.per_layer_inputs = self.build_per_layer_inputs()

    def settings(self, config: dict[str, Any]) -> dict[str, Any]:
        settings = super().settings(config)
        if "text_config" not in config:
            return settings
        return {**settings, **{key: config.get(key, usual) for key, usual in PLACEHOLDERS.items()}}

    def check(self) -> None:
        refuse(self.config, "attn_logit_softcapping")
        refuse(self.config, "use_bidirectional_attention", False, "vision")  # "vision": within an image only
        for key in ("rope_theta", "rope_local_base_freq", "rope_scaling", "partial_rotary_factor"):
            refuse(self.config, key)  # rope_parameters says it for this family
        if not self.config.get("layer_types"):
            refuse(self.config, "sliding_window_pattern", 6)

    @property
    def looks_both_ways(self) -> bool:
        """Within an image, in layers with a window; the larger models of the family do."""
        return self.config.get("use_bidirectional_attention") == "vision"

    def find_vision(self, config: dict[str, Any]) -> Vision:
        image = config.get("image_token_id", PLACEHOLDERS["image_token_id"])
        begin, end = (config.get(key, usual) for key, usual in AROUND_IMAGE.items())
        return Vision(
            image_token=image,
            marker=image,
            expand=lambda count, text_of: text_of(begin) + text_of(image) * count + text_of(end),
            unsplit=self.looks_both_ways,
        )

    def embedding(self) -> TextEmbedding:
        config = self.config
        placeholders = [config[key] for key in PLACEHOLDERS if config.get(key) is not None]
        padding = config.get("pad_token_id") or 0
        return TextEmbedding(config["vocab_size"], config["hidden_size"], placeholders, padding)

    def norm_of(self, size: int) -> RMSNorm:
        return RMSNorm(size, self.config["rms_norm_eps"], wide=True)

    def prepare(self, x: Tensor, batch: Batch) -> None:
        if self.per_layer_inputs is not None:
            batch.memo[PER_LAYER] = self.per_layer_inputs(self.embed.text_ids(batch.input_ids), x)

    def build_per_layer_inputs(self) -> PerLayerInputs | None:
        config, size = self.config, self.config["hidden_size_per_layer_input"]
        if not size:
            return None
        if config["vocab_size_per_layer_input"] < config["vocab_size"]:
            raise ValueError("config.json: vocab_size_per_layer_input must not be smaller than vocab_size")
        vocab_size = config["vocab_size_per_layer_input"]
        return PerLayerInputs(vocab_size, config["hidden_size"], config["num_hidden_layers"], self.norm_of(size))

    def layer_kinds(self) -> list[str]:
        return [*super().layer_kinds()[:-1], FULL]  # the last one is, whatever the config says

    def rotary_settings(self) -> dict[str, dict[str, Any]]:
        given = rope_parameters(self.config) or DEFAULT_ROPE
        require(given, *set(self.kinds))
        return given

    def build_layers(self) -> nn.ModuleList:
        heads = head_shapes(self.config, self.kinds)
        rotaries = {kind: self.rotary(kind, head_dim) for kind, (head_dim, _) in heads.items()}
        num_layers, num_shared = self.config["num_hidden_layers"], self.config["num_kv_shared_layers"]
        sources: dict[str, ValueNormAttention] = {}  # the last layer of each kind with keys and values of its own
        layers = nn.ModuleList()
        for number, kind in enumerate(self.kinds):
            if number < num_layers - num_shared:
                sources[kind] = self.attention(kind, heads[kind], rotaries[kind])
                layers.append(self.layer(number, sources[kind], self.config["intermediate_size"]))
            elif kind in sources:
                widening = 2 if self.config.get("use_double_wide_mlp") else 1
                width = widening * self.config["intermediate_size"]
                source = sources[kind]
                shared = SharedAttention(source, source.whole_shape, source.rotary, source.eps)
                layers.append(self.layer(number, shared, width))
            else:
                raise ValueError(
                    f"config.json: num_kv_shared_layers = {num_shared} of {num_layers} leaves layer {number} ({kind}) "
                    "with no earlier one of its kind to share with"
                )
        return layers

    def attention(self, kind: str, heads: tuple[int, int], rotary: Rotary) -> ValueNormAttention:
        config, (head_dim, num_kv_heads) = self.config, heads
        bias = bool(config.get("attention_bias", False))
        shape = AttentionShape(
            hidden_size=config["hidden_size"],
            num_heads=config["num_attention_heads"],
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            window=self.window(kind),
            scale=1.0,
            bidirectional=self.looks_both_ways and kind == SLIDING and self.vision is not None,
            qkv_bias=bias,
            output_bias=bias,
        )
        values_are_keys = bool(config.get("attention_k_eq_v", False)) and kind == FULL
        return ValueNormAttention(shape, rotary, config["rms_norm_eps"], values_are_keys=values_are_keys)

    def layer(self, number: int, attention: nn.Module, mlp_width: int) -> Gemma4Block:
        hidden_size, size = self.config["hidden_size"], self.config["hidden_size_per_layer_input"]
        per_layer: PerLayerGate | None = None
        if size:
            per_layer = PerLayerGate(number, size, self.norm_of(hidden_size), gated_activation(self.config))
        norms = [self.norm_of(hidden_size) for _ in range(4)]
        return Gemma4Block(attention, self.mlp(mlp_width), norms, self.mixture(), per_layer)

    def mixture(self) -> SideMixture | None:
        config, hidden_size = self.config, self.config["hidden_size"]
        if not config.get("enable_moe_block", False):
            return None
        num_experts, num_chosen, width = require(config, "num_experts", "top_k_experts", "moe_intermediate_size")
        router = Gemma4Router(hidden_size, num_experts, num_chosen, config["rms_norm_eps"])
        shape = ExpertShape(num_experts, hidden_size, width, activation=gated_activation(config))
        return SideMixture(router, Experts(shape), [self.norm_of(hidden_size) for _ in range(3)])

    @property
    def shared_layers(self) -> Mapping[str, SelfAttention]:
        """The last layer of each kind with keys and values of its own."""
        found: dict[str, SelfAttention] = {}
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            assert isinstance(layer, Gemma4Block)
            if isinstance(layer.attention, SelfAttention):
                found[kind] = layer.attention
        return found

    def weights(self) -> dict[str, Weight]:
        weights = super().weights()
        if self.per_layer_inputs is not None:
            weights["per_layer_inputs.embed.weight"] = Weight(("model.embed_tokens_per_layer.weight",))
            weights["per_layer_inputs.projection.weight"] = Weight(("model.per_layer_model_projection.weight",))
            weights["per_layer_inputs.norm.weight"] = Weight(("model.per_layer_projection_norm.weight",))
        return weights

    def block_weights(self, block: nn.Module, source: str) -> dict[str, Weight]:
        assert isinstance(block, Gemma4Block)
        weights = super().block_weights(block, source)
        if isinstance(block.attention, ValueNormAttention):
            weights |= value_norm_weights(block.attention, f"{source}self_attn.", "attention.")
        elif isinstance(block.attention, SharedAttention):
            weights |= shared_attention_weights(block.attention, f"{source}self_attn.", "attention.")
        names = {"scalar": "layer_scalar"}
        if block.per_layer is not None:
            names |= PER_LAYER_NAMES
        if block.mixture is not None:
            names |= MIXTURE_NAMES
        return weights | {name: Weight((source + on_disk,)) for name, on_disk in names.items()}

    def ignores(self, name: str) -> bool:
        """Layers that share may have keys and values on disk all the same, which nothing ever read."""
        found = re.match(r"model\.layers\.(\d+)\.self_attn\.[kv]_(proj|norm)\.", name)
        num_own = self.config["num_hidden_layers"] - self.config["num_kv_shared_layers"]
        return super().ignores(name) or (found is not None and int(found[1]) >= num_own)
