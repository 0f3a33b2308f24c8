"""Feed-forward blocks: down(act(gate) * up), and down(act(up)) without a gate."""

from torch import Tensor, nn

from outrider.kernels.activation import Activation, relu2, silu_mul
from outrider.kernels.norm import Normed
from outrider.layers.linear import Linear
from outrider.layers.split import width_share


class GatedMLP(nn.Module):
    def __init__(
        self, hidden_size: int, intermediate_size: int, *, bias: bool = False, activation: Activation = silu_mul
    ) -> None:
        super().__init__()
        width = width_share(intermediate_size, "intermediate_size")
        self.gate_up = Linear(hidden_size, width + width, bias=bias)
        self.down = Linear(width, hidden_size, bias=bias)
        self.activation = activation

    def forward(self, x: Tensor | Normed, residual: Tensor | None = None, *, overwrite: bool = False) -> Tensor:
        """x [T, H] -> [T, H], added to the residual if there is one, maybe in its place."""
        return self.down(self.gate_up.gated(x, self.activation), residual, overwrite=overwrite)


class PlainMLP(nn.Module):
    def __init__(
        self, hidden_size: int, intermediate_size: int, *, bias: bool = False, activation: Activation = relu2
    ) -> None:
        super().__init__()
        width = width_share(intermediate_size, "intermediate_size")
        self.up = Linear(hidden_size, width, bias=bias)
        self.down = Linear(width, hidden_size, bias=bias)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))
