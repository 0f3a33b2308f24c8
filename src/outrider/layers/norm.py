"""Norm layers."""

import torch
from torch import Tensor, nn

from outrider.kernels.dispatch import use_triton
from outrider.kernels.norm import rms_norm


class RMSNorm(nn.Module):
    """x over its root mean square, times (weight + offset). `wide`: multiplied before going back to 16 bits."""

    def __init__(self, size: int, eps: float, *, offset: float = 0.0, wide: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.offset = offset
        self.wide = wide or offset != 0.0

    def into(self, out: Tensor, x: Tensor) -> None:
        """x [T, H], normed, becomes part of wider rows: out [T, H]."""
        if use_triton(x):
            from outrider.kernels.gpu import norm as gpu

            gpu.rms_norm(x, self.weight, self.eps, offset=self.offset, wide=self.wide, out=out)
        else:
            out.copy_(self(x))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, offset=self.offset, wide=self.wide)


def side_by_side(*parts: tuple[RMSNorm, Tensor]) -> Tensor:
    """Tensors [T, H], each normed by its own norm -> one [T, sum of H]."""
    if torch.is_grad_enabled():  # autograd does not follow writes into parts of a tensor
        return torch.cat([norm(x) for norm, x in parts], dim=-1)
    widths = [x.shape[-1] for _, x in parts]
    joined = parts[0][1].new_empty(len(parts[0][1]), sum(widths))
    for (norm, x), out in zip(parts, joined.split(widths, dim=-1), strict=True):
        norm.into(out, x)
    return joined
