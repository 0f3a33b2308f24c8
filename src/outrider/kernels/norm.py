"""Root-mean-square norm, computed in float32."""

import torch
from torch import Tensor

from outrider.kernels import native
from outrider.kernels.dispatch import use_native


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight * wide.to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H], weight [H] -> [..., H]."""
    if use_native(x):
        return native.rms_norm(x.reshape(-1, x.shape[-1]), weight, eps).view(x.shape)
    return rms_norm_reference(x, weight, eps)
