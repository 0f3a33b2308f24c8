"""Attention where everybody has one row, in one launch from what a layer projects: queries and the newest key are
normed and turned on the way, key and value go to their pages. Pages are read up to the token before; the newest one is
taken from registers, so that nobody waits for a page to be written."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu import launch
from outrider.kernels.gpu.attention import LOG2_E, attend_blocks, forms_for
from outrider.kernels.gpu.attention_parts import finish, leave, put_together
from outrider.kernels.gpu.attention_work import ITEM, Keys, work_for
from outrider.kernels.gpu.rope import in_page
from outrider.kernels.rope import HeadNorms, PageScales

ENABLED = False  # it has not been timed on a GPU yet
MOST_DIM = 256


@triton.jit
def _turned(
    at, exists, place, cos, sin, half, weight, eps, offset, kind: tl.constexpr, DIM: tl.constexpr,
    NORM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Heads [M, D] from at [M, 1] on, normed and turned: each number with the one that is half a turn away."""
    turns = place < 2 * half
    other = tl.where(place < half, place + half, tl.where(turns, place - half, place))
    value = tl.load(at + place, mask=exists, other=0.0).to(tl.float32)
    partner = tl.load(at + other, mask=exists & turns, other=0.0).to(tl.float32)
    if NORM:
        scale = tl.rsqrt(tl.sum(value * value, 1) / DIM + eps)[:, None]
        value, partner = value * scale, partner * scale
        if not WIDE:
            value, partner = value.to(kind).to(tl.float32), partner.to(kind).to(tl.float32)
        value *= tl.load(weight + place).to(tl.float32) + offset
        partner *= tl.load(weight + other).to(tl.float32) + offset
        value, partner = value.to(kind).to(tl.float32), partner.to(kind).to(tl.float32)
    angle = tl.where(place < half, place, place - half)
    cosine = tl.load(cos + angle, mask=turns, other=1.0)
    sine = tl.load(sin + angle, mask=turns, other=0.0)
    return (value * cosine + partner * tl.where(place < half, -sine, sine)).to(kind)


@triton.jit(do_not_specialize=["first_key", "table_row", "half"])
def _attend_fresh(
    items, counters, q, k, v, cos, sin, q_weight, k_weight, k_pages, v_pages, page_table, indices, locations, sinks,
    out, partial, maxima, sums, q_row, q_head, k_row, k_head, v_row, v_head, key_row, key_head, value_row, value_head,
    table_row, half, eps, offset, key_inverse, value_inverse, scale, value_scale, softcap, num_heads, num_kv_heads,
    first_key, PAGE: tl.constexpr, WIDE: tl.constexpr, ITEM: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr, SOFTCAP: tl.constexpr, NORM: tl.constexpr, NORM_WIDE: tl.constexpr, DIM: tl.constexpr,
    VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IEEE: tl.constexpr,
    LANES: tl.constexpr, WARPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As attention._attend for requests of one row; the first part also has the newest key."""
    item = items + tl.program_id(0) * ITEM
    request, first_row, block = tl.load(item), tl.load(item + 1), tl.load(item + 3)
    part, parts = tl.load(item + 4), tl.load(item + 5)
    first_part, counter = tl.load(item + 6).to(tl.int64), tl.load(item + 7)
    if request < 0:
        if EARLY:
            tl.extra.cuda.gdc_wait()
        return
    kv_head = tl.program_id(1)
    row = first_row.to(tl.int64)
    newest = tl.load(indices + row).to(tl.int32)
    begin = first_key + 0
    if WINDOW > 0:
        begin = tl.maximum(begin, newest - WINDOW + 1)
    low, high = begin // BLOCK_N, tl.cdiv(newest, BLOCK_N)
    lane = block * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = lane < GROUP
    index = newest + lane * 0
    head = kv_head * GROUP + lane
    place, value_place = tl.arange(0, DIM)[None, :], tl.arange(0, BLOCK_VALUE)
    kind: tl.constexpr = out.dtype.element_ty
    if EARLY:
        tl.extra.cuda.gdc_wait()
    query = _turned(
        q + row * q_row + head[:, None] * q_head, inside[:, None], place, cos + row * half, sin + row * half, half,
        q_weight, eps, offset, kind, DIM, NORM, NORM_WIDE,
    )  # fmt: skip
    best = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((BLOCK_M,), dtype=tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_VALUE), dtype=tl.float32)
    # asked for now, seen last: who has the first part does not wait longer for its pages than others
    is_first = (tl.arange(0, 1) + part == 0)[:, None]
    key = _turned(
        k + row * k_row + kv_head * k_head + is_first.to(tl.int32) * 0, is_first, place, cos + row * half,
        sin + row * half, half, k_weight, eps, offset, kind, DIM, NORM, NORM_WIDE,
    )  # fmt: skip
    value_fits = is_first & (value_place < VALUE)[None, :]
    value = tl.load(v + row * v_row + kv_head * v_head + value_place[None, :], mask=value_fits, other=0.0)
    keys_at, values_at = k_pages + kv_head * key_head, v_pages + kv_head * value_head
    table = page_table + request * table_row
    best, weight, total = attend_blocks(
        best, weight, total, query, query, index, index - 1, keys_at, values_at, table, begin, newest, low, high,
        part, parts, key_row, value_row, first_key, scale, softcap, PAGE, WIDE, True, WINDOW, SOFTCAP, DIM, DIM, 0,
        VALUE, False, BLOCK_VALUE, BLOCK_N, IEEE,
    )  # fmt: skip
    if part == 0:
        stored_key = in_page(key, key_inverse, k_pages.dtype.element_ty)
        stored_value = in_page(value, value_inverse, v_pages.dtype.element_ty)
        page_at = tl.load(locations + row)
        tl.store(k_pages + page_at * key_row + kv_head * key_head + place, stored_key, mask=block + place * 0 == 0)
        value_at = v_pages + page_at * value_row + kv_head * value_head + value_place[None, :]
        tl.store(value_at, stored_value, mask=value_fits & (block + value_place[None, :] * 0 == 0))
        score = tl.sum(query.to(tl.float32) * stored_key.to(tl.float32), 1) * scale
        if SOFTCAP:
            score = softcap * (1 - 2 / (1 + tl.exp2(2.8853900817779268 * score / softcap)))
        score = tl.where(index >= first_key, score, float("-inf"))
        better = tl.maximum(best, score)
        safe = tl.where(better == float("-inf"), 0.0, better)
        shrink, share = tl.exp2(best - safe), tl.exp2(score - safe)
        best, weight = better, weight * shrink + share
        total = total * shrink[:, None] + share[:, None] * stored_value.to(tl.float32)
    if parts > 1:
        counter_at = counters + counter * num_kv_heads + kv_head
        if leave(
            best, weight, total, maxima, sums, partial, counter_at, inside, first_part, part, parts, kv_head,
            num_kv_heads, VALUE, BLOCK_VALUE, BLOCK_M,
        ):  # fmt: skip
            put_together(
                maxima, sums, partial, sinks, out, first_part, parts, first_row, 1, block, kv_head, num_heads,
                num_kv_heads, value_scale, GROUP, HAS_SINKS, VALUE, BLOCK_VALUE, BLOCK_M, LANES, WARPS,
            )  # fmt: skip
    else:
        finish(
            best, weight, total, sinks, out, first_row, lane, kv_head, num_heads, inside, value_scale, GROUP, HAS_SINKS,
            VALUE, BLOCK_VALUE,
        )  # fmt: skip


@dataclass(frozen=True)
class Fresh:
    """What a layer projects for its rows, before it is normed and turned, and where it goes."""

    q: Tensor  # [T, heads, D]
    k: Tensor  # [T, kv heads, D]
    v: Tensor  # [T, kv heads, D_v]
    cos: Tensor  # [T, R / 2]
    sin: Tensor
    locations: Tensor  # [T]
    norms: HeadNorms | None
    scales: PageScales


def fits(fresh: Fresh, keys: Keys) -> bool:
    """Whether everybody has one row, and heads are such that a program can turn them."""
    dim = fresh.q.shape[2]
    return (
        ENABLED
        and keys.max_rows == 1
        and keys.last_key is None
        and 16 <= dim <= MOST_DIM
        and dim & (dim - 1) == 0
        and all(each.stride(-1) == 1 for each in (fresh.q, fresh.k, fresh.v))
    )


def attend_fresh(
    fresh: Fresh,
    pages: tuple[Tensor, Tensor],
    keys: Keys,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:
    """[T, heads, D_v] of rows like these; see attention.paged_attention()."""
    q, k, v, (k_pages, v_pages), norms = fresh.q, fresh.k, fresh.v, pages, fresh.norms
    num_rows, num_heads, dim = q.shape
    num_kv_heads, value_dim = k_pages.shape[2], v_pages.shape[3]
    out = q.new_empty(num_rows, num_heads, value_dim)
    if not num_rows:
        return out
    group, table = num_heads // num_kv_heads, keys.page_table
    (form,) = forms_for(keys, group, (dim, value_dim), q.element_size(), None, k_pages.element_size())
    work, is_new = work_for(keys, group, num_kv_heads, form, window, None)
    early = not is_new and launch.early(q)
    places = len(work.items) * num_kv_heads * form.block_m
    partial = torch.empty(places, value_dim, dtype=torch.float32, device=q.device)
    maxima, sums = torch.empty(2, places, dtype=torch.float32, device=q.device).unbind()
    weights = (out, out) if norms is None else (norms.q, norms.k)
    _attend_fresh[(len(work.items), num_kv_heads)](
        work.items, work.counters, q, k, v, fresh.cos, fresh.sin, *weights, k_pages, v_pages, table, keys.indices,
        fresh.locations, out if sinks is None else sinks, out, partial, maxima, sums,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        k_pages.stride(1), k_pages.stride(2), v_pages.stride(1), v_pages.stride(2), table.stride(0), fresh.cos.shape[1],
        0.0 if norms is None else norms.eps, 0.0 if norms is None else norms.offset,
        1 / fresh.scales.key, 1 / fresh.scales.value,
        scale * LOG2_E, fresh.scales.value, softcap * LOG2_E, num_heads, num_kv_heads, keys.first_key,
        keys.page_size, any(len(each) * each.stride(0) >= 2**31 for each in pages),
        ITEM=ITEM, GROUP=group, WINDOW=window, HAS_SINKS=sinks is not None, SOFTCAP=softcap != 0.0,
        NORM=norms is not None, NORM_WIDE=norms is not None and norms.wide, DIM=dim, VALUE=value_dim,
        BLOCK_VALUE=max(triton.next_power_of_2(value_dim), 16), BLOCK_M=form.block_m, BLOCK_N=form.block_n,
        IEEE=q.dtype == torch.float32, LANES=min(triton.next_power_of_2(group), form.block_m), WARPS=form.num_warps,
        EARLY=early, num_warps=form.num_warps, num_stages=form.num_stages, **launch.options(early),
    )  # fmt: skip
    return out
