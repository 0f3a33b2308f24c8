"""Decoder blocks: attention, then an MLP, each added to the residual stream."""

from torch import Tensor, nn

from outrider.kernels.activation import silu_mul
from outrider.kernels.block import BlockShape, NativeBlock
from outrider.kernels.dispatch import use_native
from outrider.kernels.quantised import Quantised
from outrider.layers.attention import SelfAttention
from outrider.layers.mlp import GatedMLP
from outrider.layers.norm import RMSNorm
from outrider.types import Batch, Weight


class Block(nn.Module):
    """Attention over some input, added to the residual; then the MLP. Subclasses say what the input is."""

    def __init__(self, attention: SelfAttention, mlp: nn.Module, mlp_norm: RMSNorm) -> None:
        super().__init__()
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self._native: NativeBlock | None = None

    @property
    def is_plain(self) -> bool:
        """Whether the native block knows how to compute it."""
        mlp, attention = self.mlp, self.attention
        gated = type(mlp) is GatedMLP and mlp.activation is silu_mul and attention.ranks is None
        return gated and type(attention) is SelfAttention and attention.shape.is_plain and not self.mlp_norm.offset

    def run(self, residual: Tensor, inputs: Tensor, batch: Batch) -> Tensor:
        """residual [T, H], inputs [T, in] -> [T, H], always a new tensor."""
        if use_native(residual) and self.is_plain:
            return self._native_block()(residual, inputs, batch, self.attention.rotary(batch))
        x = self.attention(inputs, batch, residual)
        if isinstance(self.mlp, GatedMLP):
            return self.mlp(self.mlp_norm(x), x)
        return x + self.mlp(self.mlp_norm(x))

    def _native_block(self) -> NativeBlock:
        attention, mlp, pages = self.attention, self.mlp, self.attention.pages
        assert isinstance(mlp, GatedMLP)
        assert pages is not None, "the layer has no cache memory yet"
        if self._native is None or self._native.pages is not pages:
            q_norm, k_norm = attention.q_norm, attention.k_norm
            shape = BlockShape(
                num_heads=attention.shape.num_heads,
                window=attention.shape.window,
                eps=self.mlp_norm.eps,
                head_eps=q_norm.eps if q_norm is not None else 0.0,
                scale=attention.options.scale,
            )
            linears = {
                "qkv": attention.qkv,
                "output": attention.output,
                "gate_up": mlp.gate_up,
                "down": mlp.down,
            }
            vectors = {
                **{f"{name}_bias": linear.bias for name, linear in linears.items()},
                "q_norm": q_norm.weight if q_norm is not None else None,
                "k_norm": k_norm.weight if k_norm is not None else None,
                "mlp_norm": self.mlp_norm.weight,
            }
            matrices = {}
            for name, linear in linears.items():
                assert not isinstance(linear.packed, Quantised), "that is for GPUs"
                matrices[name] = (linear.weight, linear.packed)
            self._native = NativeBlock(shape, matrices, vectors, pages)
        return self._native


class DecoderBlock(Block):
    """The pre-norm block of most targets: the attention's input is the residual, normed."""

    def __init__(self, attention: SelfAttention, mlp: nn.Module, eps: float, *, norm_offset: float = 0.0) -> None:
        size = attention.shape.hidden_size
        super().__init__(attention, mlp, RMSNorm(size, eps, offset=norm_offset))
        self.attention_norm = RMSNorm(size, eps, offset=norm_offset)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.run(x, self.attention_norm(x), batch)


def block_weights(block: DecoderBlock, source: str) -> dict[str, Weight]:
    """Checkpoint names of a block in Llama's naming; `source` is e.g. "model.layers.3.". Of an MLP that is no
    GatedMLP the target's file says them."""
    weights = {
        "attention_norm.weight": Weight((f"{source}input_layernorm.weight",)),
        "mlp_norm.weight": Weight((f"{source}post_attention_layernorm.weight",)),
    }
    weights |= attention_weights(block.attention, f"{source}self_attn.", "attention.")
    if isinstance(block.mlp, GatedMLP):
        weights |= mlp_weights(block.mlp, f"{source}mlp.", "mlp.")
    return weights


def attention_weights(attention: SelfAttention, source: str, name: str) -> dict[str, Weight]:
    parts = ("q_proj", "k_proj", "v_proj")
    weights = {
        f"{name}qkv.weight": Weight(tuple(f"{source}{part}.weight" for part in parts)),
        f"{name}output.weight": Weight((f"{source}o_proj.weight",)),
    }
    if attention.qkv.bias is not None:
        weights[f"{name}qkv.bias"] = Weight(tuple(f"{source}{part}.bias" for part in parts))
    if attention.output.bias is not None:
        weights[f"{name}output.bias"] = Weight((f"{source}o_proj.bias",))
    if attention.q_norm is not None:
        weights[f"{name}q_norm.weight"] = Weight((f"{source}q_norm.weight",))
        weights[f"{name}k_norm.weight"] = Weight((f"{source}k_norm.weight",))
    if attention.sinks is not None:
        weights[f"{name}sinks"] = Weight((f"{source}sinks",))
    return weights


def mlp_weights(mlp: GatedMLP, source: str, name: str) -> dict[str, Weight]:
    weights = {
        f"{name}gate_up.weight": Weight((f"{source}gate_proj.weight", f"{source}up_proj.weight")),
        f"{name}down.weight": Weight((f"{source}down_proj.weight",)),
    }
    if mlp.down.bias is not None:
        weights[f"{name}gate_up.bias"] = Weight((f"{source}gate_proj.bias", f"{source}up_proj.bias"))
        weights[f"{name}down.bias"] = Weight((f"{source}down_proj.bias",))
    return weights
