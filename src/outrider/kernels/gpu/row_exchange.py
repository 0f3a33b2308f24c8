"""How the programs of row_products.py that share an output's inputs come to one sum without a second launch: each keeps
some of the input's rows, gives its sums of the others away, waits until everybody has, and takes what the others have
left for its own rows, always in the same order. Sums lie in memory as they lie in registers, so that a warp's 64 of
them are 256 bytes in a row."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

EIGHT = gl.constexpr(8)  # of the input, which a program keeps or does not: as many as lie together in registers
barrier = getattr(gl, "barrier", None) or gl.thread_barrier


@gluon.jit
def _places(total, first_row):
    """Where sums [64 outputs, rows] lie, and in which eight of all rows."""
    layout: gl.constexpr = total.type.layout
    output = gl.arange(0, total.shape[0], layout=gl.SliceLayout(1, layout))[:, None]
    row = first_row + gl.arange(0, total.shape[1], layout=gl.SliceLayout(0, layout))[None, :]
    eight = row // EIGHT
    return eight * 512 + output // 8 % 2 * 256 + output // 16 * 64 + output % 8 * 8 + row % EIGHT, eight


@gluon.jit
def _give(total, sums, first_row, begin, end):
    """Leaves sums of all rows but those from the eight `begin` to `end`."""
    at, eight = _places(total, first_row)
    gl.store(sums + at, total, mask=(eight < begin) | (eight >= end))


@gluon.jit
def _meet(counter, split):
    """Waits until so many warpgroups have given. All of them must be on the device, or get there by themselves. The
    last one to have seen it puts the counter back to zero."""
    barrier()  # all of this warpgroup's threads have written before it is counted
    seen = gl.atomic_add(counter, 1, sem="acq_rel") + 1
    while seen < split:
        seen = gl.atomic_add(counter, 0, sem="acq_rel")
    if gl.atomic_add(counter, 1, sem="acq_rel") == 2 * split - 1:
        gl.store(counter, 0)


@gluon.jit
def _take(total, sums, first_row, begin, end, part, split, SIZE: gl.constexpr):
    """With what the other parts, SIZE sums each, have left for these rows, from the next part on."""
    at, eight = _places(total, first_row)
    mine = (eight >= begin) & (eight < end)
    for number in range(1, split):
        other = (part + number) % split
        total += gl.load(sums + other * SIZE + at, mask=mine, other=0.0, cache_modifier=".cg")
    return total


@gluon.jit
def exchange(
    total, second, other, second_other, sums, counters, number, part, split, begin, end,
    ROWS: gl.constexpr, MORE: gl.constexpr, BLOCKS: gl.constexpr,
):  # fmt: skip
    """A warpgroup's sums of one or two blocks of outputs and one or two of rows, as far as rows are from the eight
    `begin` to `end`, are those of all parts afterwards. `number`: of the outputs, the same in all parts."""
    BLOCK: gl.constexpr = 64 * (ROWS + MORE)
    SIZE: gl.constexpr = BLOCKS * BLOCK
    left = sums + number * (split * SIZE)
    own = left + part * SIZE
    _give(total, own, 0, begin, end)
    if BLOCKS == 2:
        _give(second, own + BLOCK, 0, begin, end)
    if MORE > 0:
        _give(other, own, ROWS, begin, end)
        if BLOCKS == 2:
            _give(second_other, own + BLOCK, ROWS, begin, end)
    _meet(counters + number, split)
    total = _take(total, left, 0, begin, end, part, split, SIZE)
    if BLOCKS == 2:
        second = _take(second, left + BLOCK, 0, begin, end, part, split, SIZE)
    if MORE > 0:
        other = _take(other, left, ROWS, begin, end, part, split, SIZE)
        if BLOCKS == 2:
            second_other = _take(second_other, left + BLOCK, ROWS, begin, end, part, split, SIZE)
    return total, second, other, second_other
