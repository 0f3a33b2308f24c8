"""Which experts some rows chose, ids [T, k], as kernels in Gluon look it up: each of the experts once, and for each row
its pair with one."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.jit
def ranked(ids, num_pairs, PAIRS: gl.constexpr, WARPS: gl.constexpr):
    """ids, and which place each has among those that nobody before it chose; -1: somebody did. Every warp has all of
    them in the end, and finds one without the others. They pass through shared memory: if thousands of programs asked
    the L2 for one line many times each, it would serve them one by one."""
    ALONG: gl.constexpr = gl.BlockedLayout([PAIRS // 32], [32], [WARPS], [0])
    ACROSS: gl.constexpr = gl.BlockedLayout([1, PAIRS], [32, 1], [WARPS, 1], [1, 0])
    pair = gl.arange(0, PAIRS, layout=gl.SliceLayout(1, ACROSS))
    other = gl.arange(0, PAIRS, layout=gl.SliceLayout(0, ACROSS))
    id = gl.load(ids + pair, mask=pair < num_pairs, other=-1)
    others = gl.convert_layout(id, gl.SliceLayout(0, ACROSS))
    is_before = other[None, :] < pair[:, None]
    same = gl.where(is_before & (id[:, None] == others[None, :]), 1, 0)
    first = gl.where((gl.sum(same, 1) == 0) & (pair < num_pairs), 1, 0)
    firsts = gl.convert_layout(first, gl.SliceLayout(0, ACROSS))
    rank = gl.where(first == 1, gl.sum(gl.where(is_before, firsts[None, :], 0), 1), -1)
    return gl.convert_layout(id, ALONG), gl.convert_layout(rank, ALONG)


@gluon.jit
def expert_of(id, rank, number):
    """This one of those that are ranked(); expert 0, where there are not so many."""
    return gl.cast(gl.max(gl.where(rank == number, id, 0), 0), gl.int64)


@gluon.jit
def pair_of(ids, expert, row, num_rows, CHOSEN: gl.constexpr):
    """Which pair of a row and an expert is each row's with this one; -1: none."""
    pair = row * 0 - 1
    for place in gl.static_range(CHOSEN):
        at = row * CHOSEN + place
        pair = gl.where(gl.load(ids + at, mask=row < num_rows, other=-1) == expert, at, pair)
    return pair
