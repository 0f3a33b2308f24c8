"""The gated feed-forward block: down(silu(gate) * up)."""

from torch import Tensor, nn

from outrider.kernels.activation import silu_mul
from outrider.layers.linear import Linear


class GatedMLP(nn.Module):
    def __init__(self, hidden_size: int, intermediate_size: int, *, bias: bool = False) -> None:
        super().__init__()
        self.gate_up = Linear(hidden_size, 2 * intermediate_size, bias=bias)
        self.down = Linear(intermediate_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu_mul(self.gate_up(x)))
