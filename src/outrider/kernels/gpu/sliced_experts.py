"""A mixture's experts in 16, 8 or 4 bits, widened in registers (see sliced.py). Few rows take two launches that read
only the experts that were chosen, each of them once on the way up; more rows come in tiles of one expert each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.activation import Activation
from outrider.kernels.gpu import gates, launch, widen
from outrider.kernels.gpu.gates import activated
from outrider.kernels.gpu.sums import Operand, sums
from outrider.kernels.norm import Normed, materialised
from outrider.kernels.quantised import Kind

MAX_FEW = 8  # rows that a tensor core takes at once
MAX_TILE = 32  # rows of a tile
MAX_SHARED = 200 * 2**10  # bytes of a program's buffers
SUM_BLOCK = 512  # columns that a program adds up


@triton.jit
def _answer(
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
    _answer(
        expert, pair, tl.maximum(pair, 0) // per_row, pair >= 0, x, data, scale, offset, bias, x, out,
        num_columns, inner, num_runs, width, scale_stride, x_stride, alpha, limit, 0.0, 0.0,
        KIND, PART, GROUP, EVEN, POWERS, HAS_SCALE, HAS_OFFSET, GATE, TWO, HAS_BIAS, False, IEEE, FAST, SLICES, BLOCK_M,
        BLOCK_N, STAGES,
    )  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _chosen(
    x, data, scale, offset, bias, norm, ids, out,
    num_pairs, num_chosen, num_columns, inner, num_runs, width, scale_stride, x_stride, per_row, alpha, limit,
    norm_offset, eps,
    KIND: tl.constexpr, PART: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, POWERS: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_OFFSET: tl.constexpr, GATE: tl.constexpr, TWO: tl.constexpr, HAS_BIAS: tl.constexpr,
    NORM: tl.constexpr, IEEE: tl.constexpr, FAST: tl.constexpr, SLICES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of few rows, without a list of tiles: of the experts that anybody chose, in the order in which they come in `ids`
    [T, k], every so many-th is a program's. There are fewer programs than pairs, as one that finds nothing to do takes
    another one's place. Pair p reads row p // per_row of x and writes row p of the output."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    pairs = tl.arange(0, BLOCK_P)
    id = tl.load(ids + pairs, mask=pairs < num_pairs, other=-1)
    same = id[:, None] == tl.load(ids + pairs, mask=pairs < num_pairs, other=-1)[None, :]
    is_first = (tl.sum((same & (pairs[None, :] < pairs[:, None])).to(tl.int32), 1) == 0) & (pairs < num_pairs)
    rank = tl.cumsum(is_first.to(tl.int32), 0) - 1
    place = tl.arange(0, BLOCK_M)[:, None]  # of eight: the rows of x
    for number in range(tl.program_id(1), tl.sum(is_first.to(tl.int32), 0), tl.num_programs(1)):
        expert = tl.sum(tl.where(is_first & (rank == number), id, 0), 0)
        mine = ((id == expert) & (pairs < num_pairs))[None, :] & ((pairs // num_chosen)[None, :] == place)
        pair = tl.max(tl.where(mine, pairs[None, :], -1), 1)
        _answer(
            expert, pair, tl.maximum(pair, 0) // per_row, pair >= 0, x, data, scale, offset, bias, norm, out,
            num_columns, inner, num_runs, width, scale_stride, x_stride, alpha, limit, norm_offset, eps,
            KIND, PART, GROUP, EVEN, POWERS, HAS_SCALE, HAS_OFFSET, GATE, TWO, HAS_BIAS, NORM, IEEE, FAST, SLICES,
            BLOCK_M, BLOCK_N, STAGES,
        )  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def _sum_up(
    answers, shares, residual, out, num_columns, residual_stride,
    CHOSEN: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of a row's experts [T, k, N], by their shares, in their order; all of them are asked for at once."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    fits = column < num_columns
    kind: tl.constexpr = out.dtype.element_ty
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    answers_of, shares_of = (), ()
    for place in tl.static_range(CHOSEN):
        pair = row * CHOSEN + place
        answer = tl.load(answers + pair * num_columns + column, mask=fits, other=0.0)
        answers_of = answers_of + (answer,)  # type: ignore[assignment] # noqa: RUF005
        shares_of = shares_of + (tl.load(shares + pair),)  # type: ignore[assignment] # noqa: RUF005
    more = tl.zeros((BLOCK,), dtype=kind)
    if HAS_RESIDUAL:
        more = tl.load(residual + row * residual_stride + column, mask=fits, other=0.0)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for place in tl.static_range(CHOSEN):
        total += answers_of[place] * shares_of[place].to(kind).to(tl.float32)
    if HAS_RESIDUAL:
        total = total.to(kind).to(tl.float32) + more.to(tl.float32)
    tl.store(out + row * num_columns + column, total.to(kind), mask=fits)


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


@dataclass(frozen=True)
class Tile:
    """What a program of few rows has at a time."""

    block_n: int  # columns; of gates, and as many ups
    slices: int  # of the inputs, each a warp's
    stages: int
    programs: int = 16  # for the experts of a column: each has every so many-th


SEVERAL = Tile(32, 2, 3)  # as measured (scripts/h200/experts.py)
SEVERAL_DOWN = {widen.NUMBERS[kind]: Tile(32, 1, 4) for kind in (Kind.INT4, Kind.UINT4)}  # where that is not


def up_few(
    x: Tensor | Normed,
    ids: Tensor,
    weight: Operand,
    bias: Tensor | None,
    activation: Activation,
    tile: Tile | None = None,
) -> Tensor:
    """x [T, H], ids [T, k] -> [T * k, I]: what each pair's expert makes of its row."""
    gate, alpha, limit = gates.gate_of(activation)
    norm = x if isinstance(x, Normed) and weight.order is None else None
    rows = norm.x if norm is not None else weight.ordered(materialised(x))
    two = gates.has_two(gate)
    out = rows.new_empty(ids.numel(), weight.num_rows // 2 if two else weight.num_rows)
    tile = tile or (SEVERAL if len(ids) > 1 or weight.powers else Tile(16, 4, 3 if two else 4))
    _few(rows, ids, weight, bias, norm, out, tile, per_row=ids.shape[1], gate=(gate, alpha, limit))
    return activation(out) if gate == gates.NONE else out


def _few(
    x: Tensor,
    ids: Tensor,
    weight: Operand,
    bias: Tensor | None,
    norm: Normed | None,
    out: Tensor,
    tile: Tile,
    *,
    per_row: int,
    gate: tuple[int, float, float],
) -> None:
    early, nothing = launch.early(x), out if weight.scale is None else weight.scale
    num_pairs, num_columns = out.shape
    _chosen[(triton.cdiv(num_columns, tile.block_n), min(tile.programs, num_pairs))](
        x, weight.data, nothing, nothing if weight.offset is None else weight.offset, out if bias is None else bias,
        out if norm is None else norm.weight, ids, out, num_pairs, ids.shape[1], num_columns, weight.inner,
        triton.cdiv(weight.inner, weight.run), weight.data.stride(0),
        0 if weight.scale is None else weight.scale.stride(0), x.stride(0), per_row, gate[1], gate[2],
        0.0 if norm is None else norm.offset, 0.0 if norm is None else norm.eps, KIND=weight.kind, PART=weight.part,
        GROUP=weight.group, EVEN=weight.inner % (weight.run * tile.slices) == 0, POWERS=weight.powers,
        HAS_SCALE=weight.scale is not None, HAS_OFFSET=weight.offset is not None, GATE=gate[0],
        TWO=gates.has_two(gate[0]), HAS_BIAS=bias is not None, NORM=norm is not None, IEEE=x.dtype == torch.float32,
        FAST=x.is_cuda and x.dtype == torch.bfloat16, SLICES=tile.slices, BLOCK_M=MAX_FEW, BLOCK_N=tile.block_n,
        BLOCK_P=triton.next_power_of_2(num_pairs), STAGES=tile.stages, EARLY=early, num_warps=tile.slices,
        num_stages=tile.stages, **launch.options(early),
    )  # fmt: skip


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


def down_several(
    x: Tensor,
    ids: Tensor,
    shares: Tensor,
    weight: Operand,
    bias: Tensor | None,
    residual: Tensor | None,
    tile: Tile | None = None,
) -> Tensor:
    """As down_few, for rows that share experts: each expert is read once, and a second launch adds up."""
    num_rows, num_chosen = ids.shape
    x = weight.ordered(x)
    answers = torch.empty(num_rows * num_chosen, weight.num_rows, dtype=torch.float32, device=x.device)
    tile = tile or SEVERAL_DOWN.get(weight.kind, SEVERAL)
    _few(x, ids, weight, bias, None, answers, tile, per_row=1, gate=(gates.NONE, 1.0, 0.0))
    out, early = x.new_empty(num_rows, weight.num_rows), launch.early(x)
    _sum_up[(num_rows, triton.cdiv(weight.num_rows, SUM_BLOCK))](
        answers, shares, out if residual is None else residual, out, weight.num_rows,
        0 if residual is None else residual.stride(0), CHOSEN=num_chosen, HAS_RESIDUAL=residual is not None,
        BLOCK=SUM_BLOCK, EARLY=early, num_warps=4, **launch.options(early),
    )  # fmt: skip
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
