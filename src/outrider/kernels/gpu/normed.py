"""y = norm(x) W^T for few rows in one launch: the norm's weight multiplies the rows as they are read, one over the root
mean square what comes out."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.activation import Activation, silu_mul
from outrider.kernels.gpu import gates, launch, sliced, widen
from outrider.kernels.gpu.gates import activated
from outrider.kernels.gpu.linear import SMALL
from outrider.kernels.gpu.sums import operand, sums
from outrider.kernels.norm import Normed
from outrider.kernels.quantised import Quantised

MAX_ROWS = 8  # that a tensor core takes at once
LARGE = 2**25  # numbers in a weight
SHORT = 1024  # inputs that leave slices of long runs too little to do
SHORT_PART = 64


@triton.jit
def _normed_linear(
    x, norm, data, scale, offset, bias, out,
    num_rows, num_columns, inner, num_runs, width, scale_stride, x_stride, norm_offset, eps, alpha, limit,
    KIND: tl.constexpr, PART: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, HAS_SCALE: tl.constexpr,
    HAS_OFFSET: tl.constexpr, GATE: tl.constexpr, TWO: tl.constexpr, HAS_BIAS: tl.constexpr, IEEE: tl.constexpr,
    FAST: tl.constexpr, SLICES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """TWO: the weight's rows are gates, then ups."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.arange(0, BLOCK_M)
    run = tl.arange(0, SLICES)
    near = tl.minimum(column, num_columns - 1)  # a column that does not exist is computed, and not stored
    if EARLY:
        if EARLY == 1:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    data_at = data + near.to(tl.int64)[None, :, None] * width
    data_at += run[:, None, None] * PART + tl.arange(0, PART)[None, None, :]
    x_at = x + row.to(tl.int64)[None, None, :] * x_stride
    total, second, squares = sums(
        x_at, (row < num_rows)[None, None, :], data_at, tl.cast(num_columns, tl.int64) * width,
        scale + near[None, :], offset + near[None, :], norm, norm_offset, num_columns, run, inner, num_runs,
        scale_stride, KIND, PART, GROUP, EVEN, False, HAS_OFFSET, True, TWO, IEEE, FAST,
        SLICES, SLICES, BLOCK_M, BLOCK_N, STAGES,
    )  # fmt: skip
    if EARLY == 2:
        tl.extra.cuda.gdc_launch_dependents()
    root = tl.rsqrt(tl.sum(tl.sum(squares, 0), 0) / inner + eps)[None, :]
    total, second = tl.sum(total, 0) * root, tl.sum(second, 0) * root
    if GROUP == 0 and HAS_SCALE:
        total *= tl.load(scale + near).to(tl.float32)[:, None]
        if TWO:
            second *= tl.load(scale + num_columns + near).to(tl.float32)[:, None]
    if HAS_BIAS:
        total += tl.load(bias + near).to(tl.float32)[:, None]
        if TWO:
            second += tl.load(bias + num_columns + near).to(tl.float32)[:, None]
    kind: tl.constexpr = out.dtype.element_ty
    value = activated(total, second, alpha, limit, GATE, kind)
    at = out + row.to(tl.int64)[None, :] * num_columns + column[:, None]
    tl.store(at, value.to(kind), mask=(row < num_rows)[None, :] & (column < num_columns)[:, None])


def is_for(x: Normed, weight: Tensor | Quantised, activation: Activation | None = None) -> bool:
    """Whether it is worth it: few rows, and a weight of 16 bits that takes longer to read than its rows to weigh, but
    not so long that a launch more or less is nothing. For numbers in few bits, weighing rows costs more than a norm."""
    if isinstance(weight, Quantised) or len(x) > MAX_ROWS or x.x.stride(1) != 1:
        return False
    if weight.dtype != x.x.dtype or weight.stride(1) != 1:
        return False
    return weight.numel() < LARGE or (activation is not None and activation is not silu_mul)  # which saves two launches


def linear(
    x: Normed,
    weight: Tensor | Quantised,
    bias: Tensor | None = None,
    activation: Activation | None = None,
    *,
    out: Tensor | None = None,
) -> Tensor:
    """weight [out, in] -> [T, out], or what the activation makes of it. `out`: where to put the result, dense."""
    rows, (num_rows, inner) = x.x, x.x.shape
    gate, alpha, limit = (gates.NONE, 1.0, 0.0) if activation is None else gates.gate_of(activation)
    two = gates.has_two(gate)
    form = operand(weight, SHORT_PART if inner < SHORT else widen.DENSE_PART)
    num_columns = form.num_rows // 2 if two else form.num_rows
    out = rows.new_empty(num_rows, num_columns) if out is None else out
    if not num_rows:
        return out
    tile = sliced.tile_for(num_rows, num_columns, 0, form.num_parts, two, False, rows.element_size())
    nothing = out if form.scale is None else form.scale
    early = launch.early(rows) and (1 if num_columns * inner < SMALL else 2)
    _normed_linear[(triton.cdiv(num_columns, tile.block_n),)](
        rows, x.weight, form.data, nothing, nothing if form.offset is None else form.offset,
        out if bias is None else bias, out, num_rows, num_columns, inner, triton.cdiv(inner, form.run),
        form.data.stride(0), 0 if form.scale is None else form.scale.stride(0), rows.stride(0), x.offset, x.eps,
        alpha, limit, KIND=form.kind, PART=form.part, GROUP=form.group, EVEN=inner % (form.run * tile.slices) == 0,
        HAS_SCALE=form.scale is not None, HAS_OFFSET=form.offset is not None, GATE=gate, TWO=two,
        HAS_BIAS=bias is not None, IEEE=rows.dtype == torch.float32,
        FAST=rows.is_cuda and rows.dtype == torch.bfloat16, SLICES=tile.slices, BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n, STAGES=tile.stages, EARLY=int(early), num_warps=tile.warps, num_stages=tile.stages,
        **launch.options(bool(early)),
    )  # fmt: skip
    return activation(out) if activation is not None and gate == gates.NONE else out
