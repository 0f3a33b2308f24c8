"""What a mixture's experts in 16 bits make of one row. A program asks for all of its weights at once, into registers,
so that memory is never idle while somebody waits for a loop's next turn. For several rows slices are faster."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.activation import Activation
from outrider.kernels.gpu import gates, launch
from outrider.kernels.gpu.gates import activated
from outrider.kernels.norm import Normed

BLOCK_K = 256  # numbers of a row that a warp asks for with one instruction
WARPS = 4
HELD = 16384  # numbers of a matrix that a program holds, at most
MAX_INNER = 4096


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
