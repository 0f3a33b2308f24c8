"""Which experts a row goes through, in one launch: probabilities over all of them, the best, and their shares."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu import launch

COMPARED = 16384  # pairs of experts at once


@triton.jit
def places(logits, value, expert, num_experts, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """[BLOCK]: how many experts come before each, by their logits; of equals the first comes first. All at once: taking
    the best one by one, each waits for the one before."""
    before = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, BLOCK, CHUNK):
        other = first + tl.arange(0, CHUNK)
        rival = known(tl.load(logits + other, mask=other < num_experts, other=float("-inf")))[None, :]
        wins = (rival > value[:, None]) | ((rival == value[:, None]) & (other[None, :] < expert[:, None]))
        before += tl.sum(wins.to(tl.int32), 1)
    return before


@triton.jit
def known(logits):
    """Rows that only fill up may hold anything."""
    value = logits.to(tl.float32)
    return tl.where(value == value, value, float("-inf"))


@triton.jit
def _softmax_top(
    logits, ids, shares, num_experts, count, row_stride,
    RENORMALISE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    logits += row * row_stride
    value = known(tl.load(logits + expert, mask=expert < num_experts, other=float("-inf")))
    place = places(logits, value, expert, num_experts, BLOCK, CHUNK)
    is_chosen = place < count
    power = tl.exp(value - tl.max(value, 0))
    total = tl.sum(tl.where(is_chosen, power, 0.0) if RENORMALISE else power, 0)
    tl.store(ids + row * count + place, expert, mask=is_chosen)
    tl.store(shares + row * count + place, power / total, mask=is_chosen)


def softmax_top(logits: Tensor, count: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> the most likely experts [T, k] int32, and their probabilities, or their part of the chosen's.
    Of equals the first is taken."""
    num_rows, num_experts = logits.shape
    ids = torch.empty(num_rows, count, dtype=torch.int32, device=logits.device)
    shares = torch.empty(num_rows, count, dtype=torch.float32, device=logits.device)
    if num_rows:
        early, block = launch.early(logits), triton.next_power_of_2(num_experts)
        _softmax_top[(num_rows,)](
            logits, ids, shares, num_experts, count, logits.stride(0), RENORMALISE=renormalise,
            BLOCK=block, CHUNK=min(block, max(COMPARED // block, 1)), EARLY=early,
            num_warps=8 if block > 64 else 4, **launch.options(early),
        )  # fmt: skip
    return ids, shares
