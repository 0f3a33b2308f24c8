"""Where top_k, top_p and min_p cut a row of logits off, without sorting it: the cut is searched bit by bit."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu import launch

BLOCK = 8192


@triton.jit
def _key(value, SHIFT: tl.constexpr):
    """A whole number that grows with a float32. SHIFT: its last bits, which say nothing about a bfloat16."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits) >> SHIFT


@triton.jit
def _value(key, SHIFT: tl.constexpr):
    bits = key << SHIFT
    return tl.where(key < 0, (bits | ((1 << SHIFT) - 1)) ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _above(logits, width, least, top, heat, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """How many columns have keys of at least `least`, and the sum of their exp((x - top) / heat)."""
    count = tl.zeros((BLOCK,), dtype=tl.int32)
    mass = tl.zeros((BLOCK,), dtype=tl.float32)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        value = tl.load(logits + column, mask=column < width, other=float("-inf")).to(tl.float32)
        counts = (_key(value, SHIFT) >= least) & (column < width)
        count += counts.to(tl.int32)
        mass += tl.where(counts, tl.exp((value - top) / heat), 0.0)
    return tl.sum(count), tl.sum(mass)


@triton.jit
def _cut(
    logits, temperature, top_k, top_p, min_p, requests, cut, last, row_stride, width,
    SHIFT: tl.constexpr, LEAST: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program for a row. A token stays if its logit is above the cut, or equals it no later than column `last`."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    request = tl.load(requests + row)
    heat = tl.load(temperature + request)
    most, share, ratio = tl.load(top_k + request), tl.load(top_p + request), tl.load(min_p + request)
    if (heat <= LEAST) | ((most >= width) & (share >= 1) & (ratio <= 0)):
        tl.store(cut + row, float("-inf"))
        tl.store(last + row, width)
        return
    logits += row.to(tl.int64) * row_stride
    best = tl.full((BLOCK,), float("-inf"), dtype=tl.float32)
    for begin in range(0, width, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        value = tl.load(logits + column, mask=column < width, other=float("-inf")).to(tl.float32)
        best = tl.maximum(best, value)
    top = tl.max(best)
    highest = _key(top, SHIFT).to(tl.int64)
    lowest = tl.full((), -2147483648 >> SHIFT, dtype=tl.int64)

    # the k-th best: the highest key that at least k columns reach
    low, high = lowest, highest
    if most < width:
        for _ in range(33 - SHIFT):
            middle = (low + high + 1) >> 1
            count, mass = _above(logits, width, middle, top, heat, SHIFT, BLOCK)
            enough = count >= most
            low = tl.where(enough, middle, low)
            high = tl.where(enough, high, middle - 1)
    kth = low
    count, mass = _above(logits, width, kth + 1, top, heat, SHIFT, BLOCK)
    room = (most - count).to(tl.float32)  # columns equal to the k-th best that stay
    if most < width:
        mass += room * tl.exp((_value(kth.to(tl.int32), SHIFT) - top) / heat)

    # the lowest key whose betters weigh less than top_p
    wanted = share * mass
    low, high = kth, highest
    if share < 1:
        for _ in range(33 - SHIFT):
            middle = (low + high) >> 1
            count, weight = _above(logits, width, middle + 1, top, heat, SHIFT, BLOCK)
            light = weight < wanted
            high = tl.where(light & (low < high), middle, high)
            low = tl.where(light | (low >= high), low, middle + 1)
    key = low
    value_at = tl.where(key == lowest, float("-inf"), _value(key.to(tl.int32), SHIFT))
    count, weight = _above(logits, width, key + 1, top, heat, SHIFT, BLOCK)
    equals = tl.where(key == kth, room, float("inf"))
    if share < 1:
        one = tl.exp((value_at - top) / heat)
        equals = tl.minimum(equals, tl.maximum(tl.ceil((wanted - weight) / one), 1.0))

    # of columns with equal logits the first ones stay
    end = tl.full((), 0, dtype=tl.int32) + width
    if equals < width:
        before = tl.full((), 0, dtype=tl.int32)
        for begin in range(0, width, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            value = tl.load(logits + column, mask=column < width, other=float("-inf")).to(tl.float32)
            same = ((_key(value, SHIFT) == key) & (column < width)).to(tl.int32)
            number = tl.cumsum(same) + before
            hit = (same > 0) & (number.to(tl.float32) == equals)
            end = tl.minimum(end, tl.min(tl.where(hit, column, width)))
            before += tl.sum(same)
    if ratio > 0:
        worth = top + heat * tl.log(ratio)
        end = tl.where(value_at < worth, width, end)
        value_at = tl.maximum(value_at, worth)
    tl.store(cut + row, value_at)
    tl.store(last + row, end)


def cuts(
    logits: Tensor,
    temperature: Tensor,
    filters: tuple[Tensor, Tensor, Tensor],
    requests: Tensor,
    *,
    least: float,
) -> tuple[Tensor, Tensor]:
    """Of each row [R] of logits [R, V]: the logit at which it is cut off, and the last column that may equal it.
    Options by request [B]: top_k (V or more: off), top_p, min_p. A row whose temperature is at most `least` is not
    cut."""
    top_k, top_p, min_p = filters
    num_rows, width = logits.shape
    cut = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    last = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if num_rows:
        early = launch.early(logits)
        _cut[(num_rows,)](
            logits, temperature, top_k, top_p, min_p, requests, cut, last, logits.stride(0), width,
            SHIFT=16 if logits.dtype == torch.bfloat16 else 0, LEAST=least, BLOCK=BLOCK, EARLY=early, num_warps=16,
            **launch.options(early),
        )  # fmt: skip
    return cut, last
