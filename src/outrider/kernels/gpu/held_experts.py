"""A mixture's experts for up to eight rows, in MXFP4, in Gluon: weights go from memory straight into the registers
where tensor cores want them, as held.py's do. On the way down the first of them are asked for before the way up has
ended, as which experts were chosen is known by then."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2
from triton.language.extra import cuda

from outrider.kernels.gpu import gates, launch
from outrider.kernels.gpu.gates import activated
from outrider.kernels.gpu.held import HEIGHT, PART, WIDTH, asked_for, paired
from outrider.kernels.gpu.sums import Operand
from outrider.kernels.gpu.widen import FP4_SMALL_ASM, LARGER_ASM, NUMBERS
from outrider.kernels.quantised import FP4_GROUP, Kind

UNIT = gl.constexpr(2.0**30)  # of sums: numbers are widened 2^-126 times as large as they are, inputs 2^96 times
MOST_ROWS, MOST_CHOSEN = 8, 16
LINES = 64  # of an expert's weights, that any tile divides


@dataclass(frozen=True)
class Tile:
    tiles: int  # of 16 outputs, of a program; with a gate, half of them are ups
    warps: int  # that share an output's inputs
    stages: int  # runs of a warp that are on their way
    programs: int = 16  # for the experts of a tile: each has every so many-th
    registers: int | None = None  # of a thread, at most


@gluon.jit
def _one_of(ids, num_pairs, number, PLACES: gl.constexpr, WARPS: gl.constexpr):
    """Of the experts in ids, in the order in which they come first, this one; and how many there are. Every thread has
    all of ids, so that little is passed on; they come through shared memory, as thousands of programs that each ask the
    L2 for one line many times would be served one by one."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, PLACES], [32, 1], [WARPS, 1], [1, 0])
    pair = gl.arange(0, PLACES, layout=gl.SliceLayout(1, LAYOUT))
    other = gl.arange(0, PLACES, layout=gl.SliceLayout(0, LAYOUT))
    id = gl.load(ids + pair, mask=pair < num_pairs, other=-1)
    others = gl.convert_layout(id, gl.SliceLayout(0, LAYOUT))
    is_before = other[None, :] < pair[:, None]
    same = gl.where(is_before & (id[:, None] == others[None, :]), 1, 0)
    first = gl.where((gl.sum(same, 1) == 0) & (pair < num_pairs), 1, 0)
    firsts = gl.convert_layout(first, gl.SliceLayout(0, LAYOUT))
    rank = gl.sum(gl.where(is_before, firsts[None, :], 0), 1)
    return gl.sum(gl.where((first == 1) & (rank == number), id, 0), 0), gl.sum(first, 0)


@gluon.jit
def _pair_of(ids, expert, row, num_rows, CHOSEN: gl.constexpr):
    """Which pair of a row and an expert is each row's with this one; -1: none."""
    pair = row * 0 - 1
    for place in gl.static_range(CHOSEN):
        at = row * CHOSEN + place
        id = gl.load(ids + at, mask=row < num_rows, other=-1)
        pair = gl.where(id == expert, at, pair)
    return pair


@gluon.jit
def _power(words, NUMBER: gl.constexpr):
    """The scale whose exponent is this byte of a word; 2^-127, the smallest, counts as nothing."""
    bits = words >> 1 if NUMBER == 3 else words << (23 - 8 * NUMBER)
    return (bits & 0x7F800000).to(gl.float32, bitcast=True)


@gluon.jit
def _plus(total, asked, inputs):
    words, scales, _ = asked
    LEFT: gl.constexpr = gl.DotOperandLayout(0, total.type.layout, 8)
    bits = paired(words.to(gl.int16), (words >> 16).to(gl.int16), LEFT)
    numbers = gl.inline_asm_elementwise(
        FP4_SMALL_ASM, "=r,=r,=r,=r,r", [bits], (gl.bfloat16, gl.bfloat16, gl.bfloat16, gl.bfloat16), True, 2
    )
    for part in gl.static_range(4):
        sums = mma_v2(numbers[part], inputs[part], gl.zeros_like(total))
        total = total + sums * _power(scales, part)[:, :, None]
    return total


@gluon.jit
def _inputs(x_at, first, place, inner, EVEN: gl.constexpr):
    """A run of each warp, part by part, in the unit that widened numbers need."""
    found = ()
    for part in gl.static_range(4):
        at = first + (part * PART)
        if EVEN:
            value = gl.load(x_at + at)
        else:
            value = gl.load(x_at + at, mask=at + place < inner, other=0.0)
        found = found + (gl.inline_asm_elementwise(LARGER_ASM, "=r,r", [value], gl.bfloat16, True, 2),)  # type: ignore[assignment] # noqa: RUF005
    return found


@gluon.jit(do_not_specialize=["num_pairs"])  # compiled once for any number
def _held(
    x, data, scale, bias, ids, out,
    num_pairs, num_columns, inner, num_runs, width, scale_stride, x_stride, alpha, limit,
    CHOSEN: gl.constexpr, PLACES: gl.constexpr, IS_UP: gl.constexpr, EVEN: gl.constexpr, GATE: gl.constexpr,
    TWO: gl.constexpr, HAS_BIAS: gl.constexpr, TILES: gl.constexpr, WARPS: gl.constexpr, STAGES: gl.constexpr,
    KNOWN: gl.constexpr, EARLY: gl.constexpr,
):  # fmt: skip
    """Some columns of what an expert makes of the rows that chose it, for every so many-th of the experts. Pair p of a
    row and an expert reads row p // CHOSEN of x (IS_UP) or row p, and writes row p of the output. data [E N, width]:
    runs of PART words. TWO: an expert's rows are gates, then ups, and so are tiles by turns. KNOWN: ids were there
    before the launch before this one began."""
    SUMS: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [WARPS, 1, 1], [1, 16, 8])
    WORDS: gl.constexpr = gl.DistributedLinearLayout(
        [[0, 0, 1], [0, 0, 2], [0, 8, 0]], [[0, 0, 4], [0, 0, 8], [0, 1, 0], [0, 2, 0], [0, 4, 0]],
        [[1, 0, 0], [2, 0, 0]] if WARPS == 4 else [[1, 0, 0], [2, 0, 0], [4, 0, 0]], [], [WARPS, HEIGHT, WIDTH],
    )  # fmt: skip
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, SUMS, 8)
    STEP: gl.constexpr = WARPS * STAGES
    begin = gl.program_id(0) * (TILES // (2 if TWO else 1) * HEIGHT)
    run = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, WORDS)))
    line = gl.arange(0, HEIGHT, layout=gl.SliceLayout(0, gl.SliceLayout(2, WORDS)))
    word = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, gl.SliceLayout(1, WORDS)))
    word_at = line.to(gl.int64)[None, :, None] * width + word[None, None, :]
    scale_run = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, SUMS)))
    scale_line = gl.arange(0, HEIGHT, layout=gl.SliceLayout(0, gl.SliceLayout(2, SUMS)))
    x_run = gl.arange(0, WARPS, layout=gl.SliceLayout(1, gl.SliceLayout(2, RIGHT)))
    x_place = gl.arange(0, PART, layout=gl.SliceLayout(0, gl.SliceLayout(2, RIGHT)))
    x_row = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, RIGHT)))
    row = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(0, SUMS)))
    column = gl.arange(0, HEIGHT, layout=gl.SliceLayout(1, gl.SliceLayout(0, SUMS)))[:, None]
    up = gl.cast(num_columns, gl.int64) * width
    last = (num_runs - 1) // STEP * STEP
    num_rows = num_pairs // CHOSEN
    if EARLY and not KNOWN:
        cuda.gdc_wait()
        cuda.gdc_launch_dependents()
    number = gl.program_id(1)
    count = number + 1  # until it is known
    while number < count:
        if num_pairs == CHOSEN:  # one row chooses none of them twice
            expert, count = gl.load(ids + number), num_pairs
        else:
            expert, count = _one_of(ids, num_pairs, number, PLACES, WARPS)
        if number < count:
            first_row = gl.cast(expert, gl.int64) * (num_columns * (2 if TWO else 1)) + begin
            at, scale_at = data + first_row * width + word_at, scale + first_row + scale_line[None, :]
            waiting, totals = (), ()
            for stage in gl.static_range(STAGES):
                waiting = asked_for(
                    waiting, at, scale_at, scale_at, run + stage * WARPS, scale_run + stage * WARPS, num_runs, up,
                    width, scale_stride, num_columns, TILES, TWO, EVEN, False,
                )  # fmt: skip
            pair = _pair_of(ids, expert, row, num_rows, CHOSEN)
            x_from = x_row
            if IS_UP:
                x_from = gl.minimum(x_row, num_rows - 1)  # one that does not exist is computed, and not stored
            else:
                x_from = gl.maximum(_pair_of(ids, expert, x_row, num_rows, CHOSEN), 0)
            if EARLY and KNOWN:
                cuda.gdc_wait()
                cuda.gdc_launch_dependents()
            x_at = x + x_from.to(gl.int64)[None, None, :] * x_stride + x_place[None, :, None]
            for _tile in gl.static_range(TILES):
                totals = totals + (gl.zeros((WARPS, HEIGHT, 8), gl.float32, SUMS),)  # type: ignore[assignment] # noqa: RUF005
            for turn in range(0, last, STEP):
                for stage in gl.static_range(STAGES):
                    here = (x_run + (turn + stage * WARPS)) * (4 * PART)
                    inputs = _inputs(x_at, here[:, None, None], x_place[None, :, None], inner, EVEN)
                    totals = _turn(totals, waiting, inputs)
                    ahead = turn + stage * WARPS + STEP
                    waiting = asked_for(
                        waiting[TILES:], at, scale_at, scale_at, run + ahead, scale_run + ahead, num_runs, up, width,
                        scale_stride, num_columns, TILES, TWO, EVEN, False,
                    )  # fmt: skip
            for stage in gl.static_range(STAGES):
                here = (x_run + (last + stage * WARPS)) * (4 * PART)
                inputs = _inputs(x_at, here[:, None, None], x_place[None, :, None], inner, EVEN)
                totals = _turn(totals, waiting, inputs)
                waiting = waiting[TILES:]  # type: ignore[assignment]
            kind: gl.constexpr = out.dtype.element_ty
            for tile in gl.static_range(TILES // (2 if TWO else 1)):
                first = gl.sum(totals[tile * 2 if TWO else tile], 0) * UNIT
                second = gl.sum(totals[tile * 2 + 1], 0) * UNIT if TWO else first
                here = begin + tile * HEIGHT + column
                if HAS_BIAS:
                    bias_at = bias + gl.cast(expert, gl.int64) * (num_columns * (2 if TWO else 1)) + here
                    first += gl.load(bias_at).to(gl.float32)
                    if TWO:
                        second += gl.load(bias_at + num_columns).to(gl.float32)
                value = activated(first, second, alpha, limit, GATE, kind)
                gl.store(
                    out + pair.to(gl.int64)[None, :] * num_columns + here, value.to(kind), mask=(pair >= 0)[None, :]
                )
        number += gl.num_programs(1)


@gluon.jit
def _turn(totals, waiting, inputs):
    """With the first of the runs that are waiting."""
    sums = ()
    for tile in gl.static_range(len(totals)):
        sums = sums + (_plus(totals[tile], waiting[tile], inputs),)  # noqa: RUF005
    return sums


def fits(x: Tensor, ids: Tensor, weight: Operand) -> bool:
    """Few rows, and numbers in MXFP4 whose bytes lie as they are asked for."""
    rows_fit = len(ids) <= MOST_ROWS and ids.shape[1] <= MOST_CHOSEN
    rows_fit = rows_fit and x.stride(-1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    kind_fits = weight.kind == NUMBERS[Kind.FP4] and weight.powers and weight.part == PART.value
    kind_fits = kind_fits and weight.group == FP4_GROUP and weight.order is None
    whole = weight.num_rows % LINES == 0 and weight.inner % 8 == 0
    return rows_fit and kind_fits and whole and weight.data.is_contiguous() and weight.data.data_ptr() % 16 == 0


def tile_for(num_rows: int, *, is_up: bool) -> Tile:
    """Measured on an H200 (scripts/h200/experts.py)."""
    if is_up or num_rows > 1:
        return Tile(4, 4, 1, registers=168)
    return Tile(2, 4, 1)


def answers(
    x: Tensor,
    ids: Tensor,
    weight: Operand,
    bias: Tensor | None,
    gate: tuple[int, float, float],
    out: Tensor,
    *,
    is_up: bool,
    is_known: bool,
    tile: Tile | None = None,
) -> None:
    """x [T, H], or [T * k, I] on the way down -> out [T * k, N]: what each pair's expert makes of its row."""
    number, alpha, limit = gate
    two, num_pairs, num_columns = gates.has_two(number), ids.numel(), out.shape[1]
    tile = tile or tile_for(len(ids), is_up=is_up)
    assert weight.scale is not None
    words, early = weight.data.view(torch.int32), launch.early(x)
    height = tile.tiles * 16 // (2 if two else 1)
    assert num_columns % height == 0
    num_runs = triton.cdiv(weight.inner, weight.run)
    _held[(num_columns // height, min(tile.programs, num_pairs))](
        x, words, weight.scale, out if bias is None else bias, ids, out, num_pairs, num_columns, weight.inner, num_runs,
        words.stride(0), weight.scale.stride(0), x.stride(0), alpha, limit, CHOSEN=ids.shape[1],
        PLACES=max(triton.next_power_of_2(num_pairs), 32), IS_UP=is_up,
        EVEN=weight.inner % (weight.run * tile.warps * tile.stages) == 0, GATE=number, TWO=two,
        HAS_BIAS=bias is not None, TILES=tile.tiles, WARPS=tile.warps, STAGES=tile.stages, KNOWN=is_known, EARLY=early,
        num_warps=tile.warps, maxnreg=tile.registers, **launch.options(early),
    )  # fmt: skip
