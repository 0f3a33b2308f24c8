"""Self-attention over paged keys and values: fused qkv, optional per-head norms, rotary, output projection."""

from dataclasses import dataclass

from torch import Tensor

from outrider.kernels.attention import AttentionOptions, paged_attention
from outrider.kernels.rope import rope_write
from outrider.layers.cached import CachedLayer
from outrider.layers.linear import Linear
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import Rotary
from outrider.types import Batch, Paged


@dataclass(frozen=True)
class AttentionShape:
    hidden_size: int  # of the output
    num_heads: int
    num_kv_heads: int
    head_dim: int
    input_size: int | None = None  # where it differs from hidden_size
    window: int = 0
    qkv_bias: bool = False
    output_bias: bool = False
    head_norm_eps: float | None = None  # RMSNorm of every query and key head


class SelfAttention(CachedLayer):
    def __init__(self, shape: AttentionShape, rotary: Rotary) -> None:
        super().__init__(Paged(shape.num_kv_heads, shape.head_dim, shape.head_dim, shape.window))
        self.shape = shape
        self.rotary = rotary
        self.options = AttentionOptions(scale=shape.head_dim**-0.5, window=shape.window)
        rows = (shape.num_heads + 2 * shape.num_kv_heads) * shape.head_dim
        self.qkv = Linear(shape.input_size or shape.hidden_size, rows, bias=shape.qkv_bias)
        self.output = Linear(shape.num_heads * shape.head_dim, shape.hidden_size, bias=shape.output_bias)
        norms = shape.head_norm_eps is not None
        self.q_norm = RMSNorm(shape.head_dim, shape.head_norm_eps or 0.0) if norms else None
        self.k_norm = RMSNorm(shape.head_dim, shape.head_norm_eps or 0.0) if norms else None

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, in] -> q [T, heads, D], k and v [T, kv heads, D], normed where the checkpoint norms them."""
        shape = self.shape
        qkv = self.qkv(x).view(len(x), -1, shape.head_dim)
        q, k, v = qkv.split([shape.num_heads, shape.num_kv_heads, shape.num_kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return q, k, v

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        assert self.pages is not None, "the layer has no cache memory yet"
        q, k, v = self.project(x)
        q = rope_write(q, k, v, self.rotary(batch), self.pages, batch.write_locations)
        return self.output(paged_attention(q, self.pages, batch, self.options).flatten(1))
