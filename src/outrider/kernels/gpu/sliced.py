"""y = x W^T for few rows, with the inner dimension sliced over the warps of a program ("sliced K"): each adds up its
own runs of numbers, and their sums are added in the end. The weight has 16, 8 or 4 bits a number, which are widened in
registers; scales are applied to the sum of a group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu import launch
from outrider.kernels.gpu.epilogue import finish
from outrider.kernels.quantised import Kind

DENSE = 5
DENSE_PART = 128  # numbers of 16 bits in a run
NUMBERS = {Kind.INT4: 0, Kind.UINT4: 1, Kind.FP4: 2, Kind.INT8: 3, Kind.FP8: 4}
LONG = 8192  # inputs that give more slices enough to do
MAX_SHARED = 200 * 2**10  # bytes of a program's buffers


@dataclass(frozen=True)
class Tile:
    slices: int
    block_m: int
    block_n: int
    stages: int
    warps: int = 4


@triton.jit
def widened(number, KIND: tl.constexpr, dtype: tl.constexpr):
    """What the bits of a number mean; all of them are exact in 16 bits."""
    if KIND == 4:
        value = number.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(dtype)
    elif KIND == 3:
        value = number.to(tl.uint8).to(tl.int8, bitcast=True).to(tl.float32).to(dtype)
    elif KIND == 2:
        size = number & 7
        value = tl.where(size < 5, size * 0.5, tl.where(size == 5, 3.0, tl.where(size == 6, 4.0, 6.0)))
        value = tl.where(number > 7, -value, value).to(dtype)
    else:
        value = (number.to(tl.float32) - (8.0 if KIND == 0 else 0.0)).to(dtype)
    return value


def _asm(*lines: str) -> tl.constexpr:
    return tl.constexpr("{ .reg .b32 t, u, v; " + " ".join(lines) + " }")


def _whole(zero: str) -> tl.constexpr:
    """Two words of 16 bits -> four pairs of bfloat16, n - zero: 0x4300 | n is 128 + n there."""
    lines = [f"mov.b32 v, {zero};"]
    for part in range(4):
        lines += [f"shr.b32 t, $4, {4 * part};", "lop3.b32 t, t, 0x000f000f, 0x43004300, 0xea;"]
        lines += [f"sub.rn.bf16x2 ${part}, t, v;"]
    return _asm(*lines)


def _shifted(name: str, source: str, by: int) -> str:
    return f"shl.b32 {name}, {source}, {by};" if by >= 0 else f"shr.b32 {name}, {source}, {-by};"


def _fp4() -> tl.constexpr:
    """The sign to the top, exponent and mantissa to the end of the exponent; times 2^126."""
    lines = ["mov.b32 v, 0x7e807e80;"]
    for part in range(4):
        lines += [_shifted("t", "$4", 6 - 4 * part), "and.b32 t, t, 0x01c001c0;", _shifted("u", "$4", 12 - 4 * part)]
        lines += ["lop3.b32 t, u, 0x80008000, t, 0xea;", f"mul.rn.bf16x2 ${part}, t, v;"]
    return _asm(*lines)


def _fp8() -> tl.constexpr:
    """As of fp4, with four bits of exponent and three of mantissa; times 2^120."""
    lines = ["mov.b32 v, 0x7b807b80;"]
    for part in range(2):
        lines += [_shifted("t", "$2", 8 - 8 * part), "shr.b32 u, t, 4;", "and.b32 u, u, 0x07f007f0;"]
        lines += ["lop3.b32 t, t, 0x80008000, u, 0xea;", f"mul.rn.bf16x2 ${part}, t, v;"]
    return _asm(*lines)


INT4_ASM, UINT4_ASM, FP4_ASM, FP8_ASM = _whole("0x43084308"), _whole("0x43004300"), _fp4(), _fp8()


@triton.jit
def _quarters(bits, KIND: tl.constexpr, dtype: tl.constexpr, FAST: tl.constexpr):
    """Words of 16 bits -> their four numbers. FAST: in bfloat16, two words at a time."""
    if FAST:
        ASM: tl.constexpr = INT4_ASM if KIND == 0 else (UINT4_ASM if KIND == 1 else FP4_ASM)
        w0, w1, w2, w3 = tl.inline_asm_elementwise(
            ASM, "=r,=r,=r,=r,r", [bits], (tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), True, 2
        )
    else:
        w0 = widened(bits & 15, KIND, dtype)
        w1 = widened((bits >> 4) & 15, KIND, dtype)
        w2 = widened((bits >> 8) & 15, KIND, dtype)
        w3 = widened((bits >> 12) & 15, KIND, dtype)
    return w0, w1, w2, w3


@triton.jit
def _halves(bits, KIND: tl.constexpr, dtype: tl.constexpr, FAST: tl.constexpr):
    """Words of 16 bits -> their two numbers."""
    if FAST and KIND == 4:
        w0, w1 = tl.inline_asm_elementwise(FP8_ASM, "=r,=r,r", [bits], (tl.bfloat16, tl.bfloat16), True, 2)
    else:
        w0 = widened(bits & 255, KIND, dtype)
        w1 = widened((bits >> 8) & 255, KIND, dtype)
    return w0, w1


@triton.jit
def _scaled(
    total, part, mass, scale_at, offset_at, number, inner, stride,
    GROUP: tl.constexpr, EVEN: tl.constexpr, HAS_OFFSET: tl.constexpr,
):  # fmt: skip
    """Adds the sums of a group [S, N, M] as what they stand for; mass [S, M]: the sum of its inputs. number [S, 1]: one
    of the group."""
    at = number // GROUP * stride
    fits = EVEN | (number < inner)
    total += part * tl.load(scale_at + at, mask=fits, other=0.0).to(tl.float32)[:, :, None]
    if HAS_OFFSET:
        total += mass[:, None, :] * tl.load(offset_at + at, mask=fits, other=0.0).to(tl.float32)[:, :, None]
    return total


@triton.jit
def _plus(
    total, bits, a0, a1, a2, a3, m0, m1, m2, m3, scale_at, offset_at, number, inner, stride,
    KIND: tl.constexpr, PART: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, HAS_OFFSET: tl.constexpr,
    IEEE: tl.constexpr, FAST: tl.constexpr,
):  # fmt: skip
    """total + bits . a, of a run in each slice; m: the sums of each a. number [S, 1]: the first of each run. GROUP 0:
    scaled in the end."""
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    PARTS: tl.constexpr = 1 if KIND == 5 else (2 if KIND > 2 else 4)
    PIECES: tl.constexpr = PARTS if GROUP == 0 or GROUP >= PARTS * PART else GROUP // PART  # that share a scale
    nothing = tl.zeros_like(total)
    part = nothing if GROUP > 0 else total
    mass = 0.0
    dtype = a0.dtype
    if PARTS == 1:
        part = tl.dot(bits, a0, part, input_precision=precision)
    elif PARTS == 2:
        w0, w1 = _halves(bits, KIND, dtype, FAST)
        part = tl.dot(w0, a0, part, input_precision=precision)
        mass = m0
        if PIECES == 1:
            total = _scaled(total, part, mass, scale_at, offset_at, number, inner, stride, GROUP, EVEN, HAS_OFFSET)
            part, mass, number = nothing, mass * 0.0, number + PART
        part = tl.dot(w1, a1, part, input_precision=precision)
        mass += m1
    else:
        w0, w1, w2, w3 = _quarters(bits, KIND, dtype, FAST)
        part = tl.dot(w0, a0, part, input_precision=precision)
        mass = m0
        if PIECES == 1:
            total = _scaled(total, part, mass, scale_at, offset_at, number, inner, stride, GROUP, EVEN, HAS_OFFSET)
            part, mass, number = nothing, mass * 0.0, number + PART
        part = tl.dot(w1, a1, part, input_precision=precision)
        mass += m1
        if PIECES <= 2:
            total = _scaled(total, part, mass, scale_at, offset_at, number, inner, stride, GROUP, EVEN, HAS_OFFSET)
            part, mass, number = nothing, mass * 0.0, number + PART * PIECES
        part = tl.dot(w2, a2, part, input_precision=precision)
        mass += m2
        if PIECES == 1:
            total = _scaled(total, part, mass, scale_at, offset_at, number, inner, stride, GROUP, EVEN, HAS_OFFSET)
            part, mass, number = nothing, mass * 0.0, number + PART
        part = tl.dot(w3, a3, part, input_precision=precision)
        mass += m3
    if GROUP > 0:
        total = _scaled(total, part, mass, scale_at, offset_at, number, inner, stride, GROUP, EVEN, HAS_OFFSET)
    else:
        total = part
    return total


@triton.jit
def _linear(
    x, data, scale, offset, bias, residual, out,
    num_rows, num_columns, inner, num_runs, width, scale_stride, x_stride, residual_stride,
    KIND: tl.constexpr, PART: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, HAS_SCALE: tl.constexpr,
    HAS_OFFSET: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    IEEE: tl.constexpr, FAST: tl.constexpr, SLICES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """data [N, width]: runs of PARTS * PART numbers, PART words each. GATED: its rows are gates, then ups."""
    PARTS: tl.constexpr = 1 if KIND == 5 else (2 if KIND > 2 else 4)
    RUN: tl.constexpr = PARTS * PART
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    run = tl.arange(0, SLICES)
    place = tl.arange(0, PART)
    near = tl.minimum(column, num_columns - 1)  # a column that does not exist is computed, and not stored
    if EARLY:
        tl.extra.cuda.gdc_wait()
    data_at = data + near.to(tl.int64)[None, :, None] * width + run[:, None, None] * PART + place[None, None, :]
    x_at = x + row.to(tl.int64)[None, None, :] * x_stride
    row_fits = (row < num_rows)[None, None, :]
    up = tl.cast(num_columns, tl.int64) * width
    scale_at, offset_at = scale + near[None, :], offset + near[None, :]
    total = tl.zeros((SLICES, BLOCK_N, BLOCK_M), dtype=tl.float32)
    second = tl.zeros_like(total)
    for first in tl.range(0, num_runs, SLICES, num_stages=STAGES):
        number = (first + run) * RUN
        at = number[:, None, None] + place[None, :, None]
        a0 = tl.load(x_at + at, mask=row_fits & (EVEN | (at < inner)), other=0.0)
        a1, a2, a3 = a0, a0, a0
        if PARTS > 1:
            a1 = tl.load(x_at + at + PART, mask=row_fits & (EVEN | (at + PART < inner)), other=0.0)
        if PARTS > 2:
            a2 = tl.load(x_at + at + 2 * PART, mask=row_fits & (EVEN | (at + 2 * PART < inner)), other=0.0)
            a3 = tl.load(x_at + at + 3 * PART, mask=row_fits & (EVEN | (at + 3 * PART < inner)), other=0.0)
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
        total = _plus(
            total, bits, a0, a1, a2, a3, m0, m1, m2, m3, scale_at, offset_at, number[:, None], inner, scale_stride,
            KIND, PART, GROUP, EVEN, HAS_OFFSET, IEEE, FAST,
        )  # fmt: skip
        if GATED:
            bits = tl.load(data_at + up + first * PART, mask=EVEN | fits, other=0)
            second = _plus(
                second, bits, a0, a1, a2, a3, m0, m1, m2, m3, scale_at + num_columns, offset_at + num_columns,
                number[:, None], inner, scale_stride, KIND, PART, GROUP, EVEN, HAS_OFFSET, IEEE, FAST,
            )  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    total, second = tl.sum(total, 0), tl.sum(second, 0)
    if GROUP == 0 and HAS_SCALE:
        total *= tl.load(scale + near).to(tl.float32)[:, None]
        if GATED:
            second *= tl.load(scale + num_columns + near).to(tl.float32)[:, None]
    finish(
        total, second, bias, residual, out, row[None, :], column[:, None],
        (row < num_rows)[None, :] & (column < num_columns)[:, None], num_columns, residual_stride,
        GATED, HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip


def linear(
    x: Tensor,
    data: Tensor,
    kind: int,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    part: int,
    group: int,
    gated: bool,
    exact: bool,
    out: Tensor | None,
    tile: Tile | None = None,
) -> Tensor:
    """x [T, in], data [out, words] -> [T, out], plus residual [T, out]; `gated`: [T, out / 2], silu(gate) * up.
    scale and offset [groups, out]; `group`: numbers that share one, 0: all of a row. `exact`: a row's bits do not
    depend on how many there are. `out`: where to put the result, dense."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    residual = residual if residual is None or residual.stride(-1) == 1 else residual.contiguous()
    num_rows, inner = x.shape
    num_columns = len(data) // 2 if gated else len(data)
    out = x.new_empty(num_rows, num_columns) if out is None else out
    if not num_rows:
        return out
    num_parts = 1 if kind == DENSE else 2 if kind > NUMBERS[Kind.FP4] else 4
    run = part * num_parts
    num_runs = triton.cdiv(inner, run)
    tile = tile or tile_for(num_rows, inner, num_parts, gated, exact, x.element_size())
    even = inner % (run * tile.slices) == 0
    early = launch.early(x)
    nothing = out if scale is None else scale
    _linear[(triton.cdiv(num_columns, tile.block_n), triton.cdiv(num_rows, tile.block_m))](
        x, data, nothing, nothing if offset is None else offset, out if bias is None else bias,
        out if residual is None else residual, out,
        num_rows, num_columns, inner, num_runs, data.stride(0), 0 if scale is None else scale.stride(0), x.stride(0),
        0 if residual is None else residual.stride(0),
        KIND=kind, PART=part, GROUP=group, EVEN=even, HAS_SCALE=scale is not None, HAS_OFFSET=offset is not None,
        GATED=gated, HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, IEEE=x.dtype == torch.float32,
        FAST=x.is_cuda and x.dtype == torch.bfloat16, SLICES=tile.slices, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        STAGES=tile.stages, EARLY=bool(early), num_warps=tile.warps, num_stages=tile.stages,
        **launch.options(bool(early)),
    )  # fmt: skip
    return out


def tile_for(num_rows: int, inner: int, num_parts: int, gated: bool, exact: bool, num_bytes: int) -> Tile:
    """Measured on an H200 (docs/diary.md). Only the number of slices changes the order of a sum."""
    block_m = 8 if num_rows <= 8 else 16 if num_rows <= 16 else 32
    slices = 8 if num_parts > 1 and inner >= LONG and block_m < 32 and not exact and not gated else 4
    block_n = 16 if block_m == 8 or (gated and num_parts < 4) else 32
    if num_parts == 4 and gated:
        block_n = 32
    elif num_parts == 4 and num_rows > 32:
        block_n = 64
    stages = 3 if gated or block_m == 32 else 4
    matrices = 2 if gated else 1
    while stages > 2 and stages * slices * 128 * num_bytes * (block_n * matrices / num_parts + block_m) > MAX_SHARED:
        stages -= 1
    return Tile(slices, block_m, block_n, stages)
