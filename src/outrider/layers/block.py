"""The pre-norm decoder block: x + attention(norm(x)), then x + mlp(norm(x))."""

from torch import Tensor, nn

from outrider.layers.attention import AttentionShape, SelfAttention
from outrider.layers.mlp import GatedMLP
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import Rotary
from outrider.types import Batch, Weight


class DecoderBlock(nn.Module):
    def __init__(self, shape: AttentionShape, mlp: GatedMLP, eps: float, rotary: Rotary) -> None:
        super().__init__()
        self.attention_norm = RMSNorm(shape.hidden_size, eps)
        self.attention = SelfAttention(shape, rotary)
        self.mlp_norm = RMSNorm(shape.hidden_size, eps)
        self.mlp = mlp

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        x = x + self.attention(self.attention_norm(x), batch)
        return x + self.mlp(self.mlp_norm(x))


def block_weights(block: DecoderBlock, source: str) -> dict[str, Weight]:
    """Checkpoint names of a block in Llama's naming; `source` is e.g. "model.layers.3."."""
    weights = {
        "attention_norm.weight": Weight((f"{source}input_layernorm.weight",)),
        "mlp_norm.weight": Weight((f"{source}post_attention_layernorm.weight",)),
    }
    weights |= attention_weights(block.attention, f"{source}self_attn.", "attention.")
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
