"""Nemotron-H and Nemotron 3: Mamba-2, attention without positions, squared-ReLU MLPs and mixtures of experts, one of
them a layer, in the order that config.json spells out."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from outrider.kernels.activation import relu2
from outrider.kernels.norm import Normed
from outrider.layers.attention import AttentionShape, SelfAttention
from outrider.layers.block import attention_weights
from outrider.layers.cached import CachedLayer, RecurrentLayer
from outrider.layers.embedding import Embedding, Head
from outrider.layers.linear import Linear
from outrider.layers.mamba2 import Mamba2, Mamba2Shape, mamba2_weights
from outrider.layers.mlp import PlainMLP
from outrider.layers.moe import (
    Experts,
    ExpertShape,
    MixtureMLP,
    SigmoidRouter,
    SigmoidRouting,
    experts_by_number,
)
from outrider.layers.mtp import MtpModule
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import Rotary
from outrider.models.base import Mtp, Target, refuse, require, targets
from outrider.types import Batch, Weight

KINDS = {"M": "mamba", "*": "attention", "-": "mlp", "E": "moe"}  # by the letters of a pattern
SYNONYMS = {"linear_attention": "mamba", "full_attention": "attention"}  # as newer configs call them
LEGACY = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_conv_bias": "use_conv_bias",
    "mamba_dt_limit": "time_step_limit",
    "attention_head_dim": "head_dim",
}


class MixerBlock(nn.Module):
    """One mixer of any kind, its input normed, its answer added to the residual stream."""

    def __init__(self, mixer: nn.Module, norm: RMSNorm) -> None:
        super().__init__()
        self.norm = norm
        self.mixer = mixer

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        normed = self.norm(x)
        if isinstance(self.mixer, CachedLayer | RecurrentLayer):
            return x + self.mixer(normed, batch)
        return self.mixer(normed, x) if isinstance(self.mixer, MixtureMLP) else x + self.mixer(normed)


class LatentExperts(Experts):
    """Experts that work on a smaller vector, made of the row's by one projection and turned back by another."""

    def __init__(self, shape: ExpertShape, hidden_size: int, *, bias: bool) -> None:
        super().__init__(shape)
        self.enter = Linear(hidden_size, shape.hidden_size, bias=bias)
        self.leave = Linear(shape.hidden_size, hidden_size, bias=bias)

    def forward(self, x: Tensor | Normed, ids: Tensor, shares: Tensor, residual: Tensor | None = None) -> Tensor:
        return self.leave(super().forward(self.enter(x), ids, shares), residual)


@targets.register("NemotronHForCausalLM")
class NemotronH(Target):
    ignored = (*Target.ignored, r"^mtp\.")

    def __init__(self, config: dict[str, Any]) -> None:
        config = {**config, **{new: config[old] for old, new in LEGACY.items() if old in config}}
        super().__init__(config)
        check(config)
        vocab_size, hidden_size = require(config, "vocab_size", "hidden_size")
        self.embed = Embedding(vocab_size, hidden_size)
        self.layers = nn.ModuleList(self.block(kind) for kind in layer_kinds(config))
        self.norm = self.make_norm()
        tied = config.get("tie_word_embeddings", False)
        self.head = Head(vocab_size, hidden_size, tied=self.embed if tied else None)

    def make_norm(self) -> RMSNorm:
        return RMSNorm(self.config["hidden_size"], self.eps, wide=True)

    @property
    def eps(self) -> float:
        return self.config.get("layer_norm_epsilon", 1e-5)

    @property
    def mlp_bias(self) -> bool:
        return bool(self.config.get("mlp_bias", False))

    # the four kinds of layers

    def block(self, kind: str) -> MixerBlock:
        make = {"mamba": self.mamba, "attention": self.attention, "mlp": self.mlp, "moe": self.mixture}[kind]
        return MixerBlock(make(), self.make_norm())

    def mamba(self) -> Mamba2:
        keys = ("hidden_size", "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel")
        hidden_size, num_heads, head_dim, state_size, num_groups, kernel = require(self.config, *keys)
        shape = Mamba2Shape(
            hidden_size=hidden_size,
            num_heads=num_heads,
            head_dim=head_dim,
            state_size=state_size,
            num_groups=num_groups,
            kernel=kernel,
            eps=self.eps,
            bias=bool(self.config.get("use_bias", False)),
            conv_bias=bool(self.config.get("use_conv_bias", True)),
        )
        if shape.num_heads % shape.num_groups:
            raise ValueError(
                f"config.json: mamba_num_heads = {shape.num_heads} cannot be shared by n_groups = {shape.num_groups}"
            )
        return Mamba2(shape)

    def attention(self) -> SelfAttention:
        hidden_size, num_heads = require(self.config, "hidden_size", "num_attention_heads")
        shape = AttentionShape(
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=self.config.get("num_key_value_heads") or num_heads,
            head_dim=self.config.get("head_dim") or 128,  # the family's own
        )
        return SelfAttention(shape, Rotary.none())

    def mlp(self) -> PlainMLP:
        return PlainMLP(*require(self.config, "hidden_size", "intermediate_size"), bias=self.mlp_bias)

    def mixture(self) -> MixtureMLP:
        config = self.config
        keys = ("hidden_size", "n_routed_experts", "num_experts_per_tok", "moe_intermediate_size")
        hidden_size, num_experts, num_chosen, width = require(config, *keys)
        (shared_width,) = require(config, "moe_shared_expert_intermediate_size")
        routing = SigmoidRouting(
            num_experts=num_experts,
            num_chosen=num_chosen,
            num_groups=config.get("n_group", 1),
            num_kept_groups=config.get("topk_group", 1),
            renormalise=bool(config.get("norm_topk_prob", True)),
            scale=float(config.get("routed_scaling_factor", 1.0)),
        )
        shape = ExpertShape(num_experts, hidden_size, width, gated=False, activation=relu2)
        latent_size = config.get("moe_latent_size")
        if latent_size is None:
            experts = Experts(shape)
        else:
            experts = LatentExperts(replace(shape, hidden_size=latent_size), hidden_size, bias=self.mlp_bias)
        shared = PlainMLP(hidden_size, shared_width, bias=self.mlp_bias)
        return MixtureMLP(SigmoidRouter(hidden_size, routing), experts, shared)

    # weights

    def weights(self) -> dict[str, Weight]:
        weights = self.frame_weights("backbone.embeddings", "backbone.norm_f")
        for number, block in enumerate(self.layers):
            assert isinstance(block, MixerBlock)
            weights |= block_weights(block, f"backbone.layers.{number}.", f"layers.{number}.")
        return weights

    @property
    def mtp(self) -> Mtp | None:
        """One module, used again for every further token; its blocks are numbered as if they were layers."""
        if not self.config.get("num_nextn_predict_layers"):
            return None
        refuse(self.config, "num_nextn_predict_layers", 1)
        return Mtp(num_modules=1, build=self.mtp_module, weights=self.mtp_weights, reads_normed=True, feeds_normed=True)

    def mtp_module(self, number: int) -> MtpModule:
        assert number == 0
        blocks = [self.block(kind) for kind in mtp_kinds(self.config)]
        return MtpModule([self.make_norm() for _ in range(3)], blocks, head=None, embed=None)

    def mtp_weights(self, number: int, module: MtpModule) -> dict[str, Weight]:
        assert number == 0
        last = len(module.blocks) - 1
        weights = {
            "embedding_norm.weight": Weight(("mtp.layers.0.enorm.weight",)),
            "hidden_norm.weight": Weight(("mtp.layers.0.hnorm.weight",)),
            "projection.weight": Weight(("mtp.layers.0.eh_proj.weight",)),
            "norm.weight": Weight((f"mtp.layers.{last}.final_layernorm.weight",)),
        }
        for place, block in enumerate(module.blocks):
            assert isinstance(block, MixerBlock)
            weights |= block_weights(block, f"mtp.layers.{place}.", f"blocks.{place}.")
        return weights


def check(config: dict[str, Any]) -> None:
    """Refuses what is not built. Steps are not clamped (time_step_min and its kin only shape the initial weights),
    and states are kept in float32 whatever mamba_ssm_cache_dtype says."""
    refuse(config, "mlp_hidden_act", "relu2")
    refuse(config, "mamba_hidden_act", "silu", "swish")
    for key in ("attention_bias", "mamba_proj_bias", "residual_in_fp32"):
        refuse(config, key, False)
    refuse(config, "sliding_window")
    refuse(config, "n_shared_experts", 1)
    limit = config.get("time_step_limit")
    if limit is not None and (len(limit) != 2 or limit[0] != 0 or not _is_infinite(limit[1])):
        raise ValueError(f"config.json: time_step_limit = {limit!r} is not supported (supported: 0 to infinity)")


def _is_infinite(value: Any) -> bool:
    """Infinity, in the ways there are to write it in JSON."""
    if isinstance(value, dict):
        value = value.get("__float__")
    return math.isinf(float(value))


def layer_kinds(config: dict[str, Any]) -> list[str]:
    kinds = _kinds(config, "layers_block_type", "hybrid_override_pattern")
    if not kinds:
        raise ValueError("config.json lacks layers_block_type (or hybrid_override_pattern): the kinds of the layers")
    return kinds


def mtp_kinds(config: dict[str, Any]) -> list[str]:
    kinds = _kinds(config, "mtp_layers_block_type", "mtp_hybrid_override_pattern") or ["attention", "moe"]
    if "mamba" in kinds:
        raise ValueError(f"config.json: mtp_layers_block_type with a recurrent layer is not supported, but is {kinds}")
    return kinds


def _kinds(config: dict[str, Any], names_key: str, pattern_key: str) -> list[str]:
    """The kinds of layers, listed by name or spelt as a pattern of letters; if both are given they must agree."""
    names, pattern = config.get(names_key), config.get(pattern_key)
    known = {**KINDS, **SYNONYMS, **{kind: kind for kind in KINDS.values()}}
    for key, value in ((names_key, names), (pattern_key, pattern)):
        unknown = sorted(set(value or ()) - set(known))
        if unknown:
            raise ValueError(f"config.json: {key} names layers of kind {', '.join(unknown)}, which are not supported")
    listed, spelt = ([known[each] for each in value or ()] for value in (names, pattern))
    if listed and spelt and listed != spelt:
        raise ValueError(f"config.json: {names_key} and {pattern_key} disagree: remove the wrong one")
    return listed or spelt


def block_weights(block: MixerBlock, source: str, name: str) -> dict[str, Weight]:
    """Checkpoint names of a layer's parameters; `source` is e.g. "backbone.layers.3."."""
    mixer, weights = block.mixer, {f"{name}norm.weight": Weight((f"{source}norm.weight",))}
    source, name = f"{source}mixer.", f"{name}mixer."
    if isinstance(mixer, Mamba2):
        return weights | mamba2_weights(mixer, source, name)
    if isinstance(mixer, SelfAttention):
        return weights | attention_weights(mixer, source, name)
    if isinstance(mixer, PlainMLP):
        return weights | _plain_weights(mixer, source, name)
    assert isinstance(mixer, MixtureMLP)
    return weights | _mixture_weights(mixer, source, name)


def _linear_weights(layer: Linear, source: str, name: str) -> dict[str, Weight]:
    parts = ("weight",) if layer.bias is None else ("weight", "bias")
    return {f"{name}.{part}": Weight((f"{source}.{part}",)) for part in parts}


def _plain_weights(mlp: PlainMLP, source: str, name: str) -> dict[str, Weight]:
    up = _linear_weights(mlp.up, f"{source}up_proj", f"{name}up")
    return up | _linear_weights(mlp.down, f"{source}down_proj", f"{name}down")


def _mixture_weights(mixture: MixtureMLP, source: str, name: str) -> dict[str, Weight]:
    assert isinstance(mixture.shared, PlainMLP)
    weights = {
        f"{name}router.gate.weight": Weight((f"{source}gate.weight",)),
        f"{name}router.bias": Weight((f"{source}gate.e_score_correction_bias",)),
    }
    weights |= experts_by_number(mixture.experts.shape, f"{source}experts.", f"{name}experts.")
    if isinstance(mixture.experts, LatentExperts):
        weights |= _linear_weights(mixture.experts.enter, f"{source}fc1_latent_proj", f"{name}experts.enter")
        weights |= _linear_weights(mixture.experts.leave, f"{source}fc2_latent_proj", f"{name}experts.leave")
    return weights | _plain_weights(mixture.shared, f"{source}shared_experts.", f"{name}shared.")
