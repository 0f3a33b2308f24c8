"""y = x W^T for up to eight rows, and whole numbers of 4 bits, in Gluon: weights go from memory straight into the
registers where tensor cores want them. A lane asks for 16 bytes of a row, and whatever order its numbers have there the
input's have too; so nothing passes through shared memory, and no warp waits for another before all sums are made. Each
warp has its own runs of inputs, some of them on their way; the first are asked for before the input is there."""

from __future__ import annotations

from dataclasses import dataclass

import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra import cuda

from outrider.kernels.gpu import launch, widen
from outrider.kernels.gpu.epilogue import beside, finish
from outrider.kernels.gpu.widen import RAISED_ASM
from outrider.kernels.quantised import Kind, Quantised

PART = gl.constexpr(32)  # words of a run, of four numbers each: 64 bytes, 16 for each of four lanes
ROWS = gl.constexpr(8)  # of the input: the N of the smallest product
HEIGHT = gl.constexpr(16)  # outputs of a tile: its M


@dataclass(frozen=True)
class Tile:
    tiles: int  # of 16 outputs, of a program; with a gate, half of them are ups
    warps: int  # that share an output's inputs
    stages: int  # runs of a warp that are on their way


@gluon.jit
def _asked(
    asked, at, scale_at, offset_at, run, scale_run, num_runs, up, width, scale_stride, num_columns,
    TILES: gl.constexpr, TWO: gl.constexpr, EVEN: gl.constexpr, HAS_OFFSET: gl.constexpr,
):  # fmt: skip
    """With what a run of each warp needs of the weight: words, scales and offsets, tile by tile. A run that does
    not exist is the last one again, and nothing is what its sum is scaled by."""
    here = run if EVEN else gl.minimum(run, num_runs - 1)
    words, scales = here[:, None, None] * PART, scale_run[:, None] * scale_stride
    exists = EVEN | (scale_run < num_runs)[:, None]
    for tile in gl.static_range(TILES):
        down = (tile // 2 if TWO else tile) * HEIGHT
        shift, column = down * width, down
        if TWO and tile % 2:
            shift, column = shift + up, column + num_columns
        bits = gl.load(at + shift + words)
        scale = gl.load(scale_at + column + scales, mask=exists, other=0.0)
        offset = scale
        if HAS_OFFSET:
            offset = gl.load(offset_at + column + scales, mask=exists, other=0.0)
        asked = asked + ((bits, scale, offset),)
    return asked


@gluon.jit
def _plus(total, asked, inputs, first, second, RAISE: gl.constexpr, HAS_OFFSET: gl.constexpr):
    """total + asked . inputs. What numbers are raised by, times the same inputs, is where sums begin."""
    bits, scale, offset = asked
    w0, w1, w2, w3 = gl.inline_asm_elementwise(
        RAISED_ASM, "=r,=r,=r,=r,r", [bits], (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), True, 2
    )
    part = mma_v2(w1, inputs[1], mma_v2(w0, inputs[0], first))
    part += mma_v2(w3, inputs[3], mma_v2(w2, inputs[2], second))
    if HAS_OFFSET:
        total += (first + second) * (offset * (-1.0 / RAISE))[:, :, None]
    return total + part * scale[:, :, None]


@gluon.jit
def _turn(
    totals, waiting, x_at, run, num_runs, raised, nothing, RAISE: gl.constexpr, EVEN: gl.constexpr,
    HAS_OFFSET: gl.constexpr,
):  # fmt: skip
    """With the first of the runs that are waiting."""
    at = x_at + (run if EVEN else gl.minimum(run, num_runs - 1))[:, None, None] * (4 * PART)
    inputs = (gl.load(at), gl.load(at + PART), gl.load(at + 2 * PART), gl.load(at + 3 * PART))
    first = mma_v2(raised, inputs[1], mma_v2(raised, inputs[0], nothing))
    second = mma_v2(raised, inputs[3], mma_v2(raised, inputs[2], nothing))
    sums = ()
    for tile in gl.static_range(len(totals)):
        sums = sums + (_plus(totals[tile], waiting[tile], inputs, first, second, RAISE, HAS_OFFSET),)
    return sums


@gluon.jit
def _held(
    x, data, scale, offset, bias, residual, out, num_rows, num_columns, num_runs, width, scale_stride, x_stride,
    residual_stride, RAISE: gl.constexpr, EVEN: gl.constexpr, HAS_OFFSET: gl.constexpr, GATED: gl.constexpr, HAS_BIAS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr, TILES: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """data [N, width]: runs of PART words, one scale each. GATED, a gate's number: its rows are gates, then ups, and so
    are tiles by turns."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 8)  # a lane has eight neighbours
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    TWO: gl.constexpr = GATED > 0
    STEP: gl.constexpr = WARPS * STAGES
    begin = gl.program_id(0) * (TILES // (2 if TWO else 1) * HEIGHT)
    run = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, LEFT)))
    column = begin + gl.arange(0, HEIGHT, layout=gl.SliceLayout(0, gl.SliceLayout(2, LEFT)))
    place = gl.arange(0, PART, layout=gl.SliceLayout(0, gl.SliceLayout(1, LEFT)))
    at = data + column.to(gl.int64)[None, :, None] * width + place[None, None, :]
    scale_run = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, SUMS)))
    column = begin + gl.arange(0, HEIGHT, layout=gl.SliceLayout(0, gl.SliceLayout(2, SUMS)))
    scale_at, offset_at = scale + column[None, :], offset + column[None, :]
    up = gl.cast(num_columns, gl.int64) * width
    waiting, totals = (), ()
    for stage in gl.static_range(STAGES):
        waiting = _asked(
            waiting, at, scale_at, offset_at, run + stage * WARPS, scale_run + stage * WARPS, num_runs, up, width,
            scale_stride, num_columns, TILES, TWO, EVEN, HAS_OFFSET,
        )  # fmt: skip
    if EARLY:
        cuda.gdc_wait()
    x_run = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, RIGHT)))
    x_place = gl.arange(0, PART, layout=gl.SliceLayout(0, gl.SliceLayout(2, RIGHT)))
    x_row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(1, RIGHT)))
    x_row = gl.minimum(x_row, num_rows - 1)  # one that does not exist is computed, and not stored
    x_at = x + x_row.to(gl.int64)[None, None, :] * x_stride + x_place[None, :, None]
    raised = gl.full((WARPS, HEIGHT, PART), -RAISE, x.dtype.element_ty, LEFT)
    nothing = gl.zeros((WARPS, HEIGHT, ROWS), gl.float32, SUMS)
    for _tile in gl.static_range(TILES):
        totals = totals + (nothing,)
    last = (num_runs - 1) // STEP * STEP
    for turn in range(0, last, STEP):
        for stage in gl.static_range(STAGES):
            totals = _turn(
                totals, waiting, x_at, x_run + (turn + stage * WARPS), num_runs, raised, nothing, RAISE, EVEN, HAS_OFFSET
            )
            ahead = turn + stage * WARPS + STEP
            waiting = _asked(
                waiting[TILES:], at, scale_at, offset_at, run + ahead, scale_run + ahead, num_runs, up, width,
                scale_stride, num_columns, TILES, TWO, EVEN, HAS_OFFSET,
            )  # fmt: skip
    for stage in gl.static_range(STAGES):
        totals = _turn(
            totals, waiting, x_at, x_run + (last + stage * WARPS), num_runs, raised, nothing, RAISE, EVEN, HAS_OFFSET
        )
        waiting = waiting[TILES:]
    if EARLY:
        cuda.gdc_launch_dependents()
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(0, SUMS)))[None, :]
    column = gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, gl.SliceLayout(0, SUMS)))[:, None] + begin
    for number in gl.static_range(TILES // (2 if TWO else 1)):
        first = gl.sum(totals[number * 2 if TWO else number], 0)
        second = gl.sum(totals[number * 2 + 1], 0) if TWO else first
        fits = (row < num_rows) & (column < num_columns)
        first_bias, second_bias, more = beside(
            bias, residual, row, column, fits, num_columns, residual_stride, GATED, HAS_BIAS, HAS_RESIDUAL
        )
        finish(
            first, second, first_bias, second_bias, more, out, row, column, fits, num_columns, GATED, HAS_BIAS,
            HAS_RESIDUAL,
        )  # fmt: skip
        column += HEIGHT
