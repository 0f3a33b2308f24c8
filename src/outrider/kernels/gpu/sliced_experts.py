"""What one of a mixture's experts makes of some rows, in 16, 8 or 4 bits, widened in registers (see sliced.py); and of
many rows, which come in tiles of one expert each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.activation import Activation
from outrider.kernels.gpu import gates, launch
from outrider.kernels.gpu.gates import activated
from outrider.kernels.gpu.sums import Operand, sums

MAX_TILE = 32  # rows of a tile


@triton.jit
def answer(
    expert, pair, row, exists, x, data, scale, offset, bias, norm, out,
    num_columns, inner, num_runs, width, scale_stride, x_stride, alpha, limit, norm_offset, eps,
    KIND: tl.constexpr, PART: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, POWERS: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_OFFSET: tl.constexpr, GATE: tl.constexpr, TWO: tl.constexpr, HAS_BIAS: tl.constexpr,
    NORM: tl.constexpr, IEEE: tl.constexpr, FAST: tl.constexpr, SLICES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Some columns of what an expert makes of some rows, to where each pair of a row and an expert has its own.
    TWO: the weight's rows are gates, then ups."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    near = tl.minimum(column, num_columns - 1)  # a column that does not exist is computed, and not stored
    run = tl.arange(0, SLICES)
    first_row = expert.to(tl.int64) * (num_columns * (2 if TWO else 1))
    data_at = (
        data + (first_row + near)[None, :, None] * width + run[:, None, None] * PART + tl.arange(0, PART)[None, None, :]
    )
    scale_at, offset_at = scale + (first_row + near)[None, :], offset + (first_row + near)[None, :]
    total, second, squares = sums(
        x + row.to(tl.int64)[None, None, :] * x_stride, exists[None, None, :], data_at,
        tl.cast(num_columns, tl.int64) * width, scale_at, offset_at, norm, norm_offset, num_columns, run, inner,
        num_runs, scale_stride,
        KIND, PART, GROUP, EVEN, POWERS, HAS_OFFSET, NORM, TWO, IEEE, FAST, SLICES, SLICES, BLOCK_M, BLOCK_N, STAGES,
    )  # fmt: skip
    total, second = tl.sum(total, 0), tl.sum(second, 0)
    if NORM:
        root = tl.rsqrt(tl.sum(tl.sum(squares, 0), 0) / inner + eps)[None, :]
        total, second = total * root, second * root
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
def _tile(
    x, data, scale, offset, bias, experts, pairs, out,
    num_columns, inner, num_runs, width, scale_stride, x_stride, per_row, alpha, limit,
    KIND: tl.constexpr, PART: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, POWERS: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_OFFSET: tl.constexpr, GATE: tl.constexpr, TWO: tl.constexpr, HAS_BIAS: tl.constexpr,
    IEEE: tl.constexpr, FAST: tl.constexpr, SLICES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of one of the tiles that moe.group() has made. Pair p reads row p // per_row of x and writes row p of the
    output."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    number = tl.program_id(1)
    expert = tl.load(experts + number)
    if expert < 0:
        return
    pair = tl.load(pairs + number * BLOCK_M + tl.arange(0, BLOCK_M))
    answer(
        expert, pair, tl.maximum(pair, 0) // per_row, pair >= 0, x, data, scale, offset, bias, x, out,
        num_columns, inner, num_runs, width, scale_stride, x_stride, alpha, limit, 0.0, 0.0,
        KIND, PART, GROUP, EVEN, POWERS, HAS_SCALE, HAS_OFFSET, GATE, TWO, HAS_BIAS, False, IEEE, FAST, SLICES, BLOCK_M,
        BLOCK_N, STAGES,
    )  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


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
    gate, alpha, limit = (gates.NONE, 1.0, 0.0) if activation is None else gates.gate_of(activation)
    per_row, x = num_pairs // len(x), weight.ordered(x)
    two = gates.has_two(gate)
    num_columns = weight.num_rows // 2 if two else weight.num_rows
    out = x.new_empty(num_pairs, num_columns)
    early, slices, block_m, block_n = launch.early(x), 4, pairs.shape[1], 16
    stages = 3 if two or block_m == 32 else 4
    nothing = out if weight.scale is None else weight.scale
    _tile[(triton.cdiv(num_columns, block_n), experts.numel())](
        x, weight.data, nothing, nothing if weight.offset is None else weight.offset, out if bias is None else bias,
        experts, pairs, out, num_columns, weight.inner, triton.cdiv(weight.inner, weight.run), weight.data.stride(0),
        0 if weight.scale is None else weight.scale.stride(0), x.stride(0), per_row, alpha, limit, KIND=weight.kind,
        PART=weight.part, GROUP=weight.group, EVEN=weight.inner % (weight.run * slices) == 0, POWERS=weight.powers,
        HAS_SCALE=weight.scale is not None, HAS_OFFSET=weight.offset is not None, GATE=gate, TWO=two,
        HAS_BIAS=bias is not None, IEEE=x.dtype == torch.float32, FAST=x.is_cuda and x.dtype == torch.bfloat16,
        SLICES=slices, BLOCK_M=block_m, BLOCK_N=block_n, STAGES=stages, EARLY=early, num_warps=slices,
        num_stages=stages, **launch.options(early),
    )  # fmt: skip
    if activation is not None and gate == gates.NONE:
        return activation(out)
    return out
