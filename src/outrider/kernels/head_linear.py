"""Every head's rows by that head's own weight."""

import torch
from torch import Tensor

from outrider.kernels.dispatch import use_triton
from outrider.kernels.linear import linear


def head_linear_reference(x: Tensor, weight: Tensor) -> Tensor:
    """Head after head: the rows of `linear` do not depend on each other."""
    return torch.stack([linear(x[:, head], each) for head, each in enumerate(weight)], dim=1)


def head_linear(x: Tensor, weight: Tensor, *, exact: bool = False, out: Tensor | None = None) -> Tensor:
    """x [T, heads, in] and each head's own weight [heads, out, in] -> [T, heads, out], into `out` if it is given."""
    if use_triton(x):
        from outrider.kernels.gpu import head_linear as gpu

        if exact or len(x) <= gpu.FEW_ROWS:
            return gpu.head_linear(x, weight, x.new_empty(*x.shape[:2], weight.shape[1]) if out is None else out)
    if x.is_cpu or exact:
        found = head_linear_reference(x, weight)
    else:
        found = torch.bmm(x.transpose(0, 1), weight.transpose(1, 2)).transpose(0, 1)
    return found if out is None else out.copy_(found)
