"""A mixture's experts in 16, 8 or 4 bits, widened in registers (see sliced.py). Few rows take two launches that read
only the experts that were chosen, each of them once on the way up; more rows come in tiles of one expert each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.activation import Activation
from outrider.kernels.gpu import gates, launch
from outrider.kernels.gpu.gates import activated
from outrider.kernels.gpu.sums import Operand, sums
from outrider.kernels.norm import Normed, materialised

MAX_FEW = 8  # rows that a tensor core takes at once
MAX_TILE = 32  # rows of a tile
MAX_SHARED = 200 * 2**10  # bytes of a program's buffers


@triton.jit
def _tile(
    x, data, scale, offset, bias, norm, experts, pairs, out,
    num_pairs, num_columns, inner, num_runs, width, scale_stride, x_stride, per_row, alpha, limit, norm_offset, eps,
    KIND: tl.constexpr, PART: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, POWERS: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_OFFSET: tl.constexpr, GATE: tl.constexpr, TWO: tl.constexpr, HAS_BIAS: tl.constexpr,
    NORM: tl.constexpr, IEEE: tl.constexpr, FAST: tl.constexpr, FEW: tl.constexpr, SLICES: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
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
    total, second, squares = sums(
        x + row[None, None, :] * x_stride, exists[None, None, :], data_at, tl.cast(num_columns, tl.int64) * width,
        scale_at, offset_at, norm, norm_offset, num_columns, run, inner, num_runs, scale_stride,
        KIND, PART, GROUP, EVEN, POWERS, HAS_OFFSET, NORM, TWO, IEEE, FAST, SLICES, SLICES, BLOCK_M, BLOCK_N, STAGES,
    )  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
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
    place = tl.program_id(0)  # next to each other: rows that chose the same expert read it at the same time
    slice = tl.arange(0, SLICES)
    chosen = slice // SPLIT
    run = slice % SPLIT
    is_chosen = chosen < num_chosen
    pair = place * num_chosen + tl.minimum(chosen, num_chosen - 1)
    expert = tl.load(ids + pair)
    share = tl.load(shares + pair)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    near = tl.minimum(column, num_columns - 1)
    first_row = expert.to(tl.int64) * num_columns
    rows = first_row[:, None] + near[None, :]
    data_at = data + rows[:, :, None] * width + run[:, None, None] * PART + tl.arange(0, PART)[None, None, :]
    lane = tl.arange(0, BLOCK_M)
    x_at = x + pair.to(tl.int64)[:, None, None] * inner + (lane * 0)[None, None, :]
    more = share
    if HAS_RESIDUAL:  # asked for before the sums are made
        more = tl.load(residual + place.to(tl.int64) * residual_stride + near)
    total, _, _ = sums(
        x_at, is_chosen[:, None, None] & (lane == 0)[None, None, :], data_at, num_columns, scale + rows,
        offset + rows, x, 0.0, num_columns, run, inner, num_runs, scale_stride,
        KIND, PART, GROUP, EVEN, POWERS, HAS_OFFSET, False, False, IEEE, FAST, SLICES, SPLIT, BLOCK_M, BLOCK_N, STAGES,
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
        value = value.to(kind).to(tl.float32) + more.to(tl.float32)
    tl.store(out + place.to(tl.int64) * num_columns + column, value.to(kind), mask=column < num_columns)


def up_few(x: Tensor | Normed, ids: Tensor, weight: Operand, bias: Tensor | None, activation: Activation) -> Tensor:
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
    x: Tensor | Normed,
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
    norm = x if isinstance(x, Normed) and weight.order is None else None
    x = norm.x if norm is not None else weight.ordered(materialised(x))
    two = gates.has_two(gate)
    num_columns = weight.num_rows // 2 if two else weight.num_rows
    out = x.new_empty(num_pairs, num_columns)
    early, few = launch.early(x), pairs is None
    slices, block_n = (2, 32) if few and weight.powers else (4, 16)  # of few bits: fewer warps wait for each other
    stages = 3 if two or block_m == 32 else 4
    nothing = out if weight.scale is None else weight.scale
    _tile[(triton.cdiv(num_columns, block_n), experts.numel())](
        x, weight.data, nothing, nothing if weight.offset is None else weight.offset, out if bias is None else bias,
        out if norm is None else norm.weight, experts, experts if pairs is None else pairs, out,
        num_pairs, num_columns, weight.inner, triton.cdiv(weight.inner, weight.run), weight.data.stride(0),
        0 if weight.scale is None else weight.scale.stride(0), x.stride(0), per_row, alpha, limit,
        0.0 if norm is None else norm.offset, 0.0 if norm is None else norm.eps, KIND=weight.kind, PART=weight.part,
        GROUP=weight.group, EVEN=weight.inner % (weight.run * slices) == 0,
        POWERS=weight.powers, HAS_SCALE=weight.scale is not None, HAS_OFFSET=weight.offset is not None, GATE=gate,
        TWO=two, HAS_BIAS=bias is not None, NORM=norm is not None, IEEE=x.dtype == torch.float32,
        FAST=x.is_cuda and x.dtype == torch.bfloat16, FEW=few, SLICES=slices, BLOCK_M=block_m,
        BLOCK_N=block_n, BLOCK_P=triton.next_power_of_2(num_pairs) if few else 1, STAGES=stages,
        EARLY=early, num_warps=slices, num_stages=stages, **launch.options(early),
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
    stage = experts * split * weight.run * x.element_size() * (block_n // weight.num_parts + MAX_FEW)
    while stages > 2 and (stages - 1) * stage > MAX_SHARED:
        stages -= 1
    _down[(num_rows, triton.cdiv(weight.num_rows, block_n))](
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
