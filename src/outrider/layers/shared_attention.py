"""Attention whose values are normed like its keys, and attention that reads the keys and values of another layer."""

from dataclasses import replace

from torch import Tensor, nn

from outrider.kernels.attention import paged_attention
from outrider.kernels.norm import Normed, rms_norm
from outrider.kernels.rope import rotate
from outrider.layers.attention import AttentionShape, SelfAttention
from outrider.layers.block import attention_weights
from outrider.layers.linear import Linear
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import Rotary
from outrider.layers.split import equal_share, key_share, split_over
from outrider.types import Batch, Weight


class ValueNormAttention(SelfAttention):
    """Values are normed too, without a weight; they may be the keys before their own norm."""

    def __init__(self, shape: AttentionShape, rotary: Rotary, eps: float, *, values_are_keys: bool) -> None:
        super().__init__(shape, rotary)
        self.eps = eps
        self.q_norm = RMSNorm(shape.head_dim, eps, wide=True)
        self.k_norm = RMSNorm(shape.head_dim, eps, wide=True)
        self.values_are_keys = values_are_keys
        if values_are_keys:
            heads = equal_share(shape.num_heads, "num_attention_heads")
            rows = (heads + key_share(shape.num_heads, shape.num_kv_heads)) * shape.head_dim
            self.qkv = Linear(shape.hidden_size, rows, bias=shape.qkv_bias)

    def project(self, x: Tensor | Normed) -> tuple[Tensor, Tensor, Tensor]:
        heads = self.qkv(x).view(len(x), -1, self.shape.head_dim)
        q, *parts = heads.tensor_split([self.shape.num_heads, self.shape.num_heads + self.shape.num_kv_heads], dim=1)
        k, v = (parts[0], parts[0]) if self.values_are_keys else parts
        return q, k, rms_norm(v, None, self.eps)


class SharedAttention(nn.Module):
    """Has queries only, and asks the keys and values of another layer. It remembers nothing itself, and is split over
    ranks as that layer is."""

    def __init__(self, source: SelfAttention, shape: AttentionShape, rotary: Rotary, eps: float) -> None:
        super().__init__()
        self.source = (source,)  # in a tuple: its parameters and pages are its own
        self.rotary = rotary
        self.options = replace(source.options, window=shape.window)
        with split_over(source.ranks):
            heads = equal_share(shape.num_heads, "num_attention_heads")
            self.shape = replace(shape, num_heads=heads.size, num_kv_heads=source.shape.num_kv_heads)
            self.query = Linear(shape.hidden_size, heads * shape.head_dim, bias=shape.qkv_bias)
            self.output = Linear(heads * shape.head_dim, shape.hidden_size, bias=shape.output_bias)
        self.q_norm = RMSNorm(shape.head_dim, eps, wide=True)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        (source,) = self.source
        assert source.pages is not None, "the layer has no cache memory yet"
        q = self.query(x).view(len(x), -1, self.shape.head_dim)
        q = rotate(self.q_norm(q), *self.rotary(batch))
        return self.output(paged_attention(q, source.pages, batch, self.options).flatten(1))


def value_norm_weights(attention: ValueNormAttention, source: str, name: str) -> dict[str, Weight]:
    """Checkpoint names; `source` is e.g. "model.layers.3.self_attn."."""
    weights = attention_weights(attention, source, name)
    if not attention.values_are_keys:
        return weights
    kept = {key: tuple(each for each in weight.names if ".v_proj." not in each) for key, weight in weights.items()}
    return {key: Weight(names) for key, names in kept.items()}


def shared_attention_weights(attention: SharedAttention, source: str, name: str) -> dict[str, Weight]:
    weights = {
        f"{name}query.weight": Weight((f"{source}q_proj.weight",)),
        f"{name}q_norm.weight": Weight((f"{source}q_norm.weight",)),
        f"{name}output.weight": Weight((f"{source}o_proj.weight",)),
    }
    if attention.query.bias is not None:
        weights[f"{name}query.bias"] = Weight((f"{source}q_proj.bias",))
    if attention.output.bias is not None:
        weights[f"{name}output.bias"] = Weight((f"{source}o_proj.bias",))
    return weights
