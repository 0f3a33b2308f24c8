"""Norm layers."""

import torch
from torch import Tensor, nn

from outrider.kernels.norm import rms_norm


class RMSNorm(nn.Module):
    """x over its root mean square, times (weight + offset). `wide`: multiplied before going back to 16 bits."""

    def __init__(self, size: int, eps: float, *, offset: float = 0.0, wide: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.offset = offset
        self.wide = wide or offset != 0.0

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, offset=self.offset, wide=self.wide)
