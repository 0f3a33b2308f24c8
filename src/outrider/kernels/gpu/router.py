"""Which experts a row goes through: probabilities over all of them, the best, and their shares. For few rows their
logits are computed in the same launch, whose last program to finish chooses."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu import launch
from outrider.kernels.norm import Normed

MAX_ROWS, MAX_EXPERTS, MAX_WIDTH = 8, 256, 4096  # that route() takes
BLOCK_N = 4  # experts of a program
COMPARED = 16384  # pairs of experts at once


@triton.jit
def _places(logits, value, expert, num_experts, BLOCK: tl.constexpr, CHUNK: tl.constexpr):
    """[BLOCK]: how many experts come before each, by their logits; of equals the first comes first. All at once: taking
    the best one by one, each waits for the one before."""
    before = tl.zeros((BLOCK,), dtype=tl.int32)
    for first in range(0, BLOCK, CHUNK):
        other = first + tl.arange(0, CHUNK)
        rival = tl.load(logits + other, mask=other < num_experts, other=float("-inf"), cache_modifier=".cg")
        rival = _known(rival)[None, :]
        wins = (rival > value[:, None]) | ((rival == value[:, None]) & (other[None, :] < expert[:, None]))
        before += tl.sum(wins.to(tl.int32), 1)
    return before


@triton.jit
def _known(logits):
    """Rows that only fill up may hold anything."""
    value = logits.to(tl.float32)
    return tl.where(value == value, value, float("-inf"))


@triton.jit
def _choose(
    logits, ids, shares, num_experts, count,
    RENORMALISE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Of one row."""
    expert = tl.arange(0, BLOCK)
    value = _known(tl.load(logits + expert, mask=expert < num_experts, other=float("-inf"), cache_modifier=".cg"))
    place = _places(logits, value, expert, num_experts, BLOCK, CHUNK)
    is_chosen = place < count
    power = tl.exp(value - tl.max(value, 0))
    total = tl.sum(tl.where(is_chosen, power, 0.0) if RENORMALISE else power, 0)
    tl.store(ids + place, expert, mask=is_chosen)
    tl.store(shares + place, power / total, mask=is_chosen)


@triton.jit
def _softmax_top(
    logits, ids, shares, num_experts, count, row_stride,
    RENORMALISE: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    place = row * count
    _choose(logits + row * row_stride, ids + place, shares + place, num_experts, count, RENORMALISE, BLOCK, CHUNK)


@triton.jit(do_not_specialize=["num_rows"])
def _route(
    x, weight, bias, norm, logits, counter, ids, shares, num_rows, num_experts, inner, count, x_stride, weight_stride,
    norm_offset, eps,
    NORM: tl.constexpr, HAS_BIAS: tl.constexpr, ROUND: tl.constexpr, RENORMALISE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK: tl.constexpr, CHUNK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The logits of some experts, for all rows; by whoever is last, what comes of all. logits [T, E] float32."""
    expert, place = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    exists, inside = expert < num_experts, place < inner
    weight_at = weight + expert.to(tl.int64)[:, None] * weight_stride + place[None, :]
    w = tl.load(weight_at, mask=exists[:, None] & inside[None, :], other=0.0).to(tl.float32)
    if EARLY:  # weights are nobody's result
        tl.extra.cuda.gdc_wait()
    for row in range(num_rows):
        a = tl.load(x + row * x_stride + place, mask=inside, other=0.0).to(tl.float32)
        root = 1.0
        if NORM:
            root = tl.rsqrt(tl.sum(a * a, 0) / inner + eps)
            a *= tl.load(norm + place, mask=inside, other=0.0).to(tl.float32) + norm_offset
        value = tl.sum(w * a[None, :], 1) * root
        if HAS_BIAS:
            value += tl.load(bias + expert, mask=exists, other=0.0).to(tl.float32)
        if ROUND:
            value = value.to(x.dtype.element_ty).to(tl.float32)
        tl.store(logits + row * num_experts + expert, value, mask=exists)
    tl.debug_barrier()  # all of this program's threads have written before it is counted
    if tl.atomic_add(counter, 1, sem="acq_rel") < tl.num_programs(0) - 1:
        return
    tl.store(counter, 0)
    for row in range(num_rows):
        _choose(
            logits + row * num_experts, ids + row * count, shares + row * count, num_experts, count,
            RENORMALISE, BLOCK, CHUNK,
        )  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


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


def route(
    x: Tensor | Normed,
    weight: Tensor,
    bias: Tensor | None,
    count: int,
    counter: Tensor,
    *,
    renormalise: bool,
    wide: bool,
) -> tuple[Tensor, Tensor]:
    """softmax_top() of x W^T + b: x [T, H], weight [E, H]. counter [1] int32: zero, and nobody else's at the time.
    `wide`: logits are not rounded to the type of x."""
    norm, rows = (x, x.x) if isinstance(x, Normed) else (None, x)
    num_rows, num_experts = len(rows), len(weight)
    ids = torch.empty(num_rows, count, dtype=torch.int32, device=rows.device)
    shares = torch.empty(num_rows, count, dtype=torch.float32, device=rows.device)
    logits = torch.empty(num_rows, num_experts, dtype=torch.float32, device=rows.device)
    if num_rows:
        early, block = launch.early(rows), triton.next_power_of_2(num_experts)
        _route[(triton.cdiv(num_experts, BLOCK_N),)](
            rows, weight, shares if bias is None else bias, shares if norm is None else norm.weight, logits, counter,
            ids, shares, num_rows, num_experts, rows.shape[1], count, rows.stride(0), weight.stride(0),
            0.0 if norm is None else norm.offset, 0.0 if norm is None else norm.eps,
            NORM=norm is not None, HAS_BIAS=bias is not None, ROUND=not wide, RENORMALISE=renormalise, BLOCK_N=BLOCK_N,
            BLOCK_K=triton.next_power_of_2(rows.shape[1]), BLOCK=block, CHUNK=min(block, max(COMPARED // block, 1)),
            EARLY=early, num_warps=8, **launch.options(early),
        )  # fmt: skip
    return ids, shares


def is_for(x: Tensor | Normed, weight: Tensor) -> bool:
    """Whether route() takes them."""
    rows = x.x if isinstance(x, Normed) else x
    num_experts, width = weight.shape
    fits = len(rows) <= MAX_ROWS and num_experts <= MAX_EXPERTS and width <= MAX_WIDTH
    return fits and rows.dtype == weight.dtype and rows.stride(1) == weight.stride(1) == 1
