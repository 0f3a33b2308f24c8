"""Queries and keys are normed (where the checkpoint norms them) and turned by their position, keys and values written
to their pages: one launch for all heads."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu import launch
from outrider.kernels.norm import Normed

if TYPE_CHECKING:  # which imports this file in turn
    from outrider.kernels.rope import HeadNorms, PageScales

MANY_ROWS, MANY_HEADS = 64, 8  # of a prompt: a program for every head of every row would be far too little work


@triton.jit
def in_page(value, inverse, dtype: tl.constexpr):
    """As pages of this type hold it: in 8 bits the largest number stands for what is larger. inverse: of the scale.
    What is no number is stored as 0: a page may become somebody else's, who gives no weight to rows that are not yet
    their own, but nothing times infinity is not nothing."""
    wide = value.to(tl.float32)
    value = tl.where(tl.abs(wide) < float("inf"), value, 0.0)
    if dtype.primitive_bitwidth == 8:
        value = tl.minimum(tl.maximum(value.to(tl.float32) * inverse, -448.0), 448.0)
    return value.to(dtype)


@triton.jit
def _rope_write(
    q, k, v, cos, sin, q_weight, k_weight, v_weight, k_pages, v_pages, locations, out,
    q_row, q_head, k_row, k_head, v_row, v_head, key_row, key_head, value_row, value_head, out_row, out_head,
    num_heads, num_kv_heads, dim, value_dim, half, eps, offset, v_eps, v_offset, key_inverse, value_inverse,
    NORM: tl.constexpr, WIDE: tl.constexpr, V_NORM: tl.constexpr, V_WIDE: tl.constexpr, HEADS: tl.constexpr,
    BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_VALUE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program turns HEADS heads of one row: the queries' heads first, then the keys', then the values are copied."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1)
    kind = out.dtype.element_ty
    q_groups, k_groups = tl.cdiv(num_heads, HEADS), tl.cdiv(num_kv_heads, HEADS)
    if group >= q_groups + k_groups:
        head = ((group - q_groups - k_groups) * HEADS + tl.arange(0, HEADS))[:, None]
        place = tl.arange(0, BLOCK_VALUE)[None, :]
        fits = (place < value_dim) & (head < num_kv_heads)
        value = tl.load(v + row * v_row + head * v_head + place, mask=fits, other=0.0)
        if V_NORM:
            value = value.to(tl.float32)
            value *= tl.rsqrt(tl.sum(value * value, 1) / value_dim + v_eps)[:, None]
            if not V_WIDE:
                value = value.to(kind).to(tl.float32)
            value *= tl.load(v_weight + place, mask=place < value_dim, other=0.0).to(tl.float32) + v_offset
            value = value.to(kind)
        at = tl.load(locations + row) * value_row + head * value_head
        tl.store(v_pages + at + place, in_page(value, value_inverse, v_pages.dtype.element_ty), mask=fits)
        return
    turning = tl.arange(0, BLOCK_HALF)
    rest = 2 * half + tl.arange(0, BLOCK_REST)
    cos_at = tl.load(cos + row * half + turning, mask=turning < half, other=0.0)[None, :]
    sin_at = tl.load(sin + row * half + turning, mask=turning < half, other=0.0)[None, :]
    is_query = group < q_groups
    if is_query:
        head = (group * HEADS + tl.arange(0, HEADS))[:, None]
        exists = head < num_heads
        source = q + row * q_row + head * q_head
        weight = q_weight
    else:
        head = ((group - q_groups) * HEADS + tl.arange(0, HEADS))[:, None]
        exists = head < num_kv_heads
        source = k + row * k_row + head * k_head
        weight = k_weight
    turns = exists & (turning < half)[None, :]
    stays = exists & (rest < dim)[None, :]
    first = tl.load(source + turning[None, :], mask=turns, other=0.0).to(tl.float32)
    second = tl.load(source + half + turning[None, :], mask=turns, other=0.0).to(tl.float32)
    third = tl.load(source + rest[None, :], mask=stays, other=0.0).to(tl.float32)
    if NORM:
        square = tl.sum(first * first, 1) + tl.sum(second * second, 1) + tl.sum(third * third, 1)
        scale = tl.rsqrt(square / dim + eps)[:, None]
        first, second, third = first * scale, second * scale, third * scale
        if not WIDE:
            first, second = first.to(kind).to(tl.float32), second.to(kind).to(tl.float32)
            third = third.to(kind).to(tl.float32)
        first *= tl.load(weight + turning, mask=turning < half, other=0.0).to(tl.float32)[None, :] + offset
        second *= tl.load(weight + half + turning, mask=turning < half, other=0.0).to(tl.float32)[None, :] + offset
        third *= tl.load(weight + rest, mask=rest < dim, other=0.0).to(tl.float32)[None, :] + offset
        first, second = first.to(kind).to(tl.float32), second.to(kind).to(tl.float32)
    first, second = (first * cos_at - second * sin_at).to(kind), (second * cos_at + first * sin_at).to(kind)
    if is_query:
        at = out + row * out_row + head * out_head
        tl.store(at + turning[None, :], first, mask=turns)
        tl.store(at + half + turning[None, :], second, mask=turns)
        tl.store(at + rest[None, :], third.to(kind), mask=stays)
    else:  # pages may hold fewer bits
        stored: tl.constexpr = k_pages.dtype.element_ty
        # a name of its own: what it points to may be of another type
        page_at = k_pages + tl.load(locations + row) * key_row + head * key_head
        tl.store(page_at + turning[None, :], in_page(first, key_inverse, stored), mask=turns)
        tl.store(page_at + half + turning[None, :], in_page(second, key_inverse, stored), mask=turns)
        tl.store(page_at + rest[None, :], in_page(third.to(kind), key_inverse, stored), mask=stays)


@triton.jit
def _tables(positions, inv_freq, cos, sin, scaling, half, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    fits = place < half
    angle = tl.load(positions + row).to(tl.float32) * tl.load(inv_freq + place, mask=fits, other=0.0)
    tl.store(cos + row * half + place, tl.cos(angle) * scaling, mask=fits)
    tl.store(sin + row * half + place, tl.sin(angle) * scaling, mask=fits)


def tables(positions: Tensor, inv_freq: Tensor, scaling: float) -> tuple[Tensor, Tensor]:
    """cos and sin [T, R / 2] of positions [T]."""
    half, early = len(inv_freq), launch.early(positions)
    cos, sin = (inv_freq.new_empty(len(positions), half) for _ in range(2))
    if len(positions) and half:
        _tables[(len(positions),)](
            positions, inv_freq, cos, sin, scaling, half,
            BLOCK=triton.next_power_of_2(half), EARLY=early, num_warps=1, **launch.options(early),
        )  # fmt: skip
    return cos, sin


def rope_write(
    q: Tensor,
    k: Tensor,
    v: Tensor | Normed,
    rotary: tuple[Tensor, Tensor],
    pages: tuple[Tensor, Tensor],
    locations: Tensor,
    norms: HeadNorms | None = None,
    out: Tensor | None = None,
    scales: PageScales | None = None,
) -> Tensor:
    """q [T, heads, D] and k, v [T, kv heads, D] -> turned q; k and v go to `locations` [T] of the pages. `out`: where
    to put the queries, whose last dimension is dense. `scales`: of pages of 8 bits."""
    inverses = (1.0, 1.0) if scales is None else (1 / scales.key, 1 / scales.value)
    v_norm = v if isinstance(v, Normed) else None
    v = v.x if isinstance(v, Normed) else v
    cos, sin = rotary
    k_pages, v_pages = pages
    q, k, v = (each if each.stride(-1) == 1 else each.contiguous() for each in (q, k, v))
    out = q.new_empty(q.shape) if out is None else out
    num_rows, num_heads, dim = q.shape
    num_kv_heads, half = k.shape[1], cos.shape[-1]
    if num_rows:
        early = launch.early(q)
        weights = (out, out) if norms is None else (norms.q, norms.k)
        settings = (0.0, 0.0) if norms is None else (norms.eps, norms.offset)
        # a norm adds up; how many heads are at work beside it must not change the order
        heads = MANY_HEADS if num_rows > MANY_ROWS and norms is None and v_norm is None else 1
        v_settings = (0.0, 0.0) if v_norm is None else (v_norm.eps, v_norm.offset)
        groups = triton.cdiv(num_heads, heads) + 2 * triton.cdiv(num_kv_heads, heads)
        _rope_write[(num_rows, groups)](
            q, k, v, cos, sin, *weights, out if v_norm is None else v_norm.weight, k_pages, v_pages, locations, out,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
            k_pages.stride(1), k_pages.stride(2), v_pages.stride(1), v_pages.stride(2), out.stride(0), out.stride(1),
            num_heads, num_kv_heads, dim, v.shape[-1], half, *settings, *v_settings, *inverses,
            NORM=norms is not None, WIDE=norms is not None and norms.wide,
            V_NORM=v_norm is not None, V_WIDE=v_norm is not None and v_norm.wide, HEADS=heads,
            BLOCK_HALF=max(triton.next_power_of_2(half), 1), BLOCK_REST=max(triton.next_power_of_2(dim - 2 * half), 1),
            BLOCK_VALUE=triton.next_power_of_2(v.shape[-1]), EARLY=early, num_warps=1, **launch.options(early),
        )  # fmt: skip
    return out
