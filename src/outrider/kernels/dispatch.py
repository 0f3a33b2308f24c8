"""Which implementation of an operation runs: the native one for float32 on the CPU, Triton on a GPU, else the torch
reference."""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from outrider.kernels import native_library


def use_native(x: Tensor) -> bool:
    """True where the native kernels can take this input (they know no autograd) and were built.

    Asked several times a layer, so it looks at the input alone: weights and pages share its device and dtype."""
    return (
        x.dtype is torch.float32 and x.is_cpu and not torch.is_grad_enabled() and native_library.library() is not None
    )


def use_native_round(x: Tensor) -> bool:
    """True where the operations of a round, which are about whole numbers, can be native."""
    return x.is_cpu and native_library.library() is not None


def use_triton(x: Tensor) -> bool:
    """True where the Triton kernels can take this input; they know no autograd either."""
    return is_home(x) and not torch.is_grad_enabled() and has_triton()


def is_home(x: Tensor) -> bool:
    """Where Triton kernels run compiled; tests let them run elsewhere, interpreted."""
    return x.is_cuda


@cache
def has_triton() -> bool:
    return find_spec("triton") is not None
