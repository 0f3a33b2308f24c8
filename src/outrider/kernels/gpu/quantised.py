"""y = x W^T with W in few bits: numbers are widened in registers, and scales are applied to sums of a group, not to
every number. Tiles and the order of sums depend on the weight's shape alone, as in linear.py."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu import launch
from outrider.kernels.quantised import Kind, Quantised

SPAN8 = 128  # numbers of 8 bits that are multiplied at once, at most
BLOCK = 1024  # bytes that a program widens
NUMBERS = {Kind.INT4: 0, Kind.UINT4: 1, Kind.FP4: 2, Kind.INT8: 3, Kind.FP8: 4}


@triton.jit
def _widened(numbers, KIND: tl.constexpr, dtype: tl.constexpr):
    """Numbers, one a byte, as floats; all of them are exact in 16 bits."""
    if KIND == 4:
        return numbers.to(tl.float8e4nv, bitcast=True).to(dtype)
    if KIND == 3:
        return numbers.to(tl.int8, bitcast=True).to(dtype)
    if KIND == 2:
        size = numbers & 7
        value = tl.where(size < 5, size * 0.5, tl.where(size == 5, 3.0, tl.where(size == 6, 4.0, 6.0)))
        return tl.where(numbers > 7, -value, value).to(dtype)
    if dtype == tl.bfloat16:  # 128 + n without a conversion: its last bits are n's
        wide = (numbers.to(tl.uint16) | 0x4300).to(tl.bfloat16, bitcast=True)
        return wide - (136.0 if KIND == 0 else 128.0)
    return (numbers.to(tl.float32) - (8.0 if KIND == 0 else 0.0)).to(dtype)


@triton.jit
def _scaled(part, mass, scale, offset, at, fits, HAS_OFFSET: tl.constexpr):
    """The sum of a group [M, N] as what it stands for; mass [M]: the sum of its inputs."""
    part *= tl.load(scale + at, mask=fits, other=0.0).to(tl.float32)[None, :]
    if HAS_OFFSET:
        part += mass[:, None] * tl.load(offset + at, mask=fits, other=0.0).to(tl.float32)[None, :]
    return part


@triton.jit
def _inputs(x_at, order, place, row_fits, HAS_ORDER: tl.constexpr):
    """[M, K] of these numbers."""
    if HAS_ORDER:
        place = tl.load(order + place)
    return tl.load(x_at + place[None, :], mask=row_fits[:, None], other=0.0)


@triton.jit
def _sum(
    x_at, order, place, row_fits, data, scale, offset, column, column_fits, inner, num_groups,
    KIND: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, PACKED: tl.constexpr, HAS_OFFSET: tl.constexpr,
    HAS_ORDER: tl.constexpr, IEEE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """x W^T of a tile, [M, N]. HALF: numbers that are multiplied at once; PACKED: two in a byte."""
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    dtype: tl.constexpr = x_at.dtype.element_ty
    data_at = data + column.to(tl.int64)[:, None] * (inner // 2 if PACKED else inner) + place[None, :]
    scale_at = column.to(tl.int64) * num_groups
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    span: tl.constexpr = 2 * HALF if PACKED else HALF
    for begin in range(0, inner, span):
        at = scale_at + begin // GROUP
        a = _inputs(x_at, order, begin + place, row_fits, HAS_ORDER)
        bits = tl.load(data_at + (begin // 2 if PACKED else begin), mask=column_fits[:, None], other=0)
        part = tl.dot(a, _widened(bits & 15 if PACKED else bits, KIND, dtype).T, input_precision=precision)
        mass = tl.sum(a.to(tl.float32), 1) if HAS_OFFSET else 0.0
        if PACKED:
            if span > GROUP:  # the halves are of different groups
                total += _scaled(part, mass, scale, offset, at, column_fits, HAS_OFFSET)
                part, mass, at = tl.zeros_like(part), mass * 0.0, at + 1
            b = _inputs(x_at, order, begin + HALF + place, row_fits, HAS_ORDER)
            part = tl.dot(b, _widened(bits >> 4, KIND, dtype).T, part, input_precision=precision)
            if HAS_OFFSET:
                mass += tl.sum(b.to(tl.float32), 1)
        total += _scaled(part, mass, scale, offset, at, column_fits, HAS_OFFSET)
    return total


@triton.jit
def _linear(
    x, data, scale, offset, order, bias, residual, out,
    num_rows, num_columns, inner, num_groups, x_stride, residual_stride,
    KIND: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, PACKED: tl.constexpr,
    HAS_OFFSET: tl.constexpr, HAS_ORDER: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr, IEEE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """GATED: the weight's rows are gates, then ups; the result is silu(gate) * up."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    place = tl.arange(0, HALF)
    column_fits, row_fits = column < num_columns, row < num_rows
    if EARLY:
        tl.extra.cuda.gdc_wait()
    x_at = x + row.to(tl.int64)[:, None] * x_stride
    total = _sum(
        x_at, order, place, row_fits, data, scale, offset, column, column_fits, inner, num_groups,
        KIND, HALF, GROUP, PACKED, HAS_OFFSET, HAS_ORDER, IEEE, BLOCK_M, BLOCK_N,
    )  # fmt: skip
    kind = out.dtype.element_ty
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column_fits, other=0.0).to(tl.float32)[None, :]
    if GATED:
        second = _sum(
            x_at, order, place, row_fits, data, scale, offset, column + num_columns, column_fits, inner, num_groups,
            KIND, HALF, GROUP, PACKED, HAS_OFFSET, HAS_ORDER, IEEE, BLOCK_M, BLOCK_N,
        )  # fmt: skip
        if HAS_BIAS:
            second += tl.load(bias + num_columns + column, mask=column_fits, other=0.0).to(tl.float32)[None, :]
        gate = total.to(kind).to(tl.float32)
        total = (gate / (1 + tl.exp(-gate))).to(kind).to(tl.float32) * second.to(kind).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    fits = row_fits[:, None] & column_fits[None, :]
    if HAS_RESIDUAL:
        at = residual + row.to(tl.int64)[:, None] * residual_stride + column[None, :]
        total = total.to(kind).to(tl.float32) + tl.load(at, mask=fits, other=0.0).to(tl.float32)
    at = out + row.to(tl.int64)[:, None] * num_columns + column[None, :]
    tl.store(at, total.to(kind), mask=fits)


def linear(
    x: Tensor,
    weight: Quantised,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    gated: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """x [T, in], weight [out, in] -> [T, out], plus residual [T, out]; `gated`: [T, out / 2], silu(gate) * up. `out`:
    where to put the result, dense."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    residual = residual if residual is None or residual.stride(-1) == 1 else residual.contiguous()
    (num_rows, inner), packed = x.shape, weight.kind.num_bits == 4
    num_columns = len(weight.data) // 2 if gated else len(weight.data)
    out = x.new_empty(num_rows, num_columns) if out is None else out
    if not num_rows:
        return out
    block_m = 16
    while block_m < min(num_rows, 64):
        block_m *= 2
    block_n = 32 if block_m == 16 or num_columns < 8192 else 64
    early = launch.early(x)
    _linear[(triton.cdiv(num_columns, block_n), triton.cdiv(num_rows, block_m))](
        x, weight.data, weight.scale, weight.scale if weight.offset is None else weight.offset,
        weight.data if weight.order is None else weight.order, out if bias is None else bias,
        out if residual is None else residual, out,
        num_rows, num_columns, inner, weight.scale.shape[1], x.stride(0), 0 if residual is None else residual.stride(0),
        KIND=NUMBERS[weight.kind], HALF=weight.half if packed else _span8(weight.group), GROUP=weight.group,
        PACKED=packed, HAS_OFFSET=weight.offset is not None, HAS_ORDER=weight.order is not None, GATED=gated,
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, IEEE=x.dtype == torch.float32,
        BLOCK_M=block_m, BLOCK_N=block_n, EARLY=int(early), num_warps=4, num_stages=4 if packed else 5,
        **launch.options(bool(early)),
    )  # fmt: skip
    return out


def _span8(group: int) -> int:
    """The largest power of two that divides a group, within bounds."""
    return min(group & -group, SPAN8)


@triton.jit
def _dense(
    data, scale, offset, order, out, num_bytes, inner, num_groups,
    KIND: tl.constexpr, HALF: tl.constexpr, GROUP: tl.constexpr, PACKED: tl.constexpr,
    HAS_OFFSET: tl.constexpr, HAS_ORDER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program widens some bytes of a row."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    fits = at < num_bytes
    bits = tl.load(data + row * num_bytes + at, mask=fits, other=0)
    for upper in tl.static_range(2 if PACKED else 1):
        place = at // HALF * 2 * HALF + at % HALF + upper * HALF if PACKED else at
        numbers = (bits >> 4 if upper == 1 else bits & 15) if PACKED else bits
        group = row * num_groups + place // GROUP
        value = _widened(numbers, KIND, tl.float32) * tl.load(scale + group, mask=fits, other=0.0).to(tl.float32)
        if HAS_OFFSET:
            value += tl.load(offset + group, mask=fits, other=0.0).to(tl.float32)
        if HAS_ORDER:
            place = tl.load(order + place, mask=fits, other=0)
        tl.store(out + row * inner + place, value.to(out.dtype.element_ty), mask=fits)


def dense(weight: Quantised, dtype: torch.dtype) -> Tensor:
    num_rows, num_bytes = weight.data.shape
    out = torch.empty(num_rows, weight.num_columns, dtype=dtype, device=weight.data.device)
    packed = weight.kind.num_bits == 4
    _dense[(num_rows, triton.cdiv(num_bytes, BLOCK))](
        weight.data, weight.scale, weight.scale if weight.offset is None else weight.offset,
        weight.data if weight.order is None else weight.order, out, num_bytes, weight.num_columns,
        weight.scale.shape[1], KIND=NUMBERS[weight.kind], HALF=weight.half, GROUP=weight.group, PACKED=packed,
        HAS_OFFSET=weight.offset is not None, HAS_ORDER=weight.order is not None, BLOCK=BLOCK,
    )  # fmt: skip
    return out
