"""A mixture's experts in 16, 8 or 4 bits, widened in registers (see sliced.py). Few rows take two launches that read
only the experts that were chosen, each of them once on the way up; more rows come in tiles of one expert each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.activation import Activation
from outrider.kernels.gpu import gates, launch, sliced
from outrider.kernels.gpu.gates import activated
from outrider.kernels.quantised import QuantisedStack

MAX_FEW = 8  # rows that a tensor core takes at once
MAX_TILE = 32  # rows of a tile


@triton.jit
def _power(words, NUMBER: tl.constexpr):
    """The scale whose exponent is this byte of a word."""
    byte = (words >> (8 * NUMBER)) & 255
    return tl.where(byte == 0, 0x400000, byte << 23).to(tl.float32, bitcast=True)


@triton.jit
def _plus_powers(total, bits, a0, a1, a2, a3, words, IEEE: tl.constexpr, FAST: tl.constexpr):
    """total + bits . a of fp4 in groups of 32, whose scales are powers of two; a run has four of them in one word."""
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    nothing = tl.zeros_like(total)
    w0, w1, w2, w3 = sliced._quarters(bits, 2, a0.dtype, FAST)
    total += tl.dot(w0, a0, nothing, input_precision=precision) * _power(words, 0)[:, :, None]
    total += tl.dot(w1, a1, nothing, input_precision=precision) * _power(words, 1)[:, :, None]
    total += tl.dot(w2, a2, nothing, input_precision=precision) * _power(words, 2)[:, :, None]
    total += tl.dot(w3, a3, nothing, input_precision=precision) * _power(words, 3)[:, :, None]
    return total


@triton.jit
def _sums(
    x_at, x_fits, data_at, up, scale_at, offset_at, num_columns, run, inner, num_runs, scale_stride,
    KIND: tl.constexpr, PART: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, POWERS: tl.constexpr,
    HAS_OFFSET: tl.constexpr, TWO: tl.constexpr, IEEE: tl.constexpr, FAST: tl.constexpr,
    SLICES: tl.constexpr, STEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """[S, N, M] float32, twice: the slices' products. x_at and data_at point to where each slice begins, which takes
    every STEP-th run from number run [S] on. TWO: the second half of the weight's rows, `up` words on, as well."""
    PARTS: tl.constexpr = 1 if KIND == 5 else (2 if KIND > 2 else 4)
    RUN: tl.constexpr = PARTS * PART
    place = tl.arange(0, PART)
    total = tl.zeros((SLICES, BLOCK_N, BLOCK_M), dtype=tl.float32)
    second = tl.zeros_like(total)
    for first in tl.range(0, num_runs, STEP, num_stages=STAGES):
        number = (first + run) * RUN
        at = number[:, None, None] + place[None, :, None]
        a0 = tl.load(x_at + at, mask=x_fits & (EVEN | (at < inner)), other=0.0)
        a1, a2, a3 = a0, a0, a0
        if PARTS > 1:
            a1 = tl.load(x_at + at + PART, mask=x_fits & (EVEN | (at + PART < inner)), other=0.0)
        if PARTS > 2:
            a2 = tl.load(x_at + at + 2 * PART, mask=x_fits & (EVEN | (at + 2 * PART < inner)), other=0.0)
            a3 = tl.load(x_at + at + 3 * PART, mask=x_fits & (EVEN | (at + 3 * PART < inner)), other=0.0)
        m0, m1, m2, m3 = 0.0, 0.0, 0.0, 0.0
        if HAS_OFFSET:
            m0, m1 = tl.sum(a0.to(tl.float32), 1), tl.sum(a1.to(tl.float32), 1)
            m2, m3 = m1, m1
            if PARTS > 2:
                m2, m3 = tl.sum(a2.to(tl.float32), 1), tl.sum(a3.to(tl.float32), 1)
        fits = (first + run < num_runs)[:, None, None]
        if KIND == 5:
            fits = number[:, None, None] + place[None, None, :] < inner
        bits = tl.load(data_at + first * PART, mask=EVEN | fits, other=0)
        if POWERS:
            scale_fits = EVEN | (first + run < num_runs)[:, None]
            scales = scale_at + (first + run)[:, None] * scale_stride
            words = tl.load(scales, mask=scale_fits, other=0)
            total = _plus_powers(total, bits, a0, a1, a2, a3, words, IEEE, FAST)
        else:
            total = sliced._plus(
                total, bits, a0, a1, a2, a3, m0, m1, m2, m3, scale_at, offset_at, number[:, None], inner, scale_stride,
                KIND, PART, GROUP, EVEN, HAS_OFFSET, IEEE, FAST,
            )  # fmt: skip
        if TWO:
            bits = tl.load(data_at + up + first * PART, mask=EVEN | fits, other=0)
            if POWERS:
                words = tl.load(scales + num_columns, mask=scale_fits, other=0)
                second = _plus_powers(second, bits, a0, a1, a2, a3, words, IEEE, FAST)
            else:
                second = sliced._plus(
                    second, bits, a0, a1, a2, a3, m0, m1, m2, m3, scale_at + num_columns, offset_at + num_columns,
                    number[:, None], inner, scale_stride, KIND, PART, GROUP, EVEN, HAS_OFFSET, IEEE, FAST,
                )  # fmt: skip
    return total, second


@triton.jit
def _tile(
    x, data, scale, offset, bias, experts, pairs, out,
    num_pairs, num_columns, inner, num_runs, width, scale_stride, x_stride, per_row, alpha, limit,
    KIND: tl.constexpr, PART: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, POWERS: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_OFFSET: tl.constexpr, GATE: tl.constexpr, TWO: tl.constexpr, HAS_BIAS: tl.constexpr,
    IEEE: tl.constexpr, FAST: tl.constexpr, FEW: tl.constexpr, SLICES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some columns of what an expert makes of its rows. Pair p reads row p // per_row of x and writes row p of the
    output. FEW: `experts` has the experts of all pairs, and the first pair of each expert is its tile; else it has
    those of the tiles. TWO: the weight's rows are gates, then ups."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    number = tl.program_id(1)
    expert = tl.load(experts + number)
    if FEW:
        other = tl.arange(0, BLOCK_P)
        same = (other < num_pairs) & (tl.load(experts + other, mask=other < num_pairs, other=-1) == expert)
        if tl.min(tl.where(same, other, BLOCK_P), 0) < number:
            return  # an earlier pair's program does it
        mine = same[None, :] & ((other // per_row)[None, :] == tl.arange(0, BLOCK_M)[:, None])
        pair = tl.max(tl.where(mine, other[None, :], -1), 1)
    else:
        if expert < 0:
            return
        pair = tl.load(pairs + number * BLOCK_M + tl.arange(0, BLOCK_M))
    exists = pair >= 0
    row = (tl.maximum(pair, 0) // per_row).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    near = tl.minimum(column, num_columns - 1)  # a column that does not exist is computed, and not stored
    run = tl.arange(0, SLICES)
    first_row = expert.to(tl.int64) * (num_columns * (2 if TWO else 1))
    data_at = (
        data + (first_row + near)[None, :, None] * width + run[:, None, None] * PART + tl.arange(0, PART)[None, None, :]
    )
    scale_at, offset_at = scale + (first_row + near)[None, :], offset + (first_row + near)[None, :]
    total, second = _sums(
        x + row[None, None, :] * x_stride, exists[None, None, :], data_at, num_columns.to(tl.int64) * width,
        scale_at, offset_at, num_columns, run, inner, num_runs, scale_stride,
        KIND, PART, GROUP, EVEN, POWERS, HAS_OFFSET, TWO, IEEE, FAST, SLICES, SLICES, BLOCK_M, BLOCK_N, STAGES,
    )  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    total, second = tl.sum(total, 0), tl.sum(second, 0)
    if GROUP == 0 and HAS_SCALE:
        total *= tl.load(scale + first_row + near).to(tl.float32)[:, None]
        if TWO:
            second *= tl.load(scale + first_row + num_columns + near).to(tl.float32)[:, None]
    if HAS_BIAS:
        total += tl.load(bias + first_row + near).to(tl.float32)[:, None]
        if TWO:
            second += tl.load(bias + first_row + num_columns + near).to(tl.float32)[:, None]
    kind: tl.constexpr = out.dtype.element_ty
    value = activated(total, second, alpha, limit, GATE, kind)
    at = out + pair.to(tl.int64)[None, :] * num_columns + column[:, None]
    tl.store(at, value.to(kind), mask=exists[None, :] & (column < num_columns)[:, None])


@triton.jit
def _down(
    x, ids, shares, data, scale, offset, bias, residual, out,
    num_columns, inner, num_runs, width, scale_stride, residual_stride, num_chosen,
    KIND: tl.constexpr, PART: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, POWERS: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    IEEE: tl.constexpr, FAST: tl.constexpr, EXPERTS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some columns of a row: the sum of its experts' answers, one expert to SPLIT slices."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    SLICES: tl.constexpr = EXPERTS * SPLIT
    place = tl.program_id(1)
    slice = tl.arange(0, SLICES)
    chosen = slice // SPLIT
    run = slice % SPLIT
    is_chosen = chosen < num_chosen
    pair = place * num_chosen + tl.minimum(chosen, num_chosen - 1)
    expert = tl.load(ids + pair)
    share = tl.load(shares + pair)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    near = tl.minimum(column, num_columns - 1)
    first_row = expert.to(tl.int64) * num_columns
    rows = first_row[:, None] + near[None, :]
    data_at = data + rows[:, :, None] * width + run[:, None, None] * PART + tl.arange(0, PART)[None, None, :]
    lane = tl.arange(0, BLOCK_M)
    x_at = x + pair.to(tl.int64)[:, None, None] * inner + (lane * 0)[None, None, :]
    total, _ = _sums(
        x_at, is_chosen[:, None, None] & (lane == 0)[None, None, :], data_at, num_columns.to(tl.int64), scale + rows,
        offset + rows, num_columns, run, inner, num_runs, scale_stride,
        KIND, PART, GROUP, EVEN, POWERS, HAS_OFFSET, False, IEEE, FAST, SLICES, SPLIT, BLOCK_M, BLOCK_N, STAGES,
    )  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    kind: tl.constexpr = out.dtype.element_ty
    answer = tl.sum(total, 2)  # of eight rows one is real
    if GROUP == 0 and HAS_SCALE:
        answer *= tl.load(scale + rows).to(tl.float32)
    if HAS_BIAS:
        answer += tl.where((run == 0)[:, None], tl.load(bias + rows).to(tl.float32), 0.0)
    weighed = answer * share.to(kind).to(tl.float32)[:, None]
    value = tl.sum(tl.where(is_chosen[:, None], weighed, 0.0), 0)
    if HAS_RESIDUAL:
        value = value.to(kind).to(tl.float32)
        value += tl.load(residual + place.to(tl.int64) * residual_stride + near).to(tl.float32)
    tl.store(out + place.to(tl.int64) * num_columns + column, value.to(kind), mask=column < num_columns)


@dataclass(frozen=True)
class Operand:
    """A stack of matrices as kernels see it."""

    data: Tensor  # [E * N, words]
    scale: Tensor | None
    offset: Tensor | None
    num_rows: int  # N
    inner: int  # K
    kind: int
    part: int
    group: int
    powers: bool = False
    order: Tensor | None = None  # [K]: which column of the input belongs to each number; None: its own

    def ordered(self, x: Tensor) -> Tensor:
        return x if self.order is None else x.index_select(1, self.order)

    @property
    def num_parts(self) -> int:
        return 1 if self.kind == sliced.DENSE else 2 if self.kind > 2 else 4

    @property
    def run(self) -> int:
        return self.num_parts * self.part


def operand(weight: Tensor | QuantisedStack) -> Operand:
    """weight [E, N, K], dense or in few bits."""
    _, num_rows, inner = weight.shape
    if isinstance(weight, Tensor):
        rows = weight.flatten(0, 1)
        return Operand(rows, None, None, num_rows, inner, sliced.DENSE, sliced.DENSE_PART, 0)
    matrix = weight.matrix
    is_flat = len(matrix.scale) == 1 and matrix.offset is None and not matrix.has_exponents
    kind, group = sliced.NUMBERS[matrix.kind], 0 if is_flat else matrix.group
    scale, offset, powers = matrix.scale, matrix.offset, matrix.has_exponents
    return Operand(matrix.data, scale, offset, num_rows, inner, kind, matrix.part, group, powers, matrix.order)


def up_few(x: Tensor, ids: Tensor, weight: Operand, bias: Tensor | None, activation: Activation) -> Tensor:
    """x [T, H], ids [T, k] -> [T * k, I]: what each pair's expert makes of its row."""
    return _tiles_of(x, ids, None, weight, bias, ids.shape[1], ids.numel(), activation, MAX_FEW)


def in_tiles(
    x: Tensor,
    experts: Tensor,
    pairs: Tensor,
    weight: Operand,
    bias: Tensor | None,
    num_pairs: int,
    activation: Activation | None = None,
) -> Tensor:
    """x [T, H] or [T * k, I] -> [T * k, N]; experts [tiles], pairs [tiles, rows]: see moe.Tiles."""
    return _tiles_of(x, experts, pairs, weight, bias, num_pairs // len(x), num_pairs, activation, pairs.shape[1])


def _tiles_of(
    x: Tensor,
    experts: Tensor,
    pairs: Tensor | None,
    weight: Operand,
    bias: Tensor | None,
    per_row: int,
    num_pairs: int,
    activation: Activation | None,
    block_m: int,
) -> Tensor:
    gate, alpha, limit = (gates.NONE, 1.0, 0.0) if activation is None else gates.gate_of(activation)
    two, x = gates.has_two(gate), weight.ordered(x)
    num_columns = weight.num_rows // 2 if two else weight.num_rows
    out = x.new_empty(num_pairs, num_columns)
    slices, early = 4, launch.early(x)
    block_n = 32 if weight.num_parts == 4 and two and block_m <= 16 else 16
    stages = 3 if two or block_m == 32 else 4
    nothing = out if weight.scale is None else weight.scale
    _tile[(triton.cdiv(num_columns, block_n), experts.numel())](
        x, weight.data, nothing, nothing if weight.offset is None else weight.offset, out if bias is None else bias,
        experts, experts if pairs is None else pairs, out,
        num_pairs, num_columns, weight.inner, triton.cdiv(weight.inner, weight.run), weight.data.stride(0),
        0 if weight.scale is None else weight.scale.stride(0), x.stride(0), per_row, alpha, limit,
        KIND=weight.kind, PART=weight.part, GROUP=weight.group, EVEN=weight.inner % (weight.run * slices) == 0,
        POWERS=weight.powers, HAS_SCALE=weight.scale is not None, HAS_OFFSET=weight.offset is not None, GATE=gate,
        TWO=two, HAS_BIAS=bias is not None, IEEE=x.dtype == torch.float32,
        FAST=x.is_cuda and x.dtype == torch.bfloat16, FEW=pairs is None, SLICES=slices, BLOCK_M=block_m,
        BLOCK_N=block_n, BLOCK_P=triton.next_power_of_2(num_pairs) if pairs is None else 1, STAGES=stages,
        EARLY=early, num_warps=4, num_stages=stages, **launch.options(early),
    )  # fmt: skip
    if activation is not None and gate == gates.NONE:
        return activation(out)
    return out


def down_few(
    x: Tensor, ids: Tensor, shares: Tensor, weight: Operand, bias: Tensor | None, residual: Tensor | None
) -> Tensor:
    """x [T * k, I], ids and shares [T, k] -> [T, N]: the weighed sum of each row's experts, plus the residual."""
    num_rows, num_chosen = ids.shape
    x = weight.ordered(x)
    out, early = x.new_empty(num_rows, weight.num_rows), launch.early(x)
    experts = triton.next_power_of_2(num_chosen)
    split = max(4 // experts, 1)
    nothing = out if weight.scale is None else weight.scale
    stages, block_n = 4 if experts * split <= 8 else 3, 16
    _down[(triton.cdiv(weight.num_rows, block_n), num_rows)](
        x, ids, shares, weight.data, nothing, nothing if weight.offset is None else weight.offset,
        out if bias is None else bias, out if residual is None else residual, out,
        weight.num_rows, weight.inner, triton.cdiv(weight.inner, weight.run), weight.data.stride(0),
        0 if weight.scale is None else weight.scale.stride(0), 0 if residual is None else residual.stride(0),
        num_chosen,
        KIND=weight.kind, PART=weight.part, GROUP=weight.group, EVEN=weight.inner % (weight.run * split) == 0,
        POWERS=weight.powers, HAS_SCALE=weight.scale is not None, HAS_OFFSET=weight.offset is not None,
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, IEEE=x.dtype == torch.float32,
        FAST=x.is_cuda and x.dtype == torch.bfloat16, EXPERTS=experts, SPLIT=split, BLOCK_M=8, BLOCK_N=block_n,
        STAGES=stages, EARLY=early, num_warps=4, num_stages=stages, **launch.options(early),
    )  # fmt: skip
    return out
