"""Gated activations: act(gate) * up, with gate and up side by side in one tensor."""

import torch.nn.functional as F
from torch import Tensor

from outrider.kernels import native
from outrider.kernels.dispatch import use_native


def silu_mul_reference(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate) * up


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T, 2 I] -> [T, I]."""
    if use_native(gate_up):
        return native.silu_mul(gate_up)
    return silu_mul_reference(gate_up)
