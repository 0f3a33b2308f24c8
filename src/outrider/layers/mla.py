"""Multi-head latent attention: all heads' keys and values come from one small vector per token, the only thing cached.
Queries are taken to the latent space, not latents to the heads' (absorbed), in prefill and decoding alike."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.kernels.attention import AttentionOptions, paged_attention
from outrider.kernels.head_linear import head_linear
from outrider.kernels.norm import Normed
from outrider.kernels.rope import rope_write, rotate
from outrider.layers.cached import CachedLayer
from outrider.layers.linear import Linear
from outrider.layers.mlp import GatedMLP
from outrider.layers.moe import MixtureMLP
from outrider.layers.narrow import narrowed
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import Rotary
from outrider.layers.split import cut, equal_share, whole
from outrider.types import Batch, Latent, Weight

INNER_EPS = 1e-6  # of the norms on query and latent, whatever rms_norm_eps says


@dataclass(frozen=True)
class LatentShape:
    hidden_size: int  # of the output
    num_heads: int
    latent_dim: int  # kv_lora_rank
    nope_dim: int  # qk_nope_head_dim: the part of a head's query and key that knows no position
    rotary_dim: int  # qk_rope_head_dim: the part that turns; its key is shared by all heads
    value_dim: int  # v_head_dim
    input_size: int | None = None  # where it differs from hidden_size
    query_rank: int | None = None  # q_lora_rank; None: queries come straight from the input
    scale: float | None = None  # None: (plain_dim + rotary_dim) ** -0.5
    bias: bool = False
    interleaved: bool = True  # the checkpoint turns pairs (2 j, 2 j + 1), else (j, j + rotary_dim / 2)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "LatentShape":
        """Reads a config.json in DeepSeek's words."""
        keys = ("hidden_size", "num_attention_heads", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")
        missing = [key for key in (*keys, "v_head_dim") if config.get(key) is None]
        if missing:
            raise ValueError(f"config.json lacks {', '.join(missing)}")
        hidden_size, num_heads, latent_dim, nope_dim, rotary_dim = (config[key] for key in keys)
        return cls(
            hidden_size=hidden_size,
            num_heads=num_heads,
            latent_dim=latent_dim,
            nope_dim=nope_dim,
            rotary_dim=rotary_dim,
            value_dim=config["v_head_dim"],
            query_rank=config.get("q_lora_rank"),
            scale=(nope_dim + rotary_dim) ** -0.5 * _stretch(rope_settings(config)) ** 2,
            bias=bool(config.get("attention_bias", False)),
            interleaved=bool(config.get("rope_interleave", True)),
        )

    @property
    def query_width(self) -> int:
        return self.num_heads * (self.nope_dim + self.rotary_dim)


def rope_settings(config: dict[str, Any]) -> dict[str, Any]:
    return {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}


def _stretch(rope: dict[str, Any]) -> float:
    """What YaRN multiplies all of a query and of a key with. What it does to their turning parts besides
    (mscale / mscale_all_dim) is in the rotary tables."""
    kind, weight = rope.get("rope_type", rope.get("type", "default")), rope.get("mscale_all_dim")
    if kind == "default" or not weight or rope.get("factor", 1.0) <= 1:
        return 1.0
    return 0.1 * weight * math.log(rope["factor"]) + 1.0


class LatentAttention(CachedLayer):
    """Parameters are kept in the order that suits the computation: of queries the plain parts of all heads come before
    the turning parts of all heads, and what turns is halved (j, j + rotary_dim / 2), whatever the checkpoint does.
    Split over ranks by heads; every rank has all latents."""

    def __init__(self, shape: LatentShape, rotary: Rotary) -> None:
        heads, whole_shape = equal_share(shape.num_heads, "num_attention_heads"), shape
        shape = replace(shape, num_heads=heads.size)
        super().__init__(Latent(shape.latent_dim + shape.rotary_dim, shape.latent_dim))
        self.shape, self.whole_shape = shape, whole_shape  # of this rank, of all together
        self.rotary = rotary
        scale = (shape.nope_dim + shape.rotary_dim) ** -0.5 if shape.scale is None else shape.scale
        self.options = AttentionOptions(scale=scale)
        rank, width = shape.query_rank, heads * shape.nope_dim + heads * shape.rotary_dim
        # queries (or what they come from), latent, the key that turns
        rows = (width if rank is None else whole(rank)) + whole(shape.latent_dim) + whole(shape.rotary_dim)
        self.inputs = Linear(shape.input_size or shape.hidden_size, rows, bias=shape.bias)
        self.query_norm = RMSNorm(rank, INNER_EPS) if rank is not None else None
        self.query = Linear(rank, width) if rank is not None else None
        self.latent_norm = RMSNorm(shape.latent_dim, INNER_EPS)
        self.key_up = nn.Parameter(torch.empty(shape.num_heads, shape.latent_dim, shape.nope_dim))
        self.value_up = nn.Parameter(torch.empty(shape.num_heads, shape.value_dim, shape.latent_dim))
        self.output = Linear(heads * shape.value_dim, shape.hidden_size, bias=shape.bias)
        cut(self.key_up, 0, heads)
        cut(self.value_up, 0, heads)

    def forward(self, x: Tensor | Normed, batch: Batch, residual: Tensor | None = None) -> Tensor:
        """x [T, in] -> [T, H], added to the residual if there is one."""
        shape, exact = self.shape, self.options.exact
        query, latent, key = self.inputs(x).split(
            [shape.query_rank or shape.query_width, shape.latent_dim, shape.rotary_dim], dim=-1
        )
        if self.query is not None and self.query_norm is not None:
            query = self.query(self.query_norm.on_the_way(query))
        plain, rope_part = (
            part.unflatten(1, (shape.num_heads, -1))
            for part in query.split([shape.num_heads * shape.nope_dim, shape.num_heads * shape.rotary_dim], dim=-1)
        )  # [T, heads, plain_dim] and [T, heads, rotary_dim]
        if batch.attending is not None:
            return self.output(self._of_heads(plain, rope_part, latent, key, batch), residual)
        assert self.pages is not None, "the layer has no cache memory yet"
        keys, values = self.pages
        # A page's row is the latent, which serves as the value, then the turned key: two writes into one row.
        places = (keys[..., shape.latent_dim :], values)
        absorbed = plain.new_empty(len(x), shape.num_heads, shape.latent_dim + shape.rotary_dim)
        rope_write(
            rope_part,
            key[:, None],
            self.latent_norm.of_heads(latent[:, None]),
            self.rotary(batch),
            places,
            batch.write_locations,
            out=absorbed[..., shape.latent_dim :],
        )
        head_linear(plain, self.key_up, exact=exact, out=absorbed[..., : shape.latent_dim])
        attended = paged_attention(absorbed, self.pages, batch, self.options)  # [T, heads, latent_dim]
        return self.output(head_linear(attended, self.value_up, exact=exact).flatten(1), residual)

    def _of_heads(self, plain: Tensor, rope_part: Tensor, latent: Tensor, key: Tensor, batch: Batch) -> Tensor:
        """The same with gradients, over keys and values that lie in no pages: every head's own, which take less
        arithmetic here than queries taken to the latents do. -> [T, heads * value_dim]."""
        assert batch.attending is not None
        shape, (cos, sin), latent = self.shape, self.rotary(batch), self.latent_norm(latent)
        own = torch.einsum("tl,hln->thn", latent, self.key_up)
        turned = rotate(key[:, None].float(), cos, sin).to(own.dtype).expand(-1, shape.num_heads, -1)
        q = torch.cat([plain, rotate(rope_part.float(), cos, sin).to(plain.dtype)], dim=-1)
        k, v = torch.cat([own, turned], dim=-1), torch.einsum("tl,hvl->thv", latent, self.value_up)
        width = max(k.shape[-1], shape.value_dim)  # kernels want them alike; zeros change nothing
        q, k, v = (F.pad(each, (0, width - each.shape[-1])) for each in (q, k, v))
        attended = batch.attending.attend(self, q, k, v, self.options.scale)
        return attended[..., : shape.value_dim].flatten(1)


class LatentBlock(nn.Module):
    """The pre-norm block: latent attention, then an MLP of any kind, each added to the residual stream."""

    def __init__(self, attention: LatentAttention, mlp: nn.Module, eps: float) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(attention.shape.hidden_size, eps)
        self.attention = attention
        self.mlp_norm = RMSNorm(attention.shape.hidden_size, eps)
        self.mlp = mlp

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.run(x, self.attention_norm.on_the_way(x), batch)

    def run(self, residual: Tensor, inputs: Tensor | Normed, batch: Batch) -> Tensor:
        """residual [T, H], inputs [T, in] -> [T, H]."""
        x = narrowed(self.attention(inputs, batch, residual), batch)
        if isinstance(self.mlp, GatedMLP | MixtureMLP):
            return self.mlp(self.mlp_norm.on_the_way(x), x)
        return x + self.mlp(self.mlp_norm(x))


# ---- where the parameters come from: DeepSeek's names and orders ----


def latent_weights(shape: LatentShape, source: str, name: str) -> dict[str, Weight]:
    """`source` is e.g. "model.layers.3.self_attn."."""

    def queries(rows: Tensor) -> Tensor:
        """[heads * (plain + rotary), in]: head by head -> all plain parts, then all that turn."""
        heads = rows.unflatten(0, (shape.num_heads, shape.nope_dim + shape.rotary_dim))
        plain, rope_part = heads.split([shape.nope_dim, shape.rotary_dim], dim=1)
        return torch.cat([plain.flatten(0, 1), _halved(shape, rope_part).flatten(0, 1)])

    def latent_and_key(rows: Tensor) -> Tensor:
        latent, key = rows.split([shape.latent_dim, shape.rotary_dim])
        return torch.cat([latent, _halved(shape, key[None])[0]])

    def inputs(tensors: list[Tensor]) -> Tensor:
        query, rest = tensors
        return torch.cat([queries(query) if shape.query_rank is None else query, latent_and_key(rest)])

    def bias(tensors: list[Tensor]) -> Tensor:
        *query, rest = tensors
        return torch.cat([*(query or [rest.new_zeros(shape.query_width)]), latent_and_key(rest)])

    def key_up(tensors: list[Tensor]) -> Tensor:
        return _keys_and_values(shape, tensors[0])[0].transpose(1, 2)

    first = "q_proj" if shape.query_rank is None else "q_a_proj"
    weights = {
        "inputs.weight": Weight((f"{source}{first}.weight", f"{source}kv_a_proj_with_mqa.weight"), inputs),
        "latent_norm.weight": Weight((f"{source}kv_a_layernorm.weight",)),
        "key_up": Weight((f"{source}kv_b_proj.weight",), key_up),
        "value_up": Weight((f"{source}kv_b_proj.weight",), lambda tensors: _keys_and_values(shape, tensors[0])[1]),
        "output.weight": Weight((f"{source}o_proj.weight",)),
    }
    if shape.query_rank is not None:
        weights["query_norm.weight"] = Weight((f"{source}q_a_layernorm.weight",))
        weights["query.weight"] = Weight((f"{source}q_b_proj.weight",), lambda tensors: queries(tensors[0]))
    if shape.bias:  # q_proj never has one
        parts = ("q_a_proj", "kv_a_proj_with_mqa") if shape.query_rank is not None else ("kv_a_proj_with_mqa",)
        weights["inputs.bias"] = Weight(tuple(f"{source}{part}.bias" for part in parts), bias)
        weights["output.bias"] = Weight((f"{source}o_proj.bias",))
    return {f"{name}{key}": weight for key, weight in weights.items()}


def _halved(shape: LatentShape, rows: Tensor) -> Tensor:
    """[heads, rotary_dim, ...]: pairs (2 j, 2 j + 1) become (j, j + rotary_dim / 2). Scores do not notice, as queries
    and keys change alike."""
    return torch.cat([rows[:, ::2], rows[:, 1::2]], dim=1) if shape.interleaved else rows


def _keys_and_values(shape: LatentShape, rows: Tensor) -> tuple[Tensor, Tensor]:
    """[heads * (plain + value), latent] -> [heads, plain, latent] and [heads, value, latent]."""
    keys, values = rows.unflatten(0, (shape.num_heads, shape.nope_dim + shape.value_dim)).split(
        [shape.nope_dim, shape.value_dim], dim=1
    )
    return keys, values
