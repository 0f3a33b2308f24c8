"""Linear layers. Projections that share an input are one weight, read once."""

import torch
from torch import Tensor, nn

from outrider.kernels.linear import linear, silu_linear
from outrider.kernels.packed import Packed


class Linear(nn.Module):
    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.packed: Packed | None = None
        self.exact = False

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [T, in] -> [T, out], added to the residual if there is one."""
        return linear(x, self.weight, self.bias, self.packed, residual=residual, exact=self.exact)

    def gated(self, x: Tensor) -> Tensor:
        """x [T, in] -> silu(first half) * second half of the output, [T, out / 2]."""
        return silu_linear(x, self.weight, self.bias, self.packed, exact=self.exact)
