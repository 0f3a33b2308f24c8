"""A mixture's experts of one row. Up in 16 bits, a program asks for all of its weights at once, into registers, so that
memory is never idle while somebody waits for a loop's next turn. On the way down it has some columns of all experts of
the row, so that it can add up their answers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.activation import Activation
from outrider.kernels.gpu import gates, launch
from outrider.kernels.gpu.gates import activated
from outrider.kernels.gpu.sums import Operand, sums
from outrider.kernels.norm import Normed

BLOCK_K = 256  # numbers of a row that a warp asks for with one instruction
WARPS = 4
HELD = 16384  # numbers of a matrix that a program holds, at most
MAX_INNER = 4096
LANES = 8  # of a product: rows, of which one is real
MAX_SHARED = 200 * 2**10  # bytes of a program's buffers


@triton.jit
def _pieces(at, exists, place, inner, PIECES: tl.constexpr, EVEN: tl.constexpr, BLOCK_K: tl.constexpr):
    """All numbers of rows that begin at `at` [N, K], piece by piece."""
    pieces = ()
    for number in tl.static_range(PIECES):
        fits = exists & (EVEN | (place + number * BLOCK_K < inner))
        piece = tl.load(at + number * BLOCK_K, mask=fits, other=0.0)
        pieces = pieces + (piece,)  # type: ignore[assignment] # noqa: RUF005
    return pieces


@triton.jit
def _up(
    x, weight, bias, norm, ids, out, num_columns, inner, expert_stride, alpha, limit, norm_offset, eps,
    GATE: tl.constexpr, TWO: tl.constexpr, HAS_BIAS: tl.constexpr, NORM: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PIECES: tl.constexpr, EVEN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some columns of what one of the row's experts makes of it. The row's numbers lie in registers as the weights do,
    once for every column, and none has to be passed on. TWO: the weight's rows are gates, then ups."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    place = tl.arange(0, BLOCK_K)[None, :] + tl.zeros((BLOCK_N, 1), dtype=tl.int32)
    fits = column < num_columns
    number = tl.program_id(1)
    if EARLY:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    expert = tl.load(ids + number).to(tl.int64)
    at = weight + expert * expert_stride + column.to(tl.int64)[:, None] * inner + place
    first_bias, second_bias = 0.0, 0.0
    if HAS_BIAS:
        bias_at = bias + expert * (num_columns * (2 if TWO else 1)) + column
        first_bias = tl.load(bias_at, mask=fits, other=0.0).to(tl.float32)
        if TWO:
            second_bias = tl.load(bias_at + num_columns, mask=fits, other=0.0).to(tl.float32)
    gate_pieces = _pieces(at, fits[:, None], place, inner, PIECES, EVEN, BLOCK_K)
    up_pieces = gate_pieces
    if TWO:
        up = tl.cast(num_columns, tl.int64) * inner
        up_pieces = _pieces(at + up, fits[:, None], place, inner, PIECES, EVEN, BLOCK_K)
    row = _pieces(x + place, True, place, inner, PIECES, EVEN, BLOCK_K)
    total = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    second, squares = total, total
    for piece in tl.static_range(PIECES):
        a = row[piece].to(tl.float32)
        if NORM:
            at_norm = place + piece * BLOCK_K
            squares += a * a
            a *= tl.load(norm + at_norm, mask=EVEN | (at_norm < inner), other=0.0).to(tl.float32) + norm_offset
        total += gate_pieces[piece].to(tl.float32) * a
        if TWO:
            second += up_pieces[piece].to(tl.float32) * a
    root = tl.rsqrt(tl.sum(squares, 1) / inner + eps) if NORM else 1.0
    gate = tl.sum(total, 1) * root + first_bias
    other = gate
    if TWO:
        other = tl.sum(second, 1) * root + second_bias
    kind: tl.constexpr = out.dtype.element_ty
    answer = activated(gate, other, alpha, limit, GATE, kind).to(kind)
    tl.store(out + number.to(tl.int64) * num_columns + column, answer, mask=fits)


@triton.jit
def _down(
    x, ids, shares, data, scale, offset, bias, residual, out,
    num_columns, inner, num_runs, width, scale_stride, residual_stride, num_chosen,
    KIND: tl.constexpr, PART: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, POWERS: tl.constexpr,
    HAS_SCALE: tl.constexpr, HAS_OFFSET: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    IEEE: tl.constexpr, FAST: tl.constexpr, EXPERTS: tl.constexpr, SPLIT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, STAGES: tl.constexpr, KNOWN: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some columns of a row: the sum of its experts' answers, one expert to SPLIT slices. There may be more rows, each
    of which reads its own. KNOWN: as in few_experts.py."""
    if EARLY and not KNOWN:
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
    if EARLY and KNOWN:
        tl.extra.cuda.gdc_wait()
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


def is_for(ids: Tensor, weight: Tensor) -> bool:
    """Whether there is one row, and its part of the weights fits into registers."""
    return len(ids) == 1 and weight.shape[2] <= MAX_INNER


def up(x: Tensor | Normed, ids: Tensor, weight: Tensor, bias: Tensor | None, activation: Activation) -> Tensor:
    """x [1, H], ids [1, k], weight [E, I or 2 I, H] -> [k, I]: what each expert makes of the row."""
    gate, alpha, limit = gates.gate_of(activation)
    norm, rows = (x, x.x) if isinstance(x, Normed) else (None, x)
    two, inner, num_pairs = gates.has_two(gate), rows.shape[1], ids.numel()
    num_columns = weight.shape[1] // 2 if two else weight.shape[1]
    weight, out = weight.contiguous(), rows.new_empty(num_pairs, num_columns)
    early, pieces = launch.early(rows), triton.cdiv(inner, BLOCK_K)
    block_n = 1 << (HELD // (BLOCK_K * pieces)).bit_length() - 1
    _up[(triton.cdiv(num_columns, block_n), num_pairs)](
        rows, weight, out if bias is None else bias, out if norm is None else norm.weight, ids, out,
        num_columns, inner, weight.stride(0), alpha, limit,
        0.0 if norm is None else norm.offset, 0.0 if norm is None else norm.eps,
        GATE=gate, TWO=two, HAS_BIAS=bias is not None, NORM=norm is not None, BLOCK_N=block_n, BLOCK_K=BLOCK_K,
        PIECES=pieces, EVEN=BLOCK_K * pieces == inner, EARLY=early, num_warps=WARPS, **launch.options(early),
    )  # fmt: skip
    return activation(out) if gate == gates.NONE else out


def down(
    x: Tensor,
    ids: Tensor,
    shares: Tensor,
    weight: Operand,
    bias: Tensor | None,
    residual: Tensor | None,
    *,
    is_known: bool = False,
) -> Tensor:
    """x [T * k, I], ids and shares [T, k] -> [T, N]: the weighed sum of each row's experts, plus the residual.
    `is_known`: ids and shares were made two launches before this one, or more."""
    num_rows, num_chosen = ids.shape
    x = weight.ordered(x)
    out, early = x.new_empty(num_rows, weight.num_rows), launch.early(x)
    experts = triton.next_power_of_2(num_chosen)
    split = max(4 // experts, 1)
    nothing = out if weight.scale is None else weight.scale
    stages, block_n = 4 if experts * split <= 8 else 3, 16
    stage = experts * split * weight.run * x.element_size() * (block_n // weight.num_parts + LANES)
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
        FAST=x.is_cuda and x.dtype == torch.bfloat16, EXPERTS=experts, SPLIT=split, BLOCK_M=LANES, BLOCK_N=block_n,
        STAGES=stages, KNOWN=is_known, EARLY=early, num_warps=4, num_stages=stages,
        **launch.options(early),
    )  # fmt: skip
    return out
