"""The sums of a product for few rows, sliced over the warps of a program (see sliced.py), which norm, expert or linear
makes its own answer of: matrices, or stacks of them, of 16, 8 or 4 bits; rows as they are, or to be normed."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu import widen
from outrider.kernels.quantised import Quantised, QuantisedStack


@triton.jit
def _power(words, NUMBER: tl.constexpr):
    """The scale whose exponent is this byte of a word; 2^-127, the smallest, counts as nothing."""
    bits = words >> 1 if NUMBER == 3 else words << (23 - 8 * NUMBER)
    return (bits & 0x7F800000).to(tl.float32, bitcast=True)


@triton.jit
def _plus_powers(total, bits, a0, a1, a2, a3, words, IEEE: tl.constexpr, FAST: tl.constexpr):
    """total + bits . a of fp4 in groups of 32, whose scales are powers of two; a run has four of them in one word."""
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    nothing = tl.zeros_like(total)
    w0, w1, w2, w3 = widen.quarters(bits, 2, a0.dtype, FAST)
    total += tl.dot(w0, a0, nothing, input_precision=precision) * _power(words, 0)[:, :, None]
    total += tl.dot(w1, a1, nothing, input_precision=precision) * _power(words, 1)[:, :, None]
    total += tl.dot(w2, a2, nothing, input_precision=precision) * _power(words, 2)[:, :, None]
    total += tl.dot(w3, a3, nothing, input_precision=precision) * _power(words, 3)[:, :, None]
    return total


@triton.jit
def _weighed(a, squares, norm, norm_offset, at, inner, EVEN: tl.constexpr):
    """Some numbers of rows [S, K, M] by the norm's weight, and their squares added up; at [S, K, 1]."""
    value = a.to(tl.float32)
    weight = tl.load(norm + at, mask=EVEN | (at < inner), other=0.0).to(tl.float32) + norm_offset
    return (value * weight).to(a.dtype), squares + value * value


@triton.jit
def sums(
    x_at, x_fits, data_at, up, scale_at, offset_at, norm, norm_offset, num_columns, run, inner, num_runs, scale_stride,
    KIND: tl.constexpr, PART: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, POWERS: tl.constexpr,
    HAS_OFFSET: tl.constexpr, NORM: tl.constexpr, TWO: tl.constexpr, IEEE: tl.constexpr, FAST: tl.constexpr,
    SLICES: tl.constexpr, STEP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    MANY: tl.constexpr = False,
):  # fmt: skip
    """[S, N, M] float32, twice: the slices' products; and of rows that are to be normed their squares, [S, K, M]. x_at
    and data_at point to where each slice begins, which takes every STEP-th run from number run [S] on. TWO: the second
    half of the weight's rows, `up` words on, as well. NORM: rows are multiplied by the norm's weight here; what comes
    of it is still to be divided by their root mean square. MANY: there are so many outputs that instructions count, and
    not how long one of them takes."""
    PARTS: tl.constexpr = 1 if KIND == 5 else (2 if KIND > 2 else 4)
    RUN: tl.constexpr = PARTS * PART
    RAISED: tl.constexpr = MANY or HAS_OFFSET
    place = tl.arange(0, PART)
    total = tl.zeros((SLICES, BLOCK_N, BLOCK_M), dtype=tl.float32)
    second = tl.zeros_like(total)
    squares = tl.zeros((SLICES, PART, BLOCK_M), dtype=tl.float32) if NORM else 0.0
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
        if NORM:
            a0, squares = _weighed(a0, squares, norm, norm_offset, at, inner, EVEN)
            if PARTS > 1:
                a1, squares = _weighed(a1, squares, norm, norm_offset, at + PART, inner, EVEN)
            if PARTS > 2:
                a2, squares = _weighed(a2, squares, norm, norm_offset, at + 2 * PART, inner, EVEN)
                a3, squares = _weighed(a3, squares, norm, norm_offset, at + 3 * PART, inner, EVEN)
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
            total = widen.plus(
                total, bits, a0, a1, a2, a3, m0, m1, m2, m3, scale_at, offset_at, number[:, None], inner, scale_stride,
                KIND, PART, GROUP, EVEN, HAS_OFFSET, IEEE, FAST, RAISED,
            )  # fmt: skip
        if TWO:
            bits = tl.load(data_at + up + first * PART, mask=EVEN | fits, other=0)
            if POWERS:
                words = tl.load(scales + num_columns, mask=scale_fits, other=0)
                second = _plus_powers(second, bits, a0, a1, a2, a3, words, IEEE, FAST)
            else:
                second = widen.plus(
                    second, bits, a0, a1, a2, a3, m0, m1, m2, m3, scale_at + num_columns, offset_at + num_columns,
                    number[:, None], inner, scale_stride, KIND, PART, GROUP, EVEN, HAS_OFFSET, IEEE, FAST, RAISED,
                )  # fmt: skip
    return total, second, squares


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
        return 1 if self.kind == widen.DENSE else 2 if self.kind > 2 else 4

    @property
    def run(self) -> int:
        return self.num_parts * self.part


def operand(weight: Tensor | Quantised | QuantisedStack, dense_part: int = widen.DENSE_PART) -> Operand:
    """weight [E, N, K] or [N, K], dense or in few bits."""
    if isinstance(weight, Tensor):
        num_rows, inner = weight.shape[-2:]
        rows = weight if weight.dim() == 2 else weight.flatten(0, 1)
        return Operand(rows, None, None, num_rows, inner, widen.DENSE, dense_part, 0)
    matrix = weight if isinstance(weight, Quantised) else weight.matrix
    num_rows, inner = len(matrix.data), matrix.num_columns
    if isinstance(weight, QuantisedStack):
        num_rows //= weight.num_matrices
    is_flat = len(matrix.scale) == 1 and matrix.offset is None and not matrix.has_exponents
    kind, group = widen.NUMBERS[matrix.kind], 0 if is_flat else matrix.group
    scale, offset, powers = matrix.scale, matrix.offset, matrix.has_exponents
    return Operand(matrix.data, scale, offset, num_rows, inner, kind, matrix.part, group, powers, matrix.order)
