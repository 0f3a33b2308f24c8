"""Root-mean-square norm, computed in float32."""

import torch
from torch import Tensor

from outrider.kernels import native
from outrider.kernels.dispatch import use_native, use_triton


def rms_norm_reference(
    x: Tensor, weight: Tensor | None, eps: float, *, offset: float = 0.0, wide: bool = False
) -> Tensor:
    normed = x.float()
    normed = normed * torch.rsqrt(normed.square().mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    if wide:
        return (normed * (weight.float() + offset)).to(x.dtype)
    return (weight + offset if offset else weight) * normed.to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, *, offset: float = 0.0, wide: bool = False) -> Tensor:
    """x [..., H], weight [H] or None (all ones) -> [..., H]; `wide`: the weight multiplies before 16-bit rounding."""
    if use_native(x):
        scale = x.new_ones(x.shape[-1]) if weight is None else weight
        return native.rms_norm(x.reshape(-1, x.shape[-1]), scale, eps, offset).view(x.shape)
    if use_triton(x):
        from outrider.kernels.gpu import norm as gpu

        return gpu.rms_norm(x, weight, eps, offset=offset, wide=wide)
    return rms_norm_reference(x, weight, eps, offset=offset, wide=wide)
