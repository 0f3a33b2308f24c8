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
BLOCK_N = 2  # experts of a program
BLOCK_M = 8  # rows that choose at the same time, a warp each
MIN_BLOCK = 128  # experts that give every thread of a warp some


@triton.jit
def _choose(
    logits, ids, shares, num_rows, num_experts, count, row_stride,
    RENORMALISE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """The best experts of each row, one by one; of equals the first. Integers, as a warp finds the largest in one
    instruction."""
    row, expert = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK)
    exists = row < num_rows
    fits = exists[:, None] & (expert < num_experts)[None, :]
    at = logits + row.to(tl.int64)[:, None] * row_stride + expert[None, :]
    value = tl.load(at, mask=fits, other=float("-inf"), cache_modifier=".cg").to(tl.float32)
    value = tl.where(value == value, value, float("-inf"))  # rows that only fill up may hold anything
    bits = tl.where(value == 0, 0.0, value).to(tl.int32, bitcast=True)
    key = tl.where(fits, bits ^ ((bits >> 31) & 0x7FFFFFFF), -2147483648)
    largest = tl.max(key, 1)
    rank = tl.full((BLOCK_M, BLOCK), BLOCK, tl.int32)
    best = largest
    for place in range(count):
        chosen = tl.min(tl.where(key == best[:, None], expert[None, :], BLOCK), 1)
        is_mine = expert[None, :] == chosen[:, None]
        rank, key = tl.where(is_mine, place, rank), tl.where(is_mine, -2147483648, key)
        best = tl.max(key, 1)
    is_chosen = fits & (rank < count)
    most = (largest ^ ((largest >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
    power = tl.exp(value - most[:, None])
    total = tl.sum(tl.where(is_chosen, power, 0.0) if RENORMALISE else power, 1)
    at = row[:, None] * count + rank
    tl.store(ids + at, expert[None, :] + tl.zeros_like(rank), mask=is_chosen)
    tl.store(shares + at, power / total[:, None], mask=is_chosen)


@triton.jit(do_not_specialize=["num_rows"])  # compiled once for any number
def _softmax_top(
    logits, ids, shares, num_rows, num_experts, count, row_stride,
    RENORMALISE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64) * BLOCK_M
    _choose(
        logits + row * row_stride, ids + row * count, shares + row * count, num_rows - row, num_experts, count,
        row_stride, RENORMALISE, BLOCK_M, BLOCK,
    )  # fmt: skip


@triton.jit(do_not_specialize=["num_rows"])
def _route(
    x, weight, bias, norm, logits, counter, ids, shares, num_rows, num_experts, inner, count, x_stride, weight_stride,
    norm_offset, eps,
    NORM: tl.constexpr, HAS_BIAS: tl.constexpr, ROUND: tl.constexpr, RENORMALISE: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some logits of a row; by whoever is last, what comes of all. logits [T, E] float32."""
    row = tl.program_id(1)
    expert, place = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
    exists, inside = expert < num_experts, place < inner
    weight_at = weight + expert.to(tl.int64)[:, None] * weight_stride + place[None, :]
    w = tl.load(weight_at, mask=exists[:, None] & inside[None, :], other=0.0).to(tl.float32)
    if EARLY:  # weights are nobody's result; all programs are at work when the next launch's begin to wait
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
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
    if tl.atomic_add(counter, 1, sem="acq_rel") < tl.num_programs(0) * tl.num_programs(1) - 1:
        return
    tl.store(counter, 0)
    _choose(logits, ids, shares, num_rows, num_experts, count, num_experts, RENORMALISE, BLOCK_M, BLOCK)


def softmax_top(logits: Tensor, count: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
    """logits [T, E] -> the most likely experts [T, k] int32, and their probabilities, or their part of the chosen's.
    Of equals the first is taken."""
    num_rows, num_experts = logits.shape
    ids = torch.empty(num_rows, count, dtype=torch.int32, device=logits.device)
    shares = torch.empty(num_rows, count, dtype=torch.float32, device=logits.device)
    if num_rows:
        early, block = launch.early(logits), max(triton.next_power_of_2(num_experts), MIN_BLOCK)
        _softmax_top[(triton.cdiv(num_rows, BLOCK_M),)](
            logits, ids, shares, num_rows, num_experts, count, logits.stride(0), RENORMALISE=renormalise,
            BLOCK_M=BLOCK_M, BLOCK=block, EARLY=early, num_warps=8, **launch.options(early),
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
        early, block = launch.early(rows), max(triton.next_power_of_2(num_experts), MIN_BLOCK)
        _route[(triton.cdiv(num_experts, BLOCK_N), num_rows)](
            rows, weight, shares if bias is None else bias, shares if norm is None else norm.weight, logits, counter,
            ids, shares, num_rows, num_experts, rows.shape[1], count, rows.stride(0), weight.stride(0),
            0.0 if norm is None else norm.offset, 0.0 if norm is None else norm.eps,
            NORM=norm is not None, HAS_BIAS=bias is not None, ROUND=not wide, RENORMALISE=renormalise, BLOCK_N=BLOCK_N,
            BLOCK_K=triton.next_power_of_2(rows.shape[1]), BLOCK_M=BLOCK_M, BLOCK=block, EARLY=early,
            num_warps=8, **launch.options(early),
        )  # fmt: skip
    return ids, shares


def is_for(x: Tensor | Normed, weight: Tensor) -> bool:
    """Whether route() takes them."""
    rows = x.x if isinstance(x, Normed) else x
    num_experts, width = weight.shape
    fits = len(rows) <= MAX_ROWS and num_experts <= MAX_EXPERTS and width <= MAX_WIDTH
    return fits and rows.dtype == weight.dtype and rows.stride(1) == weight.stride(1) == 1
