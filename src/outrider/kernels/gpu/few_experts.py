"""A mixture's experts for few rows: nothing has to be sorted, and only the experts that were chosen are read. Up with
its activation, down with the sum: two launches for up to three rows, three for more, which read no expert twice. A
Hopper has kernels of its own for many of these: see experts()."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.activation import Activation
from outrider.kernels.gpu import gates, launch, lone_experts, sliced_experts, widen
from outrider.kernels.gpu.hopper import on_hopper
from outrider.kernels.gpu.sum_up import sum_up
from outrider.kernels.gpu.sums import Operand, operand
from outrider.kernels.moe import ExpertWeights
from outrider.kernels.norm import Normed, materialised
from outrider.kernels.packed import PackedStack
from outrider.kernels.quantised import Kind, QuantisedStack

MAX_ROWS = 8  # that a tensor core takes at once
MAX_CHOSEN = 16
MAX_APART = 3  # rows of which each reads its own experts on the way down, or all in registers: more are no faster so


@triton.jit
def _chosen(
    x, data, scale, offset, bias, norm, ids, out,
    num_pairs, num_chosen, num_columns, inner, num_runs, width, scale_stride, x_stride, per_row, alpha, limit,
    norm_offset, eps,
    KIND: tl.constexpr, PART: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, POWERS: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_OFFSET: tl.constexpr, GATE: tl.constexpr, TWO: tl.constexpr, HAS_BIAS: tl.constexpr,
    NORM: tl.constexpr, IEEE: tl.constexpr, FAST: tl.constexpr, SLICES: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_P: tl.constexpr, STAGES: tl.constexpr, KNOWN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of few rows, without a list of tiles: of the experts that anybody chose, in the order in which they come in `ids`
    [T, k], every so many-th is a program's. There are fewer programs than pairs, as one that finds nothing to do takes
    another one's place. Pair p reads row p // per_row of x and writes row p of the output. KNOWN: ids were there before
    the launch before this one began."""
    if EARLY:
        if not KNOWN:
            tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()  # behind a wait for the router: see KNOWN
    pairs = tl.arange(0, BLOCK_P)
    id = tl.load(ids + pairs, mask=pairs < num_pairs, other=-1)
    same = id[:, None] == tl.load(ids + pairs, mask=pairs < num_pairs, other=-1)[None, :]
    is_first = (tl.sum((same & (pairs[None, :] < pairs[:, None])).to(tl.int32), 1) == 0) & (pairs < num_pairs)
    rank = tl.cumsum(is_first.to(tl.int32), 0) - 1
    if EARLY and KNOWN:
        tl.extra.cuda.gdc_wait()
    place = tl.arange(0, BLOCK_M)[:, None]  # of eight: the rows of x
    for number in range(tl.program_id(1), tl.sum(is_first.to(tl.int32), 0), tl.num_programs(1)):
        expert = tl.sum(tl.where(is_first & (rank == number), id, 0), 0)
        mine = ((id == expert) & (pairs < num_pairs))[None, :] & ((pairs // num_chosen)[None, :] == place)
        pair = tl.max(tl.where(mine, pairs[None, :], -1), 1)
        sliced_experts.answer(
            expert, pair, tl.maximum(pair, 0) // per_row, pair >= 0, x, data, scale, offset, bias, norm, out,
            num_columns, inner, num_runs, width, scale_stride, x_stride, alpha, limit, norm_offset, eps,
            KIND, PART, GROUP, EVEN, POWERS, HAS_SCALE, HAS_OFFSET, GATE, TWO, HAS_BIAS, NORM, IEEE, FAST, SLICES,
            BLOCK_M, BLOCK_N, STAGES,
        )  # fmt: skip


@dataclass(frozen=True)
class Tile:
    """What a program of few rows has at a time."""

    block_n: int  # columns; of gates, and as many ups
    slices: int  # of the inputs, each a warp's
    stages: int
    programs: int = 16  # for the experts of a column: each has every so many-th


SEVERAL = Tile(32, 2, 3)  # as measured (scripts/h200/experts.py)
SEVERAL_DOWN = {widen.NUMBERS[kind]: Tile(32, 1, 4) for kind in (Kind.INT4, Kind.UINT4)}  # where that is not


def is_for(num_rows: int, num_chosen: int) -> bool:
    """Whether rows are few enough that sorting them would cost more than reading some expert twice."""
    return num_rows <= MAX_ROWS and num_chosen <= MAX_CHOSEN


def experts(
    x: Tensor | Normed,
    ids: Tensor,
    shares: Tensor,
    weights: ExpertWeights,
    activation: Activation,
    residual: Tensor | None = None,
) -> Tensor:
    """x [T, H], the experts chosen for each row [T, k] and their shares [T, k] -> [T, H], plus the residual [T, H]."""
    x = x if isinstance(x, Normed) or x.stride(1) == 1 else x.contiguous()
    residual = residual if residual is None or residual.stride(1) == 1 else residual.contiguous()
    ids, shares = ids.contiguous(), shares.contiguous()
    is_known = gates.gate_of(activation)[0] != gates.NONE  # whoever chose has ended before the way down begins
    inner = _up(x, ids, weights, activation)
    return _down(inner, ids, shares, weights, residual, is_known=is_known)


def _up(x: Tensor | Normed, ids: Tensor, weights: ExpertWeights, activation: Activation) -> Tensor:
    weight, bias = weights.up, weights.up_bias
    assert not isinstance(weight, PackedStack), "that is for CPUs"
    if isinstance(weight, Tensor) and lone_experts.is_for(ids, weight):
        return lone_experts.up(x, ids, weight, bias, activation)
    gate = gates.gate_of(activation)
    module = _on_hopper(ids, weight) if isinstance(x, Tensor) else None
    if module is not None and module.fits(x, ids, weight, gate[0]):
        inner = module.up(x, ids, weight, bias, gate)
        return activation(inner) if gate[0] == gates.NONE else inner
    return up(x, ids, operand(weight), bias, activation)


def _down(
    x: Tensor, ids: Tensor, shares: Tensor, weights: ExpertWeights, residual: Tensor | None, *, is_known: bool
) -> Tensor:
    weight, bias = weights.down, weights.down_bias
    assert not isinstance(weight, PackedStack), "that is for CPUs"
    module = _on_hopper(ids, weight)
    if module is not None and module.fits(x, ids, weight, gates.NONE):
        return module.down(x, ids, shares, weight, bias, residual, is_known=is_known)
    run = lone_experts.down if len(ids) <= MAX_APART else down
    return run(x, ids, shares, operand(weight), bias, residual, is_known=is_known)


def _on_hopper(ids: Tensor, weight: Tensor | QuantisedStack) -> Any:
    """The module that may take such weights and so many rows there, where it is the fastest."""
    is_dense, num_rows = isinstance(weight, Tensor), len(ids)
    if is_dense:
        return on_hopper("streamed_experts", ids.device) if num_rows > 1 else None
    return on_hopper("held_experts", ids.device) if num_rows <= MAX_APART else None


def up(
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
    _launch(rows, ids, weight, bias, norm, out, tile, per_row=ids.shape[1], gate=(gate, alpha, limit))
    return activation(out) if gate == gates.NONE else out


def down(
    x: Tensor,
    ids: Tensor,
    shares: Tensor,
    weight: Operand,
    bias: Tensor | None,
    residual: Tensor | None,
    tile: Tile | None = None,
    *,
    is_known: bool = False,
) -> Tensor:
    """x [T * k, I], ids and shares [T, k] -> [T, N]: the weighed sum of each row's experts, plus the residual.
    `is_known`: ids were made two launches before this one, or more."""
    num_rows, num_chosen = ids.shape
    x = weight.ordered(x)
    answers = torch.empty(num_rows * num_chosen, weight.num_rows, dtype=torch.float32, device=x.device)
    tile = tile or SEVERAL_DOWN.get(weight.kind, SEVERAL)
    gate = (gates.NONE, 1.0, 0.0)
    _launch(x, ids, weight, bias, None, answers, tile, per_row=1, gate=gate, is_known=is_known)
    return sum_up(answers, shares, residual, x.dtype)


def _launch(
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
    is_known: bool = False,
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
        FAST=x.is_cuda and x.dtype == torch.bfloat16, SLICES=tile.slices, BLOCK_M=MAX_ROWS, BLOCK_N=tile.block_n,
        BLOCK_P=triton.next_power_of_2(num_pairs), STAGES=tile.stages, KNOWN=is_known,
        EARLY=early, num_warps=tile.slices, num_stages=tile.stages, **launch.options(early),
    )  # fmt: skip
