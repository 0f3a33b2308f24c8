"""A mixture's experts for few rows: nothing has to be sorted, and only the experts that were chosen are read. Two
launches: up with its activation, down with the sum."""

from __future__ import annotations

from torch import Tensor

from outrider.kernels.activation import Activation
from outrider.kernels.gpu import lone_experts, sliced_experts
from outrider.kernels.gpu.sums import operand
from outrider.kernels.moe import ExpertWeights
from outrider.kernels.norm import Normed
from outrider.kernels.packed import PackedStack

MAX_ROWS = 8
MAX_CHOSEN = 16


def is_for(num_rows: int, num_chosen: int) -> bool:
    """Whether rows are few enough that sorting them would cost more than reading some expert twice."""
    return num_rows <= MAX_ROWS and num_chosen <= MAX_CHOSEN


def experts(
    x: Tensor | Normed,
    ids: Tensor,
    shares: Tensor,
    weights: ExpertWeights,
    activation: Activation,
    residual: Tensor | None = None,
) -> Tensor:
    """x [T, H], the experts chosen for each row [T, k] and their shares [T, k] -> [T, H], plus the residual [T, H]."""
    x = x if isinstance(x, Normed) or x.stride(1) == 1 else x.contiguous()
    residual = residual if residual is None or residual.stride(1) == 1 else residual.contiguous()
    ids, shares = ids.contiguous(), shares.contiguous()
    assert not isinstance(weights.up, PackedStack)
    assert not isinstance(weights.down, PackedStack), "that is for CPUs"
    if isinstance(weights.up, Tensor) and lone_experts.is_for(ids, weights.up):
        inner = lone_experts.up(x, ids, weights.up, weights.up_bias, activation)
    else:
        inner = sliced_experts.up_few(x, ids, operand(weights.up), weights.up_bias, activation)
    down = sliced_experts.down_few if len(ids) == 1 else sliced_experts.down_several
    return down(inner, ids, shares, operand(weights.down), weights.down_bias, residual)
