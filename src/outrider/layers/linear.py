"""Linear layers. Projections that share an input are one weight, read once."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor, nn

from outrider.kernels.activation import Activation, silu_mul
from outrider.kernels.linear import gated_linear, linear
from outrider.kernels.norm import Normed
from outrider.kernels.packed import Packed
from outrider.kernels.quantised import Quantised
from outrider.layers.split import Share, current_ranks, cut, whole

_is_deferred: ContextVar[bool] = ContextVar("deferred", default=False)


@contextmanager
def deferred() -> Iterator[None]:
    """Matrices of modules made inside have no memory until they are filled: some will be kept in few bits."""
    token = _is_deferred.set(True)
    try:
        yield
    finally:
        _is_deferred.reset(token)


def empty_matrix(*sizes: int) -> nn.Parameter:
    """[N, K], or a stack of such [E, N, K]."""
    return nn.Parameter(torch.empty([1] * len(sizes)).expand(sizes) if _is_deferred.get() else torch.empty(sizes))


def has_memory(parameter: Tensor) -> bool:
    """Whether there is a number for every place."""
    return all(step > 0 or size == 1 for step, size in zip(parameter.stride(), parameter.shape, strict=True))


def give_memory(parameter: nn.Parameter) -> None:
    """Allocates the weight of a layer that was built without memory."""
    if not has_memory(parameter):
        parameter.data = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)


def take_memory(parameter: nn.Parameter, dtype: torch.dtype | None = None) -> None:
    """From one whose matrix is kept in another form. It has its shape still, and whoever reads it finds out. `dtype`:
    of the numbers that it stands for, None: its own."""
    nothing = torch.full((1,), torch.nan, dtype=dtype or parameter.dtype, device=parameter.device)
    parameter.data = nothing.expand(parameter.shape)


class Linear(nn.Module):
    """Sizes that are a Share say how it is split over ranks: of outputs each rank computes its own, of inputs each has
    its own, and the results are summed."""

    def __init__(self, in_features: int | Share, out_features: int | Share, *, bias: bool = False) -> None:
        super().__init__()
        inputs, outputs = (each if isinstance(each, Share) else whole(each) for each in (in_features, out_features))
        self.weight = empty_matrix(outputs.size, inputs.size)
        self.bias = nn.Parameter(torch.empty(outputs.size)) if bias else None
        self.packed: Packed | Quantised | None = None
        self.exact = False
        self.ranks = None if inputs.is_whole else current_ranks()  # that the results are summed over
        cut(self.weight, *((0, outputs) if inputs.is_whole else (1, inputs)))
        if self.bias is not None:
            cut(self.bias, 0, outputs)

    def forward(self, x: Tensor | Normed, residual: Tensor | None = None, *, overwrite: bool = False) -> Tensor:
        """x [T, in] -> [T, out], added to the residual if there is one, maybe in its place."""
        if self.ranks is not None:
            return self._summed(x, residual)
        weight, bias = self.weight, self.bias
        return linear(x, weight, bias, self.packed, residual=residual, exact=self.exact, overwrite=overwrite)

    def gated(self, x: Tensor | Normed, activation: Activation = silu_mul) -> Tensor:
        """x [T, in] -> silu(first half) * second half of the output, or what else is made of them, [T, out / 2]."""
        return gated_linear(x, self.weight, self.bias, self.packed, activation, exact=self.exact)

    def _summed(self, x: Tensor | Normed, residual: Tensor | None) -> Tensor:
        assert self.ranks is not None
        y = self.ranks.sum(linear(x, self.weight, None, self.packed, exact=self.exact))
        if self.bias is not None:
            y = y + self.bias
        return y if residual is None else residual + y
