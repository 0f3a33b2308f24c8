"""y = x W^T + b. On the CPU a native kernel whose rows do not depend on each other."""

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels import native
from outrider.kernels.dispatch import use_native
from outrider.kernels.packed import Packed


def linear_reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    if x.device.type == "cpu" and x.dtype != torch.float32:
        # oneDNN's 16-bit path dies of an illegal instruction on virtual machines that promise AMX and lack it.
        wide = F.linear(x.float(), weight.float(), None if bias is None else bias.float())
        return wide.to(x.dtype)
    return F.linear(x, weight, bias)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, packed: Packed | None = None) -> Tensor:
    """x [T, in], weight [out, in], bias [out] -> [T, out]; `packed` is the same weight in a smaller form."""
    if use_native(x):
        return native.linear(x, weight, bias, packed)
    return linear_reference(x, weight, bias)
