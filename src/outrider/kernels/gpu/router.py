"""Which experts a row goes through, in one launch: probabilities over all of them, the best, and their shares."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu import launch


@triton.jit
def _softmax_top(
    logits, ids, shares, num_experts, count, row_stride,
    RENORMALISE: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, BLOCK)
    value = tl.load(logits + row * row_stride + expert, mask=expert < num_experts, other=float("-inf")).to(tl.float32)
    value = tl.where(value == value, value, float("-inf"))  # rows that only fill up may hold anything
    power = tl.exp(value - tl.max(value, 0))
    total = tl.sum(power, 0)
    place = tl.arange(0, BLOCK_K)
    chosen, chances = tl.zeros((BLOCK_K,), dtype=tl.int32), tl.zeros((BLOCK_K,), dtype=tl.float32)
    for number in range(count):
        best = tl.max(value, 0)
        winner = tl.minimum(tl.min(tl.where(value == best, expert, BLOCK), 0), num_experts - 1)
        chance = tl.sum(tl.where(expert == winner, power, 0.0), 0) / total
        chosen = tl.where(place == number, winner, chosen)
        chances = tl.where(place == number, chance, chances)
        value = tl.where(expert == winner, float("-inf"), value)
    if RENORMALISE:
        chances = chances / tl.sum(chances, 0)
    tl.store(ids + row * count + place, chosen, mask=place < count)
    tl.store(shares + row * count + place, chances, mask=place < count)


def softmax_top(logits: Tensor, count: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> the most likely experts [T, k] int32, and their probabilities, or their part of the chosen's.
    Of equals the first is taken."""
    num_rows, num_experts = logits.shape
    ids = torch.empty(num_rows, count, dtype=torch.int32, device=logits.device)
    shares = torch.empty(num_rows, count, dtype=torch.float32, device=logits.device)
    if num_rows:
        early = launch.early(logits)
        _softmax_top[(num_rows,)](
            logits, ids, shares, num_experts, count, logits.stride(0), RENORMALISE=renormalise,
            BLOCK=triton.next_power_of_2(num_experts), BLOCK_K=triton.next_power_of_2(count), EARLY=early,
            num_warps=1 if num_experts <= 256 else 4, **launch.options(early),
        )  # fmt: skip
    return ids, shares
