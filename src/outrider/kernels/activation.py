"""Activations: act(gate) * up, with gate and up side by side in one tensor, and the squared ReLU that has no gate."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels import native
from outrider.kernels.dispatch import use_native, use_triton

Activation = Callable[[Tensor], Tensor]


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 I] -> [T, I]."""
    if use_native(gate_up):
        return native.silu_mul(gate_up)
    if use_triton(gate_up):
        from outrider.kernels.gpu import activation as gpu

        return gpu.silu_mul(gate_up)
    return silu_mul_reference(gate_up)


def gelu_tanh_mul_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 I] -> [T, I]."""
    if use_native(gate_up):
        return native.gelu_tanh_mul(gate_up)
    if use_triton(gate_up):
        from outrider.kernels.gpu import activation as gpu

        return gpu.gelu_tanh_mul(gate_up)
    return gelu_tanh_mul_reference(gate_up)


def sigmoid(x: Tensor) -> Tensor:
    """Whose bits depend on the number alone. Torch's sigmoid (as its silu and gelu) rounds the last few numbers of a
    tensor in another way than those before them, so that a row would depend on how many rows follow; its exp does
    not."""
    return 1 / (1 + (-x).exp()) if use_native(x) else torch.sigmoid(x)


@dataclass(frozen=True)
class ClampedSilu:
    """min(silu(gate), limit) * up within +-limit."""

    limit: float

    def __call__(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        swish = gate * sigmoid(gate) if use_native(gate) else F.silu(gate)
        return swish.clamp(max=self.limit) * up.clamp(-self.limit, self.limit)


@dataclass(frozen=True)
class ClampedSwish:
    """swish(gate) * (up + 1), where swish(g) is g * sigmoid(alpha g): gate up to the limit, up within +-limit."""

    alpha: float
    limit: float

    def __call__(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * sigmoid(self.alpha * gate) * (up + 1)


def relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


# by the names that config.json uses
GATED: dict[str, Activation] = {"silu": silu_mul, "swish": silu_mul, "gelu_pytorch_tanh": gelu_tanh_mul}
