"""A drafter to begin training with: its config.json and its tensors, in names that other engines read too.
It begins as a copy of the target's last layer where their shapes agree, else with random numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.kernels.activation import silu_mul
from outrider.layers.attention import AttentionShape, SelfAttention
from outrider.layers.block import DecoderBlock
from outrider.layers.mlp import GatedMLP
from outrider.layers.norm import RMSNorm
from outrider.layers.packing import dense
from outrider.models.base import Target, nested_text, require


@dataclass(frozen=True)
class Plan:
    """What a new drafter shall be; None: what suits its method."""

    method: str = ""  # where one class has several
    depth: int = 5  # draft tokens that it will be asked for, at most
    num_layers: int | None = None
    intermediate_size: int | None = None  # of its layers; None: as the target's
    taps: tuple[int, ...] | None = None
    draft_ids: Tensor | None = None  # the target's ids of its tokens, ascending; None: all
    post_norm: bool = False  # what it feeds back is normed, and so is every tap
    warm: bool = True  # it begins as a copy of the target's last layer, where their shapes agree
    mask_token: int | None = None  # stands for what is not known yet
    window: int = 0  # how far it looks back; 0: no limit
    seed: int = 0


@dataclass(frozen=True)
class Fresh:
    """A checkpoint of a drafter that has learnt nothing."""

    config: dict[str, Any]
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class Mould:
    """What the layers of a drafter look like: as the target's, but plain."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    head_norm: bool
    config: dict[str, Any]  # the same for config.json

    @classmethod
    def of(cls, target: Target, plan: Plan, *, head_norm: bool = False) -> Mould:
        text = nested_text(target.config)
        (num_heads,) = require(text, "num_attention_heads")
        head_dim = text.get("head_dim") or target.hidden_size // num_heads
        size = target.hidden_size
        inner = plan.intermediate_size or text.get("intermediate_size") or 3 * size
        num_kv_heads, eps = text.get("num_key_value_heads") or num_heads, float(text.get("rms_norm_eps", 1e-6))
        config = {
            "vocab_size": target.vocab_size,
            "hidden_size": size,
            "intermediate_size": inner,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_kv_heads,
            "head_dim": head_dim,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "rms_norm_eps": eps,
            "max_position_embeddings": target.max_len,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            **_rope(text),
        }
        return cls(size, inner, num_heads, num_kv_heads, head_dim, eps, head_norm, config)


def _rope(text: dict[str, Any]) -> dict[str, Any]:
    """Where layers turn in different ways, or only in part, the drafter turns plainly."""
    nested = text.get("rope_parameters") or {}
    theta = nested.get("rope_theta", text.get("rope_theta", 10000.0))
    if not isinstance(theta, int | float):
        theta = 10000.0
    scaling = text.get("rope_scaling") or nested
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    plain = kind in ("default", "mrope") or any(isinstance(value, dict) for value in scaling.values())
    return {"rope_theta": float(theta)} if plain else {"rope_theta": float(theta), "rope_scaling": dict(scaling)}


class Tensors:
    """Makes a new drafter's tensors, from the target's or from random numbers."""

    def __init__(self, target: Target, mould: Mould, plan: Plan) -> None:
        self.target, self.mould = target, mould
        self.random = torch.Generator().manual_seed(plan.seed)
        last = target.layers[-1]
        self.source = last if plan.warm and isinstance(last, DecoderBlock) and _fits(last, mould) else None

    def matrix(self, num_rows: int, num_columns: int, scale: float = 1.0) -> Tensor:
        return torch.randn(num_rows, num_columns, generator=self.random) * scale * num_columns**-0.5

    def ones(self, size: int | None = None) -> Tensor:
        return torch.ones(self.mould.hidden_size if size is None else size)

    def last_of(self, count: int) -> Tensor:
        """A projection [H, count H] that begins as the last of its inputs."""
        size = self.mould.hidden_size
        return torch.cat([torch.zeros(size, (count - 1) * size), torch.eye(size)], dim=1)

    def final_norm(self) -> Tensor:
        norm = self.target.norm
        return norm.weight.detach().float().cpu() + norm.offset if isinstance(norm, RMSNorm) else self.ones()

    def head(self, ids: Tensor | None) -> Tensor:
        weight = dense(self.target.head).detach()
        return (weight if ids is None else weight[ids.to(weight.device)]).float().cpu()

    def layer(self, source: str, *, inputs: int = 1) -> dict[str, Tensor]:
        """`source` is e.g. "layers.0."; `inputs`: how many states its attention reads side by side, the last of them
        being what the target's layer reads."""
        made = self._copied(inputs) if self.source is not None else self._random(inputs)
        if self.mould.head_norm:
            made |= {f"self_attn.{name}.weight": self.ones(self.mould.head_dim) for name in ("q_norm", "k_norm")}
        return {f"{source}{name}": tensor for name, tensor in made.items()}

    def _copied(self, inputs: int) -> dict[str, Tensor]:
        block, mould = self.source, self.mould
        assert block is not None
        assert isinstance(block.mlp, GatedMLP)
        sizes = [heads * mould.head_dim for heads in (mould.num_heads, mould.num_kv_heads, mould.num_kv_heads)]
        qkv, gate_up = _numbers(block.attention.qkv), _numbers(block.mlp.gate_up)
        before = torch.zeros(len(qkv), (inputs - 1) * mould.hidden_size)
        q, k, v = torch.cat([before, qkv], dim=1).split(sizes)
        gate, up = gate_up.chunk(2)
        down = _numbers(block.mlp.down)
        more = mould.intermediate_size - len(gate)  # whose outputs begin as nothing
        gate, up = (torch.cat([each, self.matrix(more, mould.hidden_size)]) for each in (gate, up))
        down = torch.cat([down, torch.zeros(mould.hidden_size, more)], dim=1)
        return {
            "input_layernorm.weight": block.attention_norm.weight.detach().float().cpu(),
            "post_attention_layernorm.weight": block.mlp_norm.weight.detach().float().cpu(),
            "self_attn.q_proj.weight": q,
            "self_attn.k_proj.weight": k,
            "self_attn.v_proj.weight": v,
            "self_attn.o_proj.weight": _numbers(block.attention.output),
            "mlp.gate_proj.weight": gate,
            "mlp.up_proj.weight": up,
            "mlp.down_proj.weight": down,
        }

    def _random(self, inputs: int) -> dict[str, Tensor]:
        """What is added to the residual begins small."""
        mould = self.mould
        size, width, inner = mould.hidden_size, inputs * mould.hidden_size, mould.intermediate_size
        queries, keys = mould.num_heads * mould.head_dim, mould.num_kv_heads * mould.head_dim
        return {
            "input_layernorm.weight": self.ones(),
            "post_attention_layernorm.weight": self.ones(),
            "self_attn.q_proj.weight": self.matrix(queries, width),
            "self_attn.k_proj.weight": self.matrix(keys, width),
            "self_attn.v_proj.weight": self.matrix(keys, width),
            "self_attn.o_proj.weight": self.matrix(size, queries, 0.1),
            "mlp.gate_proj.weight": self.matrix(inner, size),
            "mlp.up_proj.weight": self.matrix(inner, size),
            "mlp.down_proj.weight": self.matrix(size, inner, 0.1),
        }


def offsets(ids: Tensor) -> Tensor:
    """Target ids of draft ids as checkpoints store them (d2t): how far each is from its own."""
    return ids.cpu() - torch.arange(len(ids))


def _numbers(layer: Any) -> Tensor:
    return dense(layer).detach().float().cpu()


def _fits(block: DecoderBlock, mould: Mould) -> bool:
    """Whether a layer of the target can be copied: plain attention of the same shape, and an MLP no wider."""
    attention, mlp = block.attention, block.mlp
    if type(attention) is not SelfAttention or type(mlp) is not GatedMLP or mlp.activation is not silu_mul:
        return False
    wanted = AttentionShape(mould.hidden_size, mould.num_heads, mould.num_kv_heads, mould.head_dim)
    shape = attention.shape
    same = (shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.head_dim) == (
        wanted.hidden_size, wanted.num_heads, wanted.num_kv_heads, wanted.head_dim)  # fmt: skip
    plain = shape.is_plain and not block.attention_norm.offset
    return same and plain and mlp.down.weight.shape[1] <= mould.intermediate_size
