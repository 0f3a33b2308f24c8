"""Linear layers. Projections that share an input are one weight, read once."""

import torch
from torch import Tensor, nn

from outrider.kernels.linear import linear
from outrider.kernels.packed import Packed


class Linear(nn.Module):
    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.packed: Packed | None = None

    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias, self.packed)
