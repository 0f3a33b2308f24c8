"""Self-attention over paged keys and values: fused qkv, optional per-head norms, rotary, output projection."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from outrider.kernels.attention import AttentionOptions, paged_attention
from outrider.kernels.linear import linear
from outrider.kernels.norm import Normed, materialised
from outrider.kernels.rope import HeadNorms, rope_write, rotate
from outrider.kernels.take import take_rows
from outrider.layers.cached import CachedLayer
from outrider.layers.linear import Linear
from outrider.layers.narrow import narrowed_batch
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import Rotary
from outrider.layers.split import current_ranks, cut, equal_share, key_share
from outrider.types import STREAM_IS_FREE, Batch, Paged


@dataclass(frozen=True)
class AttentionShape:
    hidden_size: int  # of the output
    num_heads: int
    num_kv_heads: int
    head_dim: int
    input_size: int | None = None  # where it differs from hidden_size
    window: int = 0
    scale: float | None = None  # None: head_dim ** -0.5
    softcap: float = 0.0
    bidirectional: bool = False  # within an image a row sees what comes after it too
    qkv_bias: bool = False
    output_bias: bool = False
    head_norm_eps: float | None = None  # RMSNorm of every query and key head
    head_norm_offset: float = 0.0
    sinks: bool = False  # a learnt logit per head that takes weight and brings no value

    def __post_init__(self) -> None:
        if self.head_dim < 1:
            raise ValueError(
                f"config.json: hidden_size {self.hidden_size} is less than num_attention_heads ({self.num_heads}), and "
                "head_dim is not given"
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"config.json: num_attention_heads ({self.num_heads}) must be a multiple of num_key_value_heads "
                f"({self.num_kv_heads})"
            )

    @property
    def is_plain(self) -> bool:
        """Whether the fused native block can compute it."""
        return not (self.softcap or self.bidirectional or self.sinks)


class SelfAttention(CachedLayer):
    """Subclasses may say how q, k and v come about (`project`), and what becomes of the result (`finish`)."""

    def __init__(self, shape: AttentionShape, rotary: Rotary) -> None:
        heads = equal_share(shape.num_heads, "num_attention_heads")
        kv_heads, whole_shape = key_share(shape.num_heads, shape.num_kv_heads), shape
        shape = replace(shape, num_heads=heads.size, num_kv_heads=kv_heads.size)
        super().__init__(Paged(shape.num_kv_heads, shape.head_dim, shape.head_dim, shape.window))
        self.shape = shape
        self.whole_shape, self.heads, self.ranks = whole_shape, heads, current_ranks()  # where it is split
        self.rotary = rotary
        scale = shape.head_dim**-0.5 if shape.scale is None else shape.scale
        self.options = AttentionOptions(
            scale=scale, window=shape.window, softcap=shape.softcap, bidirectional=shape.bidirectional
        )
        queries, keys = heads * shape.head_dim, kv_heads * shape.head_dim
        self.qkv = Linear(shape.input_size or shape.hidden_size, queries + keys + keys, bias=shape.qkv_bias)
        self.output = Linear(queries, shape.hidden_size, bias=shape.output_bias)
        eps, offset = shape.head_norm_eps, shape.head_norm_offset
        self.q_norm = RMSNorm(shape.head_dim, eps, offset=offset) if eps is not None else None
        self.k_norm = RMSNorm(shape.head_dim, eps, offset=offset) if eps is not None else None
        self.sinks = nn.Parameter(torch.empty(shape.num_heads)) if shape.sinks else None
        if self.sinks is not None:
            cut(self.sinks, 0, heads)

    def project(self, x: Tensor | Normed) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, in] -> q [T, heads, D], k and v [T, kv heads, D]; q and k are normed later."""
        shape = self.shape
        qkv = self.qkv(x).view(len(x), -1, shape.head_dim)
        q, k, v = qkv.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
        return q, k, v

    @property
    def head_norms(self) -> HeadNorms | None:
        q, k = self.q_norm, self.k_norm
        if q is None or k is None:
            return None
        return HeadNorms(q.weight, k.weight, q.eps, q.offset, q.wide)

    def finish(
        self, attended: Tensor, x: Tensor | Normed, residual: Tensor | None = None, *, overwrite: bool = False
    ) -> Tensor:
        """attended [T, heads, D] and the layer's input [T, in] -> [T, H], added to the residual if there is one, maybe
        in its place."""
        return self.output(attended.flatten(1), residual, overwrite=overwrite)

    def forward(self, x: Tensor | Normed, batch: Batch, residual: Tensor | None = None) -> Tensor:
        """x [T, in] -> [T, H], added to the residual if there is one. Where few rows are read of it, only those may be
        there: see narrow.py."""
        if residual is not None and self._can_be_narrow:
            found = narrowed_batch(batch)
            if found is not None:
                rows, few = found
                x = materialised(x)
                self.remember(x, batch)
                return self(take_rows(x, rows), few, take_rows(residual, rows))
        overwrite, (q, k, v) = batch.memo.get(STREAM_IS_FREE, False), self.project(x)
        if batch.attending is not None:
            q, k = (each.to(v.dtype) for each in self._turned(q, k, batch))
            return self.finish(batch.attending.attend(self, q, k, v, self.options.scale), x, residual)
        assert self.pages is not None, "the layer has no cache memory yet"
        q = rope_write(
            q, k, v, self.rotary(batch), self.pages, batch.write_locations, self.head_norms, scales=self.options.scales
        )
        attended = paged_attention(q, self.pages, batch, self.options, self.sinks)
        return self.finish(attended, x, residual, overwrite=overwrite)

    @property
    def _can_be_narrow(self) -> bool:
        """Whether keys and values can be computed without queries. A product that leaves out the queries' part may
        have other bits."""
        return type(self).project is SelfAttention.project and not self.qkv.exact

    def remember(self, x: Tensor, batch: Batch) -> None:
        """Only keys and values of x [T, in]: of the joint projection the queries' rows are left out."""
        shape, qkv = self.shape, self.qkv
        first = shape.num_heads * shape.head_dim
        bias = qkv.bias[first:] if qkv.bias is not None else None
        packed = qkv.packed.rows_from(first) if qkv.packed is not None else None
        rows = linear(x, qkv.weight[first:], bias, packed).view(len(x), -1, shape.head_dim)
        k, v = rows.split(shape.num_kv_heads, dim=1)
        if self.k_norm is not None:
            k = self.k_norm(k)
        if batch.attending is not None:
            batch.attending.remember(self, rotate(k.float(), *self.rotary(batch)).to(v.dtype), v)
            return
        assert self.pages is not None, "the layer has no cache memory yet"
        scales = self.options.scales
        rope_write(
            k, k, v, self.rotary(batch), self.pages, batch.write_locations, scales=scales
        )  # there are no queries

    def _turned(self, q: Tensor, k: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """Normed and turned by their positions, with gradients."""
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        cos, sin = self.rotary(batch)
        return rotate(q.float(), cos, sin), rotate(k.float(), cos, sin)
