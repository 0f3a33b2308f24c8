"""A mixture's experts for few rows: each pair of a row and one of its experts is computed by itself, so nothing has to
be sorted, and only the experts that were chosen are read. Two launches: up with its activation, down with the sum."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.activation import Activation
from outrider.kernels.gpu import gates, launch, sliced_experts
from outrider.kernels.gpu.gates import activated
from outrider.kernels.gpu.sums import operand
from outrider.kernels.moe import ExpertWeights, SharedWeights
from outrider.kernels.norm import Normed
from outrider.kernels.quantised import QuantisedStack

MAX_ROWS = 8
MAX_CHOSEN = 16
MAX_SHARED = 4
BLOCK_K = 1024  # numbers of a weight's row that are read at once, at most
BLOCK_N = 8  # rows of a weight


@triton.jit
def _product(
    x_at, weight_at, norm, norm_offset, inner, place, fits,
    NORM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """[N]: rows of a weight by one row of the input; NORM: by the norm's weight too, and the sum of its squares."""
    total = tl.zeros((BLOCK_N, BLOCK_K), dtype=tl.float32)
    squares = tl.zeros((BLOCK_K,), dtype=tl.float32)
    for shift in range(0, inner, BLOCK_K):
        inside = place + shift < inner
        a = tl.load(x_at + shift + place, mask=inside, other=0.0).to(tl.float32)
        w = tl.load(weight_at + shift, mask=fits[:, None] & inside[None, :], other=0.0).to(tl.float32)
        if NORM:
            squares += a * a
            a *= tl.load(norm + shift + place, mask=inside, other=0.0) + norm_offset
        total += w * a[None, :]
    return tl.sum(total, 1), tl.sum(squares, 0)


@triton.jit
def _up(
    x, ids, weight, shared, bias, norm, out, num_columns, inner, num_chosen, num_shared, x_stride, expert_stride,
    weight_stride, shared_stride, bias_stride, alpha, limit, norm_offset, eps,
    GATE: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_SHARED: tl.constexpr, NORM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some columns of a pair's answer. GATED: the weight's rows are gates, then ups. HAS_SHARED: behind a row's chosen
    come as many experts as every row goes through, whose gates lie together, then their ups."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    pair = tl.program_id(1)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    place = tl.arange(0, BLOCK_K)
    fits = column < num_columns
    row, number = pair // (num_chosen + num_shared), pair % (num_chosen + num_shared)
    expert = tl.load(ids + row * num_chosen + tl.minimum(number, num_chosen - 1)).to(tl.int64)
    x_at = x + row.to(tl.int64) * x_stride
    first, stride, num_gates = weight + expert * expert_stride, weight_stride, num_columns
    if HAS_SHARED:
        other = shared + tl.maximum(number - num_chosen, 0).to(tl.int64) * num_columns * shared_stride
        is_shared = number >= num_chosen
        first = tl.where(is_shared, other, first)
        stride, num_gates = (
            tl.where(is_shared, shared_stride, stride),
            tl.where(is_shared, num_shared, 1) * num_columns,
        )
    weight_at = first + column.to(tl.int64)[:, None] * stride + place[None, :]
    bias_at = bias + expert * bias_stride + column
    kind: tl.constexpr = out.dtype.element_ty
    total, squares = _product(
        x_at, weight_at, norm, norm_offset, inner, place, fits, NORM, BLOCK_N, BLOCK_K
    )  # fmt: skip
    root = tl.rsqrt(squares / inner + eps) if NORM else 1.0
    total *= root
    if HAS_BIAS:
        total += tl.load(bias_at, mask=fits, other=0.0).to(tl.float32)
    if GATED:
        weight_at += tl.cast(num_gates, tl.int64) * stride
        up, _ = _product(x_at, weight_at, norm, norm_offset, inner, place, fits, NORM, BLOCK_N, BLOCK_K)
        up *= root
        if HAS_BIAS:
            up += tl.load(bias_at + num_columns, mask=fits, other=0.0).to(tl.float32)
        total = activated(total, up, alpha, limit, GATE, kind)
    else:
        total = activated(total, total, alpha, limit, GATE, kind)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    tl.store(out + pair.to(tl.int64) * num_columns + column, total.to(kind), mask=fits)


@triton.jit
def _down(
    x, ids, shares, weight, shared, bias, residual, out, num_columns, inner, expert_stride, weight_stride,
    shared_stride, bias_stride, residual_stride,
    NUM_CHOSEN: tl.constexpr, NUM_SHARED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Some columns of a row: its experts' answers, place after place, rounded after every step as the reference is.
    Then those of the experts that every row goes through."""
    if EARLY:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(1)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    place = tl.arange(0, BLOCK_K)
    fits = column < num_columns
    kind = out.dtype.element_ty
    total = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for number in tl.static_range(NUM_CHOSEN):
        pair = row * (NUM_CHOSEN + NUM_SHARED) + number
        expert = tl.load(ids + row * NUM_CHOSEN + number).to(tl.int64)
        share = tl.load(shares + row * NUM_CHOSEN + number).to(kind).to(tl.float32)
        weight_at = weight + expert * expert_stride + column.to(tl.int64)[:, None] * weight_stride + place[None, :]
        answer, _ = _product(
            x + pair.to(tl.int64) * inner, weight_at, x, 0.0, inner, place, fits, False, BLOCK_N, BLOCK_K
        )  # fmt: skip
        if HAS_BIAS:
            answer += tl.load(bias + expert * bias_stride + column, mask=fits, other=0.0).to(tl.float32)
        answer = answer.to(kind).to(tl.float32)
        total = (total + (answer * share).to(kind).to(tl.float32)).to(kind).to(tl.float32)
    always = tl.zeros((BLOCK_N,), dtype=tl.float32)
    for number in tl.static_range(NUM_SHARED):
        pair = row * (NUM_CHOSEN + NUM_SHARED) + NUM_CHOSEN + number
        weight_at = shared + column.to(tl.int64)[:, None] * shared_stride + number * inner + place[None, :]
        answer, _ = _product(
            x + pair.to(tl.int64) * inner, weight_at, x, 0.0, inner, place, fits, False, BLOCK_N, BLOCK_K
        )  # fmt: skip
        always += answer
    if NUM_SHARED > 0:
        total += always.to(kind).to(tl.float32)
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if HAS_RESIDUAL:
        total += tl.load(residual + row.to(tl.int64) * residual_stride + column, mask=fits, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * num_columns + column, total.to(kind), mask=fits)


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
    shared: SharedWeights | None = None,
) -> Tensor:
    """x [T, H], the experts chosen for each row [T, k] and their shares [T, k] -> [T, H], plus the residual [T, H].
    `shared`: of experts that every row goes through, where takes_shared() says so."""
    x = x if isinstance(x, Normed) or x.stride(1) == 1 else x.contiguous()
    residual = residual if residual is None or residual.stride(1) == 1 else residual.contiguous()
    ids, shares = ids.contiguous(), shares.contiguous()
    up, down = weights.up, weights.down
    if isinstance(up, QuantisedStack):
        inner = sliced_experts.up_few(x, ids, operand(up), weights.up_bias, activation)
    else:
        inner = _up_of(x, ids, up, weights.up_bias, activation, shared)
    if isinstance(down, QuantisedStack):
        return sliced_experts.down_few(inner, ids, shares, operand(down), weights.down_bias, residual)
    return _down_of(inner, ids, shares, down, weights.down_bias, residual, shared)


def takes_shared(weights: ExpertWeights, shared: SharedWeights) -> bool:
    """Whether experts that every row goes through are of one kind with the others, only that all their gates, and all
    their ups, lie together: each as wide as one of the others."""
    if not isinstance(weights.up, Tensor) or not isinstance(weights.down, Tensor) or weights.up_bias is not None:
        return False
    num_shared, rest = divmod(shared.down.shape[1], weights.down.shape[2])
    fits = rest == 0 and shared.up.shape[0] * weights.down.shape[2] == weights.up.shape[1] * shared.down.shape[1]
    return fits and num_shared <= MAX_SHARED and shared.up.dtype == shared.down.dtype == weights.up.dtype


def _up_of(
    x: Tensor | Normed,
    ids: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: Activation,
    shared: SharedWeights | None = None,
) -> Tensor:
    """[T * k, I]: what each pair makes of its row."""
    norm = x if isinstance(x, Normed) else None
    x = x.x if isinstance(x, Normed) else x
    gate, alpha, limit = gates.gate_of(activation)
    gated, early = gates.has_two(gate), launch.early(x)
    num_columns = weight.shape[1] // 2 if gated else weight.shape[1]
    num_shared = 0 if shared is None else len(shared.up) // weight.shape[1]
    num_pairs = len(ids) * (ids.shape[1] + num_shared)
    out = torch.empty(num_pairs, num_columns, dtype=x.dtype, device=x.device)
    _up[(triton.cdiv(num_columns, BLOCK_N), num_pairs)](
        x, ids, weight, weight if shared is None else shared.up, out if bias is None else bias,
        out if norm is None else norm.weight, out, num_columns, x.shape[1], ids.shape[1], num_shared, x.stride(0),
        weight.stride(0), weight.stride(1), 0 if shared is None else shared.up.stride(0),
        0 if bias is None else bias.stride(0), alpha, limit,
        0.0 if norm is None else norm.offset, 0.0 if norm is None else norm.eps,
        GATE=gate, GATED=gated, HAS_BIAS=bias is not None, HAS_SHARED=num_shared > 0, NORM=norm is not None,
        BLOCK_N=BLOCK_N, BLOCK_K=_block_k(x.shape[1]), EARLY=early, num_warps=4, **launch.options(early),
    )  # fmt: skip
    return activation(out) if gate == gates.NONE else out


def _down_of(
    inner: Tensor,
    ids: Tensor,
    shares: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    shared: SharedWeights | None = None,
) -> Tensor:
    num_rows, num_chosen = ids.shape
    size, early = weight.shape[1], launch.early(inner)
    out = inner.new_empty(num_rows, size)
    _down[(triton.cdiv(size, BLOCK_N), num_rows)](
        inner, ids, shares, weight, weight if shared is None else shared.down, out if bias is None else bias,
        out if residual is None else residual, out, size, inner.shape[1], weight.stride(0), weight.stride(1),
        0 if shared is None else shared.down.stride(0), 0 if bias is None else bias.stride(0),
        0 if residual is None else residual.stride(0), NUM_CHOSEN=num_chosen,
        NUM_SHARED=0 if shared is None else shared.down.shape[1] // weight.shape[2], HAS_BIAS=bias is not None,
        HAS_RESIDUAL=residual is not None, BLOCK_N=BLOCK_N, BLOCK_K=_block_k(inner.shape[1]), EARLY=early,
        num_warps=4, **launch.options(early),
    )  # fmt: skip
    return out


def _block_k(inner: int) -> int:
    return min(triton.next_power_of_2(inner), BLOCK_K)
