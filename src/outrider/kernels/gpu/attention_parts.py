"""What programs have seen of some rows' keys, put together: by whoever is the last of them, part after part, so that
the sum does not depend on who that is."""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.kernels.gpu.product_parts import is_last


@triton.jit
def _plus_part(
    best, weight, total, maxima, sums, partial, at, inside, number, parts, VALUE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """With what a program has left for some rows of the part with this number, if there is one."""
    value_place = tl.arange(0, BLOCK_VALUE)
    exists = inside & (at * 0 + number < parts)
    fits = exists[:, None] & (value_place < VALUE)[None, :]
    top = tl.load(maxima + at, mask=exists, other=float("-inf"), cache_modifier=".cg")
    seen = tl.load(sums + at, mask=exists, other=0.0, cache_modifier=".cg")
    other = tl.load(partial + at[:, None] * VALUE + value_place[None, :], mask=fits, other=0.0, cache_modifier=".cg")
    better = tl.maximum(best, top)
    safe = tl.where(better == float("-inf"), 0.0, better)
    shrink, share = tl.exp2(best - safe), tl.exp2(top - safe)
    return better, weight * shrink + seen * share, total * shrink[:, None] + other * share[:, None]


@triton.jit
def leave(
    best, weight, total, maxima, sums, partial, counter_at, inside, first_part, part, parts, kv_head, num_kv_heads,
    VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """What a program has seen of its part, left for whoever is the last; whether that is itself."""
    at = ((first_part + part) * num_kv_heads + kv_head) * BLOCK_M + tl.arange(0, BLOCK_M)
    tl.store(maxima + at, best)
    tl.store(sums + at, weight)
    value_place = tl.arange(0, BLOCK_VALUE)
    fits = inside[:, None] & (value_place < VALUE)[None, :]
    tl.store(partial + at[:, None] * VALUE + value_place[None, :], total, mask=fits)
    return is_last(counter_at, parts)


@triton.jit
def finish(
    best, weight, total, sinks, out, first_row, lane, kv_head, num_heads, inside, value_scale,
    GROUP: tl.constexpr, HAS_SINKS: tl.constexpr, VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    SLICES: tl.constexpr = 1, piece=0,
):  # fmt: skip
    """Stores what rows have seen, over their weight. SLICES: there are so many times VALUE numbers, of which these are
    a piece."""
    head = kv_head * GROUP + lane % GROUP
    if HAS_SINKS:
        sink = tl.load(sinks + head, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634
        better = tl.maximum(best, sink)
        shrink = tl.exp2(best - better)
        weight = weight * shrink + tl.exp2(sink - better)
        total = total * shrink[:, None]
    total = tl.where(weight[:, None] > 0, total / weight[:, None], 0.0) * value_scale
    value_place = tl.arange(0, BLOCK_VALUE)
    cell = (first_row + lane // GROUP).to(tl.int64) * num_heads + head
    at = out + (cell * SLICES + piece)[:, None] * VALUE + value_place[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=inside[:, None] & (value_place < VALUE)[None, :])


@triton.jit
def put_together(
    maxima, sums, partial, sinks, out, first_part, parts, first_row, num_rows, block, kv_head, num_heads, num_kv_heads,
    value_scale, GROUP: tl.constexpr, HAS_SINKS: tl.constexpr, VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr,
    BLOCK_M: tl.constexpr, LANES: tl.constexpr, WARPS: tl.constexpr,
):  # fmt: skip
    """All parts of a block of rows, of which no more than the first LANES exist."""
    lane = block * BLOCK_M + tl.arange(0, LANES)
    inside = lane < num_rows * GROUP
    stride = num_kv_heads * BLOCK_M
    at = (first_part * num_kv_heads + kv_head) * BLOCK_M + tl.arange(0, LANES)
    best = tl.full((LANES,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((LANES,), dtype=tl.float32)
    total = tl.zeros((LANES, BLOCK_VALUE), dtype=tl.float32)
    # as many at a time as registers hold: what one of them waits for, all wait for together
    SIZE: tl.constexpr = LANES * BLOCK_VALUE // (32 * WARPS)  # of a part, in numbers a thread
    PIECE: tl.constexpr = 8 if SIZE <= 8 else 4 if SIZE <= 16 else 2
    for first in range(0, parts, PIECE):
        for shift in tl.static_range(PIECE):
            best, weight, total = _plus_part(
                best, weight, total, maxima, sums, partial, at, inside, first + shift, parts, VALUE, BLOCK_VALUE
            )
            at += stride
    finish(
        best, weight, total, sinks, out, first_row, lane, kv_head, num_heads, inside, value_scale, GROUP, HAS_SINKS,
        VALUE, BLOCK_VALUE,
    )  # fmt: skip
