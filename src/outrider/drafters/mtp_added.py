"""Multi-token-prediction modules that were trained for a target which came without any: a checkpoint of their own.
Their tensors are named as DeepSeek names its modules', numbered like layers after the target's last."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outrider.drafters.fresh import Fresh, Mould, Plan, Tensors
from outrider.layers.attention import AttentionShape, SelfAttention
from outrider.layers.block import DecoderBlock, block_weights
from outrider.layers.mlp import GatedMLP
from outrider.layers.mtp import MtpModule
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import Rotary
from outrider.models.base import Mtp, Target, require
from outrider.types import Weight

ARCHITECTURE = "AddedMtpModules"
NUM_MODULES = 3


def are_added(config: Mapping[str, Any]) -> bool:
    return ARCHITECTURE in (config.get("architectures") or [])


def added_modules(config: dict[str, Any], target: Target) -> Mtp:
    """MTP modules as a checkpoint of added modules describes them."""
    hidden_size, inner, num_heads, count = require(
        config, "hidden_size", "intermediate_size", "num_attention_heads", "num_nextn_predict_layers"
    )
    if hidden_size != target.hidden_size or config.get("num_target_layers", target.num_layers) != target.num_layers:
        raise ValueError(
            f"the modules were made for a target of hidden size {hidden_size} and {config.get('num_target_layers')} "
            f"layers, this one has {target.hidden_size} and {target.num_layers}: they belong to another target"
        )
    eps = float(config.get("rms_norm_eps", 1e-6))
    shape = AttentionShape(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or hidden_size // num_heads,
    )
    rotary = Rotary.from_config(config, shape.head_dim)

    def build(number: int) -> MtpModule:
        norms = [RMSNorm(hidden_size, eps) for _ in range(3)]
        block = DecoderBlock(SelfAttention(shape, rotary), GatedMLP(hidden_size, inner), eps)
        return MtpModule(norms, [block], head=None, embed=None)

    def weights(number: int, module: MtpModule) -> dict[str, Weight]:
        source = _source(target, number)
        (block,) = module.blocks
        assert isinstance(block, DecoderBlock)
        own = {name: Weight((f"{source}{tensor}",)) for name, tensor in _NAMES.items()}
        return own | {f"blocks.0.{name}": weight for name, weight in block_weights(block, source).items()}

    return Mtp(num_modules=count, build=build, weights=weights, reads_normed=False, feeds_normed=False)


_NAMES = {
    "embedding_norm.weight": "enorm.weight",
    "hidden_norm.weight": "hnorm.weight",
    "projection.weight": "eh_proj.weight",
    "norm.weight": "shared_head.norm.weight",
}


def _source(target: Target, number: int) -> str:
    return f"model.layers.{target.num_layers + number}."


def fresh_modules(target: Target, plan: Plan) -> Fresh:
    """As many as are drafted, three at most, unless the plan says how many."""
    mould, count = Mould.of(target, plan), plan.num_layers or min(plan.depth, NUM_MODULES)
    tensors: dict[str, torch.Tensor] = {}
    for number in range(count):
        made, source = Tensors(target, mould, plan), _source(target, number)
        size = mould.hidden_size
        both = torch.cat([0.5 * torch.eye(size), 0.5 * torch.eye(size)], dim=1) + made.matrix(size, 2 * size, 0.1)
        tensors |= made.layer(source)
        tensors |= {
            f"{source}enorm.weight": made.ones(),
            f"{source}hnorm.weight": made.ones(),
            f"{source}eh_proj.weight": both,
            f"{source}shared_head.norm.weight": made.final_norm(),
        }
    config = {
        "architectures": [ARCHITECTURE],
        "model_type": "mtp_modules",
        **mould.config,
        "num_hidden_layers": count,
        "num_nextn_predict_layers": count,
        "num_target_layers": target.num_layers,
    }
    return Fresh(config, tensors)
