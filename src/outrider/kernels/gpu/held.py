"""y = x W^T for up to sixteen rows, and whole numbers of 4 bits, in Gluon: weights go from memory straight into the
registers where tensor cores want them. A lane asks for 16 bytes of a row, and whatever order its numbers have there the
input's have too; so nothing passes through shared memory, and no warp waits for another before all sums are made. Each
warp has its own runs of inputs, some of them on their way; the first are asked for before the input is there. Every
program reads all of the input; or, where several share their outputs, a part of it (product_parts.py)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra import cuda

from outrider.kernels.gpu import gates, launch
from outrider.kernels.gpu.epilogue import beside, finish
from outrider.kernels.gpu.product_parts import counters_for, is_last, place_of, put_together
from outrider.kernels.gpu.widen import INT4_ASM, RAISED_ASM, UINT4_ASM
from outrider.kernels.quantised import Kind, Quantised

PART = gl.constexpr(32)  # neighbours whose bits lie in as many half words; a run has four times as many numbers
WIDTH = gl.constexpr(16)  # words of a run: 64 bytes, 16 for each of four lanes
UNIT = gl.constexpr(8.0)  # numbers are computed with in eighths
RUN = 128  # numbers of a run: those of a group
LEAST_COLUMNS = 64  # that any tile divides
FEW, MANY, LONG = 4096, 16384, 64  # outputs; and runs of inputs
HEIGHT = gl.constexpr(16)  # outputs of a tile: its M
MOST_ROWS, MOST_OF_MANY = 16, 8  # the second: of many outputs, or with a gate, where wide.py is faster from nine on


@dataclass(frozen=True)
class Tile:
    tiles: int  # of 16 outputs, of a program; with a gate, half of them are ups
    warps: int  # that share an output's inputs
    stages: int  # runs of a warp that are on their way
    split: int = 1  # programs that share an output's inputs


@gluon.jit
def asked_for(
    asked, at, scale_at, offset_at, run, scale_run, num_runs, up, width, scale_stride, num_columns,
    TILES: gl.constexpr, TWO: gl.constexpr, EVEN: gl.constexpr, HAS_OFFSET: gl.constexpr,
):  # fmt: skip
    """With what a run of each warp needs of the weight: words, scales and offsets, tile by tile. A run that does
    not exist is the last one again, and nothing is what its sum is scaled by."""
    here = run if EVEN else gl.minimum(run, num_runs - 1)
    words, scales = here[:, None, None] * WIDTH, scale_run[:, None] * scale_stride
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
        asked = asked + ((bits, scale, offset),)  # noqa: RUF005
    return asked


@gluon.jit
def paired(even, odd, LAYOUT: gl.constexpr):
    """[W, N, K] twice -> [W, N, 2 K], by turns."""
    shape: gl.constexpr = (even.shape[0], even.shape[1], 2 * even.shape[2])
    return gl.convert_layout(gl.reshape(gl.join(even, odd), shape), LAYOUT, assert_trivial=True)


@gluon.jit
def _plus(total, asked, inputs, first, second, RAISE: gl.constexpr, HAS_OFFSET: gl.constexpr):
    """total + asked . inputs, in eighths. What numbers are raised by, times the same inputs, is where the two sums of
    eight rows begin. For 16 that would be twice as many products: there it is taken off the numbers, and one sum, not
    two, leaves registers for as many warps."""
    words, scale, offset = asked
    LEFT: gl.constexpr = gl.DotOperandLayout(0, total.type.layout, 8)
    FEW: gl.constexpr = total.shape[2] == 8
    ASM: gl.constexpr = RAISED_ASM if FEW else (INT4_ASM if RAISE == 17.0 else UINT4_ASM)
    bits = paired(words.to(gl.int16), (words >> 16).to(gl.int16), LEFT)
    w0, w1, w2, w3 = gl.inline_asm_elementwise(
        ASM, "=r,=r,=r,=r,r", [bits], (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), True, 2
    )
    part = mma_v2(w1, inputs[1], mma_v2(w0, inputs[0], first if FEW else gl.zeros_like(total)))
    if FEW:
        part += mma_v2(w3, inputs[3], mma_v2(w2, inputs[2], second))
    else:
        part = mma_v2(w3, inputs[3], mma_v2(w2, inputs[2], part))
    if HAS_OFFSET:
        mass = first + second if FEW else second
        total = total + mass * (offset * (-1.0 / (UNIT * RAISE)))[:, :, None]
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
    second = mma_v2(raised, inputs[3], mma_v2(raised, inputs[2], nothing if nothing.shape[2] == 8 else first))
    sums = ()
    for tile in gl.static_range(len(totals)):
        total = _plus(totals[tile], waiting[tile], inputs, first, second, RAISE, HAS_OFFSET)
        sums = sums + (total,)  # type: ignore[assignment] # noqa: RUF005
    return sums


@gluon.jit
def _halved(tiles):
    """Half as many, of twice the size: two that are half of all apart, by turns."""
    HALF: gl.constexpr = len(tiles) // 2
    pairs = ()
    for number in gl.static_range(HALF):
        pairs = pairs + (gl.join(tiles[number], tiles[number + HALF]),)  # noqa: RUF005
    return pairs


@gluon.jit
def _added_up(tiles, TILES: gl.constexpr, LAYOUT: gl.constexpr):
    """Up to eight tiles [W, N, M] of sums below each other, added up over warps at once: [TILES N, M]."""
    if TILES > 1:
        tiles = _halved(tiles)
    if TILES > 2:
        tiles = _halved(tiles)
    if TILES > 4:
        tiles = _halved(tiles)
    WARPS: gl.constexpr = tiles[0].shape[0]
    ROWS: gl.constexpr = tiles[0].shape[2]
    below = gl.permute(gl.reshape(tiles[0], (WARPS, HEIGHT, ROWS, TILES)), (0, 3, 1, 2))
    return gl.sum(gl.convert_layout(gl.reshape(below, (WARPS, TILES * HEIGHT, ROWS)), LAYOUT), 0)


@gluon.jit(do_not_specialize=["num_rows"])  # compiled once for any number
def _held(
    x, data, scale, offset, bias, residual, out, sums, counters, num_rows, num_columns, num_runs, width, scale_stride,
    x_stride, residual_stride, RAISE: gl.constexpr, EVEN: gl.constexpr, HAS_OFFSET: gl.constexpr, GATED: gl.constexpr,
    HAS_BIAS: gl.constexpr, HAS_RESIDUAL: gl.constexpr, ROWS: gl.constexpr, TILES: gl.constexpr, WARPS: gl.constexpr,
    STAGES: gl.constexpr, SPLIT: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """data [N, width]: runs of PART words, one scale each. GATED, a gate's number: its rows are gates, then ups, and so
    are tiles by turns. ROWS of the input: 8, the N of a product, or 16, two products with the same widened weights.
    SPLIT: sums [SPLIT, T, N] are those of each part of the inputs, which the last program of an output adds up."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, SUMS, 8)  # a lane has eight neighbours, in four words
    WORDS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 8, 0]], [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[1, 0, 0], [2, 0, 0]] if WARPS == 4 else [[1, 0, 0], [2, 0, 0], [4, 0, 0]], [], [WARPS, HEIGHT, WIDTH],
    )  # fmt: skip
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    TWO: gl.constexpr = GATED > 0
    STEP: gl.constexpr = WARPS * STAGES
    tile, part = gl.program_id(0) // SPLIT, gl.program_id(0) % SPLIT
    begin = tile * (TILES // (2 if TWO else 1) * HEIGHT)
    if SPLIT > 1:
        first_run = part * num_runs // SPLIT
        num_runs = (part + 1) * num_runs // SPLIT - first_run
        data, x = data + first_run * WIDTH, x + first_run * (4 * PART)
        scale, offset = scale + first_run * scale_stride, offset + first_run * scale_stride
    run = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, WORDS)))
    column = begin + gl.arange(0, HEIGHT, layout=gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))
    place = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))
    at = data + column.to(gl.int64)[None, :, None] * width + place[None, None, :]
    scale_run = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, SUMS)))
    column = begin + gl.arange(0, HEIGHT, layout=gl.SliceLayout(0, gl.SliceLayout(2, SUMS)))
    scale_at, offset_at = scale + column[None, :], offset + column[None, :]
    up = gl.cast(num_columns, gl.int64) * width
    waiting, totals = (), ()
    for stage in gl.static_range(STAGES):
        waiting = asked_for(
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
        totals = totals + (nothing,)  # type: ignore[assignment] # noqa: RUF005
    last = (num_runs - 1) // STEP * STEP
    for turn in range(0, last, STEP):
        for stage in gl.static_range(STAGES):
            totals = _turn(
                totals,
                waiting,
                x_at,
                x_run + (turn + stage * WARPS),
                num_runs,
                raised,
                nothing,
                RAISE,
                EVEN,
                HAS_OFFSET,
            )
            ahead = turn + stage * WARPS + STEP
            waiting = asked_for(
                waiting[TILES:], at, scale_at, offset_at, run + ahead, scale_run + ahead, num_runs, up, width,
                scale_stride, num_columns, TILES, TWO, EVEN, HAS_OFFSET,
            )  # fmt: skip
    for stage in gl.static_range(STAGES):
        totals = _turn(
            totals, waiting, x_at, x_run + (last + stage * WARPS), num_runs, raised, nothing, RAISE, EVEN, HAS_OFFSET
        )
        waiting = waiting[TILES:]  # type: ignore[assignment]
    if EARLY:
        cuda.gdc_launch_dependents()
    row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(0, SUMS)))[None, :]
    column = gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, gl.SliceLayout(0, SUMS)))[:, None] + begin
    if SPLIT == 1:
        for number in gl.static_range(TILES // (2 if TWO else 1)):
            first = gl.sum(totals[number * 2 if TWO else number], 0) * UNIT
            second = gl.sum(totals[number * 2 + 1], 0) * UNIT if TWO else first
            fits = (row < num_rows) & (column < num_columns)
            first_bias, second_bias, more = beside(
                bias, residual, row, column, fits, num_columns, residual_stride, GATED, HAS_BIAS, HAS_RESIDUAL
            )
            finish(
                first, second, first_bias, second_bias, more, out, row, column, fits, num_columns, GATED, HAS_BIAS,
                HAS_RESIDUAL,
            )  # fmt: skip
            column += HEIGHT
    else:
        ADDED: gl.constexpr = gl.BlockedLayout(  # a thread adds up four neighbours
            [WARPS, 4, 1], [1, 4 * TILES if TILES < 8 else 32, 8 // TILES if TILES < 8 else 1], [1, 1, WARPS], [1, 2, 0]
        )
        row = gl.arange(0, ROWS, layout=gl.SliceLayout(0, gl.SliceLayout(0, ADDED)))[None, :]
        column = gl.arange(0, TILES * HEIGHT, layout=gl.SliceLayout(1, gl.SliceLayout(0, ADDED)))[:, None] + begin
        fits = (row < num_rows) & (column < num_columns)
        first_bias, second_bias, more = beside(
            bias, residual, row, column, fits, num_columns, residual_stride, False, HAS_BIAS, HAS_RESIDUAL
        )
        total = _added_up(totals, TILES, ADDED) * UNIT
        own = sums + gl.cast(part, gl.int64) * num_rows * num_columns
        gl.store(own + place_of(row, column, num_columns), total, mask=fits)
        if is_last(counters + tile, SPLIT):
            total = put_together(total, part, sums, row, column, fits, num_rows, num_columns, SPLIT)
            finish(
                total, total, first_bias, second_bias, more, out, row, column, fits, num_columns, False, HAS_BIAS,
                HAS_RESIDUAL,
            )  # fmt: skip


def linear(
    x: Tensor,
    weight: Quantised,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    gated: int = gates.NONE,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """As quantised.linear, for what fits()."""
    num_rows, num_columns = len(x), len(weight.data) // (2 if gated else 1)
    out = x.new_empty(num_rows, num_columns) if out is None else out
    if not num_rows:
        return out
    num_runs = weight.num_columns // RUN
    tile = tile or tile_for(num_rows, num_columns, num_runs, gated)
    num_tiles = num_columns // outputs_of(tile, gated)
    assert num_tiles * outputs_of(tile, gated) == num_columns
    counters = counters_for(x.device, num_tiles)
    split = min(tile.split, num_runs) if not gated and counters is not None else 1
    sums = out if split == 1 else torch.empty(split, num_rows, num_columns, dtype=torch.float32, device=x.device)
    words, scale, early = weight.data.view(torch.int32), weight.scale, launch.early(x)
    _held[(num_tiles * split,)](
        x, words, scale, scale if weight.offset is None else weight.offset, out if bias is None else bias,
        out if residual is None else residual, out, sums, sums if counters is None else counters, num_rows, num_columns,
        num_runs, words.stride(0), scale.stride(0), x.stride(0), 0 if residual is None else residual.stride(0),
        RAISE=17.0 if weight.kind is Kind.INT4 else 16.0, EVEN=num_runs % (tile.warps * tile.stages * split) == 0,
        HAS_OFFSET=weight.offset is not None, GATED=int(gated), HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None, ROWS=8 if num_rows <= 8 else 16, TILES=tile.tiles, WARPS=tile.warps,
        STAGES=tile.stages, SPLIT=split, EARLY=early, num_warps=tile.warps, **launch.options(early),
    )  # fmt: skip
    return out


def outputs_of(tile: Tile, gated: int) -> int:
    """Of a program."""
    return tile.tiles * 16 // (2 if gated else 1)


def fits(x: Tensor, weight: Quantised, residual: Tensor | None = None, gated: int = gates.NONE) -> bool:
    """Few rows, and whole numbers of 4 bits of which a run has one scale, whose bytes lie as they are asked for."""
    num_columns = len(weight.data) // (2 if gated else 1)
    most = MOST_OF_MANY if gated or num_columns >= MANY else MOST_ROWS
    rows_fit = len(x) <= most and x.stride(-1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    kind_fits = weight.kind in (Kind.INT4, Kind.UINT4) and weight.group == RUN and weight.part == PART.value
    whole = weight.num_columns % RUN == 0 and num_columns % LEAST_COLUMNS == 0 and weight.data.is_contiguous()
    placed = weight.data.data_ptr() % 16 == 0 and (residual is None or residual.stride(-1) == 1)
    return rows_fit and kind_fits and whole and placed and weight.order is None


def tile_for(num_rows: int, num_columns: int, num_runs: int, gated: int) -> Tile:
    """Measured on an H200 (scripts/h200/int4.py)."""
    is_long, is_few = num_runs >= LONG, num_columns <= FEW
    if gated:
        return Tile(4, 4, 2)
    if num_columns >= MANY:
        return Tile(4, 4, 1)
    if num_rows == 1:
        return Tile(1, 8, 2) if is_long else Tile(1, 4, 8 if is_few else 4)
    if num_rows <= 8:
        return Tile(2, 8, 2, 2) if is_long else Tile(1, 4, 8) if is_few else Tile(4, 4, 1, 4)
    return Tile(4, 8, 1, 2) if is_long else Tile(4, 4, 1, 4) if is_few else Tile(2, 4, 2, 2)
