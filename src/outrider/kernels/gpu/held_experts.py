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
from outrider.kernels.gpu.choice import expert_of, pair_of, ranked
from outrider.kernels.gpu.gates import activated
from outrider.kernels.gpu.held import HEIGHT, PART, RUN, WIDTH, asked_for, paired
from outrider.kernels.gpu.sum_up import sum_up
from outrider.kernels.gpu.widen import FP4_SMALL_ASM, LARGER_ASM
from outrider.kernels.quantised import FP4_GROUP, Kind, QuantisedStack

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


UP, DOWN, SEVERAL_DOWN = Tile(4, 4, 1, 16, 168), Tile(2, 4, 1), Tile(4, 4, 1, 16, 168)  # scripts/h200/experts.py


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
    CHOSEN: gl.constexpr, PAIRS: gl.constexpr, IS_UP: gl.constexpr, EVEN: gl.constexpr, GATE: gl.constexpr,
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
            expert, count = gl.cast(gl.load(ids + number), gl.int64), num_pairs
        else:
            id, rank = ranked(ids, num_pairs, PAIRS, WARPS)
            expert, count = expert_of(id, rank, number), gl.max(rank, 0) + 1
        if number < count:
            first_row = expert * (num_columns * (2 if TWO else 1)) + begin
            at, scale_at = data + first_row * width + word_at, scale + first_row + scale_line[None, :]
            waiting, totals = (), ()
            for stage in gl.static_range(STAGES):
                waiting = asked_for(
                    waiting, at, scale_at, scale_at, run + stage * WARPS, scale_run + stage * WARPS, num_runs, up,
                    width, scale_stride, num_columns, TILES, TWO, EVEN, False,
                )  # fmt: skip
            pair = pair_of(ids, expert, row, num_rows, CHOSEN)
            x_from = x_row
            if IS_UP:
                x_from = gl.minimum(x_row, num_rows - 1)  # one that does not exist is computed, and not stored
            else:
                x_from = gl.maximum(pair_of(ids, expert, x_row, num_rows, CHOSEN), 0)
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
                    bias_at = bias + expert * (num_columns * (2 if TWO else 1)) + here
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


def fits(x: Tensor, ids: Tensor, weight: QuantisedStack, gate: int) -> bool:
    """Few rows, and numbers in MXFP4 whose bytes lie as they are asked for."""
    matrix = weight.matrix
    rows_fit = len(ids) <= MOST_ROWS and ids.shape[1] <= MOST_CHOSEN and (x.dtype == torch.bfloat16 or not x.is_cuda)
    rows_fit = rows_fit and x.stride(-1) == 1 and x.stride(0) % 8 == 0 and x.data_ptr() % 16 == 0
    kind_fits = matrix.kind is Kind.FP4 and matrix.has_exponents and matrix.part == PART.value
    kind_fits = kind_fits and matrix.group == FP4_GROUP and matrix.order is None
    whole = weight.shape[1] % LINES == 0 and weight.shape[2] % 8 == 0
    return rows_fit and kind_fits and whole and matrix.data.is_contiguous() and matrix.data.data_ptr() % 16 == 0


def up(
    x: Tensor,
    ids: Tensor,
    weight: QuantisedStack,
    bias: Tensor | None,
    gate: tuple[int, float, float],
    tile: Tile | None = None,
) -> Tensor:
    """x [T, H], ids [T, k], weight [E, I or 2 I, H], a gate's number and what clamps it -> [T * k, I]: what each pair's
    expert makes of its row."""
    out = x.new_empty(ids.numel(), weight.shape[1] // (2 if gates.has_two(gate[0]) else 1))
    _answer(x, ids, weight, bias, gate, out, tile or UP, is_up=True, is_known=False)
    return out


def down(
    x: Tensor,
    ids: Tensor,
    shares: Tensor,
    weight: QuantisedStack,
    bias: Tensor | None,
    residual: Tensor | None,
    tile: Tile | None = None,
    *,
    is_known: bool = False,
) -> Tensor:
    """x [T * k, I], ids and shares [T, k], weight [E, N, I] -> [T, N]: the weighed sum of each row's experts, plus the
    residual. `is_known`: ids were made two launches before this one, or more."""
    answers = torch.empty(ids.numel(), weight.shape[1], dtype=torch.float32, device=x.device)
    tile = tile or (DOWN if len(ids) == 1 else SEVERAL_DOWN)
    _answer(x, ids, weight, bias, (gates.NONE, 1.0, 0.0), answers, tile, is_up=False, is_known=is_known)
    return sum_up(answers, shares, residual, x.dtype)


def _answer(
    x: Tensor,
    ids: Tensor,
    weight: QuantisedStack,
    bias: Tensor | None,
    gate: tuple[int, float, float],
    out: Tensor,
    tile: Tile,
    *,
    is_up: bool,
    is_known: bool,
) -> None:
    (number, alpha, limit), matrix = gate, weight.matrix
    two, num_pairs, num_columns, inner = gates.has_two(number), ids.numel(), out.shape[1], weight.shape[2]
    words, num_runs, early = matrix.data.view(torch.int32), triton.cdiv(inner, RUN), launch.early(x)
    height = tile.tiles * 16 // (2 if two else 1)
    assert num_columns % height == 0
    _held[(num_columns // height, min(tile.programs, num_pairs))](
        x, words, matrix.scale, out if bias is None else bias, ids, out, num_pairs, num_columns, inner, num_runs,
        words.stride(0), matrix.scale.stride(0), x.stride(0), alpha, limit, CHOSEN=ids.shape[1],
        PAIRS=max(triton.next_power_of_2(num_pairs), 32), IS_UP=is_up,
        EVEN=inner % (RUN * tile.warps * tile.stages) == 0, GATE=number, TWO=two, HAS_BIAS=bias is not None,
        TILES=tile.tiles, WARPS=tile.warps, STAGES=tile.stages, KNOWN=is_known, EARLY=early, num_warps=tile.warps,
        maxnreg=tile.registers, **launch.options(early),
    )  # fmt: skip
