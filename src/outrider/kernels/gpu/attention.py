"""Attention over pages for any number of rows: several programs share the keys of a request, then their parts are put
together. Which keys a program sees depends on `parts` alone, so a row's bits do not depend on its company."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

WANTED_PROGRAMS = 256  # enough to keep every multiprocessor busy
MAX_PARTS = 64
BLOCK_BYTES = 65536  # of keys and values that a program reads at a time
WARPS, STAGES = 4, 2


@triton.jit
def _attend(
    q, k_pages, v_pages, page_table, query_start, indices, last_keys, sinks, out, partial, maxima, sums,
    q_row, q_head, key_row, key_head, value_row, value_head, table_row, scale, softcap,
    num_heads, first_key, blocks_per_request, PAGE: tl.constexpr,
    GROUP: tl.constexpr, PARTS: tl.constexpr, WINDOW: tl.constexpr, HAS_LAST: tl.constexpr, HAS_SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr, DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, VALUE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """A program has a few rows of one request, with all query heads that share a key head, and every PARTS-th block of
    keys. Rows and heads are laid out as row * GROUP + head."""
    request = tl.program_id(0) // blocks_per_request
    block = tl.program_id(0) % blocks_per_request
    kv_head = tl.program_id(1)
    part = tl.program_id(2)
    first_row = tl.load(query_start + request)
    num_rows = tl.load(query_start + request + 1) - first_row
    lane = block * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = lane < num_rows * GROUP
    if block * BLOCK_M >= num_rows * GROUP:
        return
    row = (first_row + lane // GROUP).to(tl.int64)
    head = kv_head * GROUP + lane % GROUP
    index = tl.load(indices + row, mask=inside, other=-1)
    last = tl.load(last_keys + row, mask=inside, other=-1) if HAS_LAST else index
    end = tl.max(last) + 1
    begin = first_key + 0
    if WINDOW > 0:
        lowest = tl.min(tl.where(inside, index, 2147483647)) - WINDOW + 1
        begin = tl.maximum(begin, lowest)
    first_block = begin // BLOCK_N
    # the block that this part begins with: the first one not before first_block whose number is `part` modulo PARTS
    start = first_block + (part - first_block % PARTS + PARTS) % PARTS

    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    place = tl.arange(0, MAIN)
    q_at = q + row[:, None] * q_row + head[:, None] * q_head
    query = tl.load(q_at + place[None, :], mask=inside[:, None] & (place < DIM)[None, :], other=0.0)
    if REST > 0:
        more = MAIN + tl.arange(0, REST)
        query_rest = tl.load(q_at + more[None, :], mask=inside[:, None] & (more < DIM)[None, :], other=0.0)
    value_place = tl.arange(0, BLOCK_VALUE)
    best = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((BLOCK_M,), dtype=tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_VALUE), dtype=tl.float32)
    for number in range(start, tl.cdiv(end, BLOCK_N), PARTS):
        key = number * BLOCK_N + tl.arange(0, BLOCK_N)
        exists = (key < end) & (key >= begin)
        page = tl.load(page_table + request * table_row + key // PAGE, mask=exists, other=0).to(tl.int64)
        location = page * PAGE + key % PAGE
        key_at = k_pages + location * key_row + kv_head * key_head
        keys = tl.load(key_at[None, :] + place[:, None], mask=exists[None, :] & (place < DIM)[:, None], other=0.0)
        value_at = v_pages + location * value_row + kv_head * value_head
        values = tl.load(
            value_at[:, None] + value_place[None, :], mask=exists[:, None] & (value_place < VALUE)[None, :], other=0.0
        )
        score = tl.dot(query, keys, input_precision=precision)
        if REST > 0:
            keys = tl.load(key_at[None, :] + more[:, None], mask=exists[None, :] & (more < DIM)[:, None], other=0.0)
            score += tl.dot(query_rest, keys, input_precision=precision)
        score *= scale
        if SOFTCAP:
            bounded = 1 - 2 / (1 + tl.exp(2 * score / softcap))
            score = softcap * bounded
        seen = (key[None, :] <= last[:, None]) & (key[None, :] >= first_key)
        if WINDOW > 0:
            seen = seen & (key[None, :] > index[:, None] - WINDOW)
        score = tl.where(seen, score, float("-inf"))
        better = tl.maximum(best, tl.max(score, 1))
        safe = tl.where(better == float("-inf"), 0.0, better)  # a row that has seen nothing yet
        shrink = tl.exp(best - safe)
        share = tl.exp(score - safe[:, None])
        weight = weight * shrink + tl.sum(share, 1)
        total = total * shrink[:, None]
        total = tl.dot(share.to(values.dtype), values, total, input_precision=precision)
        best = better
    fits = inside[:, None] & (value_place < VALUE)[None, :]
    cell = row * num_heads + head
    if PARTS == 1:
        if HAS_SINKS:
            sink = tl.load(sinks + head, mask=inside, other=0.0).to(tl.float32)
            better = tl.maximum(best, sink)
            shrink = tl.exp(best - better)
            weight = weight * shrink + tl.exp(sink - better)
            total = total * shrink[:, None]
        total = tl.where(weight[:, None] > 0, total / weight[:, None], 0.0)
        tl.store(out + cell[:, None] * VALUE + value_place[None, :], total.to(out.dtype.element_ty), mask=fits)
    else:
        at = cell * PARTS + part
        tl.store(maxima + at, best, mask=inside)
        tl.store(sums + at, weight, mask=inside)
        if start * BLOCK_N < end:  # otherwise nothing was seen, and nobody will look
            tl.store(partial + at[:, None] * VALUE + value_place[None, :], total, mask=fits)


@triton.jit
def _combine(
    partial, maxima, sums, sinks, out, num_heads,
    PARTS: tl.constexpr, HAS_SINKS: tl.constexpr, VALUE: tl.constexpr, BLOCK_VALUE: tl.constexpr,
):  # fmt: skip
    """One program for a head of a row."""
    cell = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, PARTS)
    place = tl.arange(0, BLOCK_VALUE)
    best = tl.load(maxima + cell * PARTS + part)
    top = tl.max(best)
    if HAS_SINKS:
        sink = tl.load(sinks + cell % num_heads).to(tl.float32)
        top = tl.maximum(top, sink)
    top = tl.where(top == float("-inf"), 0.0, top)
    share = tl.exp(best - top)
    weight = tl.sum(tl.load(sums + cell * PARTS + part) * share)
    if HAS_SINKS:
        weight += tl.exp(sink - top)
    seen = best > float("-inf")
    at = partial + (cell * PARTS + part)[:, None] * VALUE + place[None, :]
    totals = tl.load(at, mask=seen[:, None] & (place < VALUE)[None, :], other=0.0)
    total = tl.sum(totals * share[:, None], 0)
    total = tl.where(weight > 0, total / weight, 0.0)
    tl.store(out + cell * VALUE + place, total.to(out.dtype.element_ty), mask=place < VALUE)


@dataclass(frozen=True)
class Keys:
    """Which keys each row sees: how a batch says it, without the rest of the batch."""

    page_table: Tensor  # [B, M] int32
    query_start: Tensor  # [B + 1] int32
    indices: Tensor  # [T]
    last_key: Tensor | None  # [T]
    first_key: int
    page_size: int
    max_rows: int


def paged_attention(
    q: Tensor,
    pages: tuple[Tensor, Tensor],
    keys: Keys,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    parts: int | None = None,
) -> Tensor:
    """q [T, heads, D], pages [P, page_size, kv heads, D] and [..., D_v] -> [T, heads, D_v]. `parts`: how many programs
    share a request's keys; None: as many as keep the device busy, which is not the same in every company."""
    k_pages, v_pages = pages
    num_rows, num_heads, dim = q.shape
    num_requests, num_kv_heads, value_dim = len(keys.query_start) - 1, k_pages.shape[2], v_pages.shape[3]
    out = q.new_empty(num_rows, num_heads, value_dim)
    if not num_rows:
        return out
    group = num_heads // num_kv_heads
    lanes = keys.max_rows * group
    block_m = 64 if lanes > 32 and dim <= 256 else 32 if lanes > 16 else 16
    if parts is not None:
        block_m = 16
    blocks = triton.cdiv(lanes, block_m)
    if parts is None:
        programs = num_requests * num_kv_heads * blocks
        parts = 1 if keys.max_rows > 64 else min(MAX_PARTS, triton.next_power_of_2(max(WANTED_PROGRAMS // programs, 1)))
    main, rest = _split(dim)
    partial = maxima = sums = out
    if parts > 1:
        partial = torch.empty(num_rows * num_heads * parts, value_dim, dtype=torch.float32, device=q.device)
        maxima = torch.empty(2, num_rows * num_heads * parts, dtype=torch.float32, device=q.device)
        maxima, sums = maxima.unbind()
    last_key, table = keys.last_key, keys.page_table
    block_n = BLOCK_BYTES // ((dim + value_dim) * q.element_size())
    block_n = min(max(1 << (block_n.bit_length() - 1), 32), 64 if q.dtype == torch.float32 else 128)  # a power of two
    _attend[(num_requests * blocks, num_kv_heads, parts)](
        q, k_pages, v_pages, table, keys.query_start, keys.indices, keys.indices if last_key is None else last_key,
        out if sinks is None else sinks, out, partial, maxima, sums,
        q.stride(0), q.stride(1), k_pages.stride(1), k_pages.stride(2), v_pages.stride(1), v_pages.stride(2),
        table.stride(0), scale, softcap, num_heads, keys.first_key, blocks, keys.page_size,
        GROUP=group, PARTS=parts, WINDOW=window, HAS_LAST=last_key is not None, HAS_SINKS=sinks is not None,
        SOFTCAP=softcap != 0.0, DIM=dim, MAIN=main, REST=rest, VALUE=value_dim,
        BLOCK_VALUE=max(triton.next_power_of_2(value_dim), 16), BLOCK_M=block_m, BLOCK_N=block_n,
        IEEE=q.dtype == torch.float32, num_warps=WARPS, num_stages=STAGES,
    )  # fmt: skip
    if parts > 1:
        _combine[(num_rows * num_heads,)](
            partial, maxima, sums, out if sinks is None else sinks, out, num_heads,
            PARTS=parts, HAS_SINKS=sinks is not None, VALUE=value_dim,
            BLOCK_VALUE=triton.next_power_of_2(value_dim), num_warps=4 if parts * value_dim > 2048 else 1,
        )  # fmt: skip
    return out


def _split(dim: int) -> tuple[int, int]:
    """A head in two pieces whose sizes are powers of two: 576 = 512 + 64."""
    whole = triton.next_power_of_2(dim)
    if whole == dim or dim < 32:
        return max(whole, 16), 0
    return whole // 2, max(triton.next_power_of_2(dim - whole // 2), 16)
