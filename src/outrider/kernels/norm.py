"""Root-mean-square norm, computed in float32."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
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
    if weight is not None and weight.requires_grad and torch.is_grad_enabled() and not (offset or wide):
        return F.rms_norm(x.float(), weight.shape, weight.float(), eps)  # in training: one kernel there, and one back
    return rms_norm_reference(x, weight, eps, offset=offset, wide=wide)


@dataclass(frozen=True)
class Normed:
    """Rows that whoever multiplies with them first norms on the way: a launch less."""

    x: Tensor  # [T, H]
    weight: Tensor  # [H]
    eps: float
    offset: float
    wide: bool

    def __len__(self) -> int:
        return len(self.x)

    def tensor(self) -> Tensor:
        return rms_norm(self.x, self.weight, self.eps, offset=self.offset, wide=self.wide)


def materialised(x: Tensor | Normed) -> Tensor:
    return x.tensor() if isinstance(x, Normed) else x
