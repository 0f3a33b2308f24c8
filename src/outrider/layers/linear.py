"""Linear layers. Projections that share an input are one weight, read once."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from outrider.kernels.linear import linear, silu_linear
from outrider.kernels.packed import Packed
from outrider.kernels.quantised import Quantised

_is_deferred = False


@contextmanager
def deferred() -> Iterator[None]:
    """Matrices of modules made inside have no memory until they are filled: some will be kept in few bits."""
    global _is_deferred
    before, _is_deferred = _is_deferred, True
    try:
        yield
    finally:
        _is_deferred = before


def empty_matrix(num_rows: int, num_columns: int) -> nn.Parameter:
    return nn.Parameter(
        torch.empty(1, 1).expand(num_rows, num_columns) if _is_deferred else torch.empty(num_rows, num_columns)
    )


def give_memory(parameter: nn.Parameter) -> None:
    """Allocates the weight of a layer that was built without memory."""
    if parameter.dim() == 2 and parameter.stride() == (0, 0):
        parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)


def take_memory(parameter: nn.Parameter) -> None:
    """From one whose matrix is kept in another form. It has its shape still, and whoever reads it finds out."""
    nothing = torch.full((1,), torch.nan, dtype=parameter.dtype, device=parameter.device)
    parameter.data = nothing.expand(parameter.shape)


class Linear(nn.Module):
    def __init__(self, in_features: int, out_features: int, *, bias: bool = False) -> None:
        super().__init__()
        self.weight = empty_matrix(out_features, in_features)
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None
        self.packed: Packed | Quantised | None = None
        self.exact = False

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """x [T, in] -> [T, out], added to the residual if there is one."""
        return linear(x, self.weight, self.bias, self.packed, residual=residual, exact=self.exact)

    def gated(self, x: Tensor) -> Tensor:
        """x [T, in] -> silu(first half) * second half of the output, [T, out / 2]."""
        return silu_linear(x, self.weight, self.bias, self.packed, exact=self.exact)
