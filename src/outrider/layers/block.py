"""Decoder blocks: attention, then an MLP, each added to the residual stream."""

from torch import Tensor, nn

from outrider.kernels.block import NativeBlock
from outrider.kernels.dispatch import use_native
from outrider.kernels.norm import Normed
from outrider.layers.attention import SelfAttention
from outrider.layers.fused import BlockParts, Fusable, block_parts, native_block
from outrider.layers.mlp import GatedMLP
from outrider.layers.moe import MixtureMLP
from outrider.layers.narrow import narrowed
from outrider.layers.norm import RMSNorm
from outrider.types import Batch, Weight


class Block(Fusable):
    """Attention over some input, added to the residual; then the MLP. Subclasses say what the input is."""

    def __init__(self, attention: SelfAttention, mlp: nn.Module, mlp_norm: RMSNorm) -> None:
        super().__init__()
        self.attention = attention
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self._native: NativeBlock | None = None

    @property
    def parts(self) -> BlockParts | None:
        return None  # its input is given

    def run(self, residual: Tensor, inputs: Tensor | Normed, batch: Batch) -> Tensor:
        """residual [T, H], inputs [T, in] -> [T, H]: a new tensor, or the residual's where nobody needs that. Where few
        rows are read of it, only those may be there: see narrow.py."""
        if use_native(residual) and isinstance(inputs, Tensor) and batch.attending is None and self.has_native():
            assert self._native is not None
            return self._native(residual, inputs, batch, self.attention.rotary(batch))
        x = narrowed(self.attention(inputs, batch, residual), batch)
        if isinstance(self.mlp, GatedMLP):
            return self.mlp(self.mlp_norm.on_the_way(x), x, overwrite=True)
        if isinstance(self.mlp, MixtureMLP):
            return self.mlp(self.mlp_norm.on_the_way(x), x)
        return x + self.mlp(self.mlp_norm(x))

    def has_native(self) -> bool:
        if self._native is None or self._native.pages is not self.attention.pages:
            parts = block_parts(self.attention, self.mlp, self.mlp_norm)
            self._native = native_block(parts) if parts is not None else None
        return self._native is not None


class DecoderBlock(Block):
    """The pre-norm block of most targets: the attention's input is the residual, normed."""

    def __init__(self, attention: SelfAttention, mlp: nn.Module, eps: float, *, norm_offset: float = 0.0) -> None:
        size = attention.shape.hidden_size
        super().__init__(attention, mlp, RMSNorm(size, eps, offset=norm_offset))
        self.attention_norm = RMSNorm(size, eps, offset=norm_offset)

    @property
    def parts(self) -> BlockParts | None:
        if type(self).forward is not DecoderBlock.forward:
            return None
        return block_parts(self.attention, self.mlp, self.mlp_norm, attention_norm=self.attention_norm)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.run(x, self.attention_norm.on_the_way(x), batch)


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
