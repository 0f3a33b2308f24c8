"""A mixture's experts for any number of rows, without asking the host which expert has how many of them.
Rows are grouped into tiles of one expert each; the order of every sum is fixed, so a row's bits are its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.activation import Activation
from outrider.kernels.gpu import gates, launch, sliced_experts
from outrider.kernels.gpu.gates import activated
from outrider.kernels.gpu.sums import operand
from outrider.kernels.moe import ExpertWeights
from outrider.kernels.packed import PackedStack
from outrider.kernels.quantised import QuantisedStack

MAX_GROUP_BLOCK = 4096  # pairs that a program of _group looks at together
SUM_BLOCK = 1024
WIDENED = 64  # rows of an expert on average: to widen experts in few bits first is faster


@triton.jit
def _group(
    ids, experts, pairs, num_pairs,
    BLOCK_M: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One program an expert: it counts the pairs of the experts before its own, so it knows which tiles are its own
    without hearing from the others: those from before // BLOCK_M + min(before, expert) on. The next expert's begin
    late enough, as an expert with pairs moves both terms by enough; tiles left over in between belong to nobody."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    expert = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    before = 0
    count = 0
    for start in range(0, num_pairs, BLOCK):
        id = tl.load(ids + start + lane, mask=start + lane < num_pairs, other=2147483647).to(tl.int32)
        before += tl.sum((id < expert).to(tl.int32), 0)
        count += tl.sum((id == expert).to(tl.int32), 0)
    until = before + count
    first = before // BLOCK_M + tl.minimum(before, expert)
    end = until // BLOCK_M + tl.minimum(until, expert + 1)
    used = first + (count + BLOCK_M - 1) // BLOCK_M
    for start in range(first, end, BLOCK):
        tile = start + lane
        tl.store(experts + tile, tl.where(tile < used, expert, -1), mask=tile < end)
    placed = first * BLOCK_M
    for start in range(0, num_pairs, BLOCK):
        id = tl.load(ids + start + lane, mask=start + lane < num_pairs, other=2147483647).to(tl.int32)
        mine = (id == expert).to(tl.int32)
        place = placed + tl.cumsum(mine, 0) - 1
        tl.store(pairs + place, start + lane, mask=mine > 0)
        placed += tl.sum(mine, 0)
    rest = placed + tl.arange(0, BLOCK_M)
    tl.store(pairs + rest, tl.full((BLOCK_M,), -1, tl.int32), mask=rest < used * BLOCK_M)


@triton.jit
def _expert_linear(
    x, weight, bias, experts, pairs, out,
    num_columns, inner, per_row, x_stride, expert_stride, weight_stride, bias_stride, alpha, limit,
    GATE: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, EVEN: tl.constexpr, IEEE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some columns of one tile's answer. Pair p reads row p // per_row of x and writes row p of the output.
    GATED: the weight's rows are gates, then ups."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    tile = tl.program_id(1)
    expert = tl.load(experts + tile).to(tl.int64)
    if expert < 0:
        return
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    place = tl.arange(0, BLOCK_K)
    pair = tl.load(pairs + tile * BLOCK_M + tl.arange(0, BLOCK_M))
    exists = pair >= 0
    row = (tl.maximum(pair, 0) // per_row).to(tl.int64)
    column_fits = column < num_columns
    x_at = x + row[:, None] * x_stride + place[None, :]
    weight_at = weight + expert * expert_stride + column.to(tl.int64)[:, None] * weight_stride + place[None, :]
    up_shift = tl.cast(num_columns, tl.int64) * weight_stride
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    second = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    for shift in range(0, inner, BLOCK_K):
        fits_k = (place + shift < inner)[None, :] | EVEN
        a = tl.load(x_at + shift, mask=exists[:, None] & fits_k, other=0.0)
        w = tl.load(weight_at + shift, mask=column_fits[:, None] & fits_k, other=0.0)
        total = tl.dot(a, w.T, total, input_precision=precision)
        if GATED:
            u = tl.load(weight_at + up_shift + shift, mask=column_fits[:, None] & fits_k, other=0.0)
            second = tl.dot(a, u.T, second, input_precision=precision)
    kind: tl.constexpr = out.dtype.element_ty
    if HAS_BIAS:
        bias_at = bias + expert * bias_stride + column
        total += tl.load(bias_at, mask=column_fits, other=0.0).to(tl.float32)[None, :]
        if GATED:
            second += tl.load(bias_at + num_columns, mask=column_fits, other=0.0).to(tl.float32)[None, :]
    total = activated(total, second, alpha, limit, GATE, kind)
    out_at = out + pair.to(tl.int64)[:, None] * num_columns + column[None, :]
    tl.store(out_at, total.to(kind), mask=exists[:, None] & column_fits[None, :])


@triton.jit
def _weigh(answers, shares, out, size, num_chosen, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """The sum of a row's answers, place after place, rounded after every step as the reference is."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    fits = column < size
    kind = out.dtype.element_ty
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for place in range(num_chosen):
        pair = row * num_chosen + place
        share = tl.load(shares + pair).to(kind).to(tl.float32)
        answer = tl.load(answers + pair * size + column, mask=fits, other=0.0).to(tl.float32)
        total = (total + (answer * share).to(kind).to(tl.float32)).to(kind).to(tl.float32)
    tl.store(out + row * size + column, total.to(kind), mask=fits)


@dataclass(frozen=True)
class Tiles:
    """Which rows a program computes together: pairs of a row and one of its experts, numbered row * k + place."""

    experts: Tensor  # [N] int32; -1: nobody's
    pairs: Tensor  # [N, block_m] int32; -1: none, after the last of an expert. Not set in nobody's tiles
    block_m: int


def group(ids: Tensor, num_experts: int, most_rows: int = 128) -> Tiles:
    """ids [T, k] -> tiles, as many as could be needed whatever the ids are, of at most so many rows."""
    num_pairs = ids.numel()
    most = min(num_experts, num_pairs)  # experts that can have any
    block_m = 16
    while block_m < most_rows and block_m * most < num_pairs:
        block_m *= 2
    num_tiles = num_pairs // block_m + most
    experts = torch.empty(num_tiles, dtype=torch.int32, device=ids.device)
    pairs = torch.empty(num_tiles, block_m, dtype=torch.int32, device=ids.device)
    block, early = max(min(triton.next_power_of_2(num_pairs), MAX_GROUP_BLOCK), 32), launch.early(ids)
    _group[(num_experts,)](
        ids, experts, pairs, num_pairs, BLOCK_M=block_m, BLOCK=block, EARLY=early,
        num_warps=min(max(block // 256, 1), 8), **launch.options(early),
    )  # fmt: skip
    return Tiles(experts, pairs, block_m)


def expert_linear(
    x: Tensor,
    weight: Tensor | QuantisedStack,
    bias: Tensor | None,
    tiles: Tiles,
    num_pairs: int,
    activation: Activation | None = None,
) -> Tensor:
    """x [T, in] or [T * k, in], weight [E, out, in] -> [T * k, out], or what the activation makes of it."""
    if isinstance(weight, QuantisedStack):
        return sliced_experts.in_tiles(x, tiles.experts, tiles.pairs, operand(weight), bias, num_pairs, activation)
    assert x.stride(1) == weight.stride(2) == 1
    gate, alpha, limit = (gates.NONE, 1.0, 0.0) if activation is None else gates.gate_of(activation)
    gated = gates.has_two(gate)
    num_columns, inner = weight.shape[1] // 2 if gated else weight.shape[1], weight.shape[2]
    out = x.new_empty(num_pairs, num_columns)
    wide = x.dtype == torch.float32
    if tiles.block_m <= 32:  # reading weights is what counts: small blocks, many in flight
        block_n, block_k, stages, warps = 32, 128, 2 if wide else 4, 4
    else:
        block_n, block_k, stages, warps = 64 if gated else 128, 64, 2 if wide else 3, 4 if tiles.block_m == 64 else 8
    early = launch.early(x)
    _expert_linear[(triton.cdiv(num_columns, block_n), len(tiles.experts))](
        x, weight, out if bias is None else bias, tiles.experts, tiles.pairs, out, num_columns, inner,
        num_pairs // len(x), x.stride(0), weight.stride(0), weight.stride(1), 0 if bias is None else bias.stride(0),
        alpha, limit, GATE=gate, GATED=gated, HAS_BIAS=bias is not None, EVEN=inner % block_k == 0, IEEE=wide,
        BLOCK_M=tiles.block_m, BLOCK_N=block_n, BLOCK_K=block_k, EARLY=early,
        num_warps=warps, num_stages=stages, **launch.options(early),
    )  # fmt: skip
    return activation(out) if activation is not None and gate == gates.NONE else out


def experts(
    x: Tensor, ids: Tensor, shares: Tensor, weights: ExpertWeights, activation: Activation, *, exact: bool = False
) -> Tensor:
    """x [T, H], the experts chosen for each row [T, k] and their shares [T, k] -> [T, H]. `exact`: experts in few bits
    are never widened first, whose sums have another order."""
    num_rows, num_chosen = ids.shape
    num_experts, size, _ = weights.down.shape
    out = x.new_empty(num_rows, size)
    if not num_rows:
        return out
    x = x if x.stride(1) == 1 else x.contiguous()
    ids, shares = ids.contiguous(), shares.contiguous()
    if not exact and ids.numel() > WIDENED * num_experts:
        weights = weights.widened(x.dtype)
    assert not isinstance(weights.up, PackedStack)
    assert not isinstance(weights.down, PackedStack), "that is for CPUs"
    is_dense = isinstance(weights.up, Tensor) and isinstance(weights.down, Tensor)
    tiles = group(ids, num_experts) if is_dense else group(ids, num_experts, sliced_experts.MAX_TILE)
    inner = expert_linear(x, weights.up, weights.up_bias, tiles, ids.numel(), activation)
    answers = expert_linear(inner, weights.down, weights.down_bias, tiles, ids.numel())
    block, early = min(triton.next_power_of_2(size), SUM_BLOCK), launch.early(x)
    _weigh[(num_rows, triton.cdiv(size, block))](
        answers, shares, out, size, num_chosen, BLOCK=block, EARLY=early, num_warps=4, **launch.options(early)
    )
    return out
