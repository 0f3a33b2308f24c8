"""Norm layers."""

import torch
from torch import Tensor, nn

from outrider.kernels.dispatch import use_triton
from outrider.kernels.norm import Normed, rms_norm

# A product norms its rows on the way where they are short: every program of it does so anew. Measured on one row of 576
# numbers (6 % of a step saved), 2,560 (10 % lost) and 4,096 (6 % lost): scripts/h200/rows.py
MOST_ROWS, MOST_NUMBERS = 8, 1024  # the second: of all rows together


def norm_on_the_way(model: nn.Module) -> None:
    """Lets products norm their own rows, in a model that is filled and stays as it is: other bits, a launch less."""
    with torch.inference_mode():
        for module in model.modules():
            if isinstance(module, RMSNorm) and use_triton(module.weight):
                module.floats = module.weight.detach().float()  # four bytes can be copied without waiting


class RMSNorm(nn.Module):
    """x over its root mean square, times (weight + offset). `wide`: multiplied before going back to 16 bits."""

    def __init__(self, size: int, eps: float, *, offset: float = 0.0, wide: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size))
        self.eps = eps
        self.offset = offset
        self.wide = wide or offset != 0.0
        self.floats: Tensor | None = None  # the weight, where the next product may norm its rows itself

    def on_the_way(self, x: Tensor) -> Tensor | Normed:
        """x [T, H], normed, or to be normed by whoever multiplies with it first: for those who can do both."""
        if self.floats is None or not self.goes_on_the_way(x):
            return self(x)
        return Normed(x, self.floats, self.eps, self.offset, self.wide)

    def goes_on_the_way(self, x: Tensor) -> bool:
        return self.floats is not None and len(x) <= MOST_ROWS and x.numel() <= MOST_NUMBERS and use_triton(x)

    def of_heads(self, x: Tensor) -> Normed:
        """x [T, heads, D], to be normed where it is written to its pages."""
        return Normed(x, self.weight, self.eps, self.offset, self.wide)

    def added(self, x: Tensor, residual: Tensor) -> Tensor:
        """x [T, H], normed, plus the residual."""
        if use_triton(x):
            from outrider.kernels.gpu import norm as gpu

            return gpu.rms_norm(x, self.weight, self.eps, offset=self.offset, wide=self.wide, residual=residual)
        return residual + self(x)

    def added_for(self, x: Tensor, residual: Tensor, following: "RMSNorm | None") -> tuple[Tensor, Tensor | None]:
        """added(), and what the following norm makes of that where it costs nothing; else None."""
        if following is None or not use_triton(x) or following.goes_on_the_way(x):
            return self.added(x, residual), None
        from outrider.kernels.gpu import norm as gpu

        return gpu.normed_twice(self.of_heads(x), residual, following.of_heads(x))

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
