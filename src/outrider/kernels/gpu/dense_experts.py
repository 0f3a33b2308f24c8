"""A mixture's experts in 16 bits for few rows. A program asks for all of its weights at once, into registers, so that
memory is never idle while somebody waits for a loop's next turn; whoever chose an expert is multiplied with them there.
On the way down they are asked for before the way up has ended."""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.activation import Activation
from outrider.kernels.gpu import gates, launch
from outrider.kernels.gpu.gates import activated
from outrider.kernels.norm import Normed

MAX_ROWS = 8
MAX_PIECES = 8  # of a row
HELD = 128  # numbers of 16 bits that a thread asks for at once


@dataclass(frozen=True)
class Tile:
    block_n: int  # outputs of a program
    warps: int
    block_k: int = 256  # numbers of a row that a warp asks for at once


@triton.jit
def _pieces(at, exists, place, inner, PIECES: tl.constexpr, EVEN: tl.constexpr, BLOCK_K: tl.constexpr):
    """All numbers of rows that begin at `at` [..., K], piece by piece."""
    pieces = ()
    for number in tl.static_range(PIECES):
        fits = exists & (EVEN | (place + number * BLOCK_K < inner))
        piece = tl.load(at + number * BLOCK_K, mask=fits, other=0.0)
        pieces = pieces + (piece,)  # type: ignore[assignment] # noqa: RUF005
    return pieces


@triton.jit
def _answer(
    x, norm, norm_offset, eps, at, up, fits, place, inner, first_bias, second_bias, alpha, limit, out_at,
    GATE: tl.constexpr, TWO: tl.constexpr, NORM: tl.constexpr, PIECES: tl.constexpr, EVEN: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """What a row becomes, of the matrix at `at` [N, K] and the one `up` numbers on. place [N, K]: its numbers lie in
    registers as the weights do, once for every column, and none has to be passed on."""
    kind: tl.constexpr = out_at.dtype.element_ty
    gates = _pieces(at, fits[:, None], place, inner, PIECES, EVEN, BLOCK_K)
    ups = gates
    if TWO:
        ups = _pieces(at + up, fits[:, None], place, inner, PIECES, EVEN, BLOCK_K)
    row = _pieces(x + place, True, place, inner, PIECES, EVEN, BLOCK_K)
    total = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    second, squares = total, total
    for number in tl.static_range(PIECES):
        a = row[number].to(tl.float32)
        if NORM:
            number_at = place + number * BLOCK_K
            squares += a * a
            a *= tl.load(norm + number_at, mask=EVEN | (number_at < inner), other=0.0).to(tl.float32) + norm_offset
        total += gates[number].to(tl.float32) * a
        if TWO:
            second += ups[number].to(tl.float32) * a
    root = tl.rsqrt(tl.sum(squares, 1) / inner + eps) if NORM else 1.0
    gate = tl.sum(total, 1) * root + first_bias
    other = gate
    if TWO:
        other = tl.sum(second, 1) * root + second_bias
    tl.store(out_at, activated(gate, other, alpha, limit, GATE, kind).to(kind), mask=fits)


@triton.jit(do_not_specialize=["num_rows"])
def _up(
    x, weight, bias, norm, ids, out,
    num_rows, num_chosen, num_columns, inner, x_stride, expert_stride, alpha, limit, norm_offset, eps,
    GATE: tl.constexpr, TWO: tl.constexpr, HAS_BIAS: tl.constexpr, NORM: tl.constexpr, ALONE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PIECES: tl.constexpr,
    EVEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some columns of what an expert makes of the rows that chose it: row * k + place of the output. The program of an
    expert's first row does it for all, one after the other, who find the weights near. ALONE: there is one row. TWO:
    the weight's rows are gates, then ups."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    place, lane = tl.arange(0, BLOCK_K)[None, :] + tl.zeros((BLOCK_N, 1), dtype=tl.int32), tl.arange(0, BLOCK_M)
    column_fits = column < num_columns
    number = tl.program_id(1)
    row, pair = number // num_chosen, lane
    up = tl.cast(num_columns, tl.int64) * inner
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(ids + number)
    if not ALONE:
        other = tl.arange(0, BLOCK_P)
        inside = other < num_rows * num_chosen
        same = inside & (tl.load(ids + other, mask=inside, other=-1) == expert)
        mine = same[None, :] & ((other // num_chosen)[None, :] == lane[:, None])
        pair = tl.max(tl.where(mine, other[None, :], -1), 1)
        if tl.min(tl.where(pair >= 0, lane, BLOCK_M), 0) < row:
            return
    at = weight + expert.to(tl.int64) * expert_stride + column.to(tl.int64)[:, None] * inner + place
    first_bias, second_bias = 0.0, 0.0
    if HAS_BIAS:
        bias_at = bias + expert.to(tl.int64) * (num_columns * (2 if TWO else 1)) + column
        first_bias = tl.load(bias_at, mask=column_fits, other=0.0).to(tl.float32)
        if TWO:
            second_bias = tl.load(bias_at + num_columns, mask=column_fits, other=0.0).to(tl.float32)
    if ALONE:
        _answer(
            x, norm, norm_offset, eps, at, up, column_fits, place, inner, first_bias, second_bias, alpha, limit,
            out + number.to(tl.int64) * num_columns + column, GATE, TWO, NORM, PIECES, EVEN, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    else:
        for index in range(row, num_rows):
            to = tl.max(tl.where(lane == index, pair, -1), 0)
            if to >= 0:
                _answer(
                    x + tl.cast(index, tl.int64) * x_stride, norm, norm_offset, eps, at, up, column_fits, place, inner,
                    first_bias, second_bias, alpha, limit, out + to.to(tl.int64) * num_columns + column,
                    GATE, TWO, NORM, PIECES, EVEN, BLOCK_N, BLOCK_K,
                )  # fmt: skip


@triton.jit
def _down(
    x, ids, shares, weight, bias, residual, out, num_chosen, num_columns, inner, expert_stride, residual_stride,
    HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PIECES: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Some columns of a row: the weighed sum of its experts' answers; [N, E, K], so that a warp takes an expert. AHEAD:
    whoever computes x has waited for the choice before it let this launch begin, so weights are asked for before x is
    there."""
    if EARLY and not AHEAD:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)  # next to each other: rows that chose the same expert read it at the same time
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    slot, place = tl.arange(0, EXPERTS)[None, :, None], tl.arange(0, BLOCK_K)[None, None, :]
    column_fits, is_chosen = column < num_columns, slot < num_chosen
    pair = row * num_chosen + slot
    kind: tl.constexpr = out.dtype.element_ty
    expert = tl.load(ids + pair, mask=is_chosen, other=0, cache_modifier=".cg").to(tl.int64)
    share = tl.load(shares + pair, mask=is_chosen, other=0.0, cache_modifier=".cg").to(kind).to(tl.float32)
    at = weight + expert * expert_stride + column.to(tl.int64)[:, None, None] * inner + place
    exists = is_chosen & column_fits[:, None, None]
    weights = _pieces(at, exists, place, inner, PIECES, EVEN, BLOCK_K)
    more = tl.zeros((BLOCK_N, EXPERTS, 1), dtype=tl.float32)
    if HAS_BIAS:
        more += tl.load(bias + expert * num_columns + column[:, None, None], mask=exists, other=0.0).to(tl.float32)
    if EARLY and AHEAD:
        tl.extra.cuda.gdc_wait()
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    first = tl.zeros((BLOCK_N,), dtype=kind)
    if HAS_RESIDUAL:
        first = tl.load(residual + row.to(tl.int64) * residual_stride + column, mask=column_fits, other=0.0)
    rows = _pieces(x + pair.to(tl.int64) * inner + place, is_chosen, place, inner, PIECES, EVEN, BLOCK_K)
    total = weights[0].to(tl.float32) * rows[0].to(tl.float32)
    for number in tl.static_range(1, PIECES):
        total += weights[number].to(tl.float32) * rows[number].to(tl.float32)
    answer = (tl.sum(total, 2, keep_dims=True) + more) * share
    value = tl.sum(tl.sum(answer, 2), 1)
    if HAS_RESIDUAL:
        value = value.to(kind).to(tl.float32) + first.to(tl.float32)
    tl.store(out + row.to(tl.int64) * num_columns + column, value.to(kind), mask=column_fits)


def _block_k(inner: int) -> int:
    """Numbers of a piece: 256 are what a warp asks for with one instruction."""
    return max(256, triton.next_power_of_2(triton.cdiv(inner, MAX_PIECES)))


def up_tile(inner: int) -> Tile:
    block_k = _block_k(inner)
    return Tile(max(1024 // block_k, 1), 4, block_k)


def down_tile(num_chosen: int, inner: int) -> Tile:
    block_k, experts = _block_k(inner), triton.next_power_of_2(num_chosen)
    warps = 8 if experts * block_k >= 2048 else 4
    held = experts * block_k * triton.cdiv(inner, block_k) // (32 * warps)  # of one output
    return Tile(max(min(1 << (HELD // held).bit_length() - 1, 4), 1) if held <= HELD else 1, warps, block_k)


def up(
    x: Tensor | Normed,
    ids: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation,
    tile: Tile | None = None,
) -> Tensor:
    """x [T, H], ids [T, k], weight [E, I or 2 I, H] -> [T * k, I]: what each pair's expert makes of its row."""
    gate, alpha, limit = gates.gate_of(activation)
    norm, rows = (x, x.x) if isinstance(x, Normed) else (None, x)
    two, (num_rows, inner), num_pairs = gates.has_two(gate), rows.shape, ids.numel()
    num_columns = weight.shape[1] // 2 if two else weight.shape[1]
    weight, tile = weight.contiguous(), tile or up_tile(inner)
    out = rows.new_empty(num_pairs, num_columns)
    early, pieces = launch.early(rows), triton.cdiv(inner, tile.block_k)
    _up[(triton.cdiv(num_columns, tile.block_n), num_pairs)](
        rows, weight, out if bias is None else bias, out if norm is None else norm.weight, ids, out,
        num_rows, ids.shape[1], num_columns, inner, rows.stride(0), weight.stride(0), alpha, limit,
        0.0 if norm is None else norm.offset, 0.0 if norm is None else norm.eps,
        GATE=gate, TWO=two, HAS_BIAS=bias is not None, NORM=norm is not None, ALONE=num_rows == 1, BLOCK_M=MAX_ROWS,
        BLOCK_P=triton.next_power_of_2(num_pairs), BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, PIECES=pieces,
        EVEN=tile.block_k * pieces == inner, EARLY=early, num_warps=tile.warps, **launch.options(early),
    )  # fmt: skip
    return activation(out) if gate == gates.NONE else out


def down(
    x: Tensor, ids: Tensor, shares: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None,
    tile: Tile | None = None, ahead: bool = True,
) -> Tensor:  # fmt: skip
    """x [T * k, I], ids and shares [T, k], weight [E, H, I] -> [T, H]: the weighed sum of each row's experts, plus the
    residual."""
    _, num_columns, inner = weight.shape
    num_rows, count = ids.shape
    weight, tile = weight.contiguous(), tile or down_tile(count, inner)
    out, early, pieces = x.new_empty(num_rows, num_columns), launch.early(x), triton.cdiv(inner, tile.block_k)
    _down[(num_rows, triton.cdiv(num_columns, tile.block_n))](
        x, ids, shares, weight, out if bias is None else bias, out if residual is None else residual, out,
        count, num_columns, inner, weight.stride(0), 0 if residual is None else residual.stride(0),
        HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, EXPERTS=triton.next_power_of_2(count),
        BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, PIECES=pieces, EVEN=tile.block_k * pieces == inner, EARLY=early,
        AHEAD=ahead, num_warps=tile.warps, **launch.options(early),
    )  # fmt: skip
    return out
