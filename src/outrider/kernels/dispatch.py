"""Which implementation of an operation runs: the native one for float32 on the CPU, else the torch reference."""

import torch
from torch import Tensor

from outrider.kernels import native


def use_native(*tensors: Tensor) -> bool:
    """True where the native kernels can take these tensors (they know no autograd) and were built."""
    if torch.is_grad_enabled():
        return False
    for tensor in tensors:
        if tensor.device.type != "cpu" or tensor.dtype != torch.float32:
            return False
    return native.library() is not None
