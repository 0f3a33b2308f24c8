"""How attention's work is shared out: a list of a few rows of one request, with some of its keys, that the device makes
itself, once for all layers that are alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu import launch
from outrider.types import ATTENTION_WORK

WANTED_PROGRAMS = 264  # enough to keep every multiprocessor busy
LEAST_KEYS = 128  # that are worth a program of their own
MAX_PARTS = 64
# numbers of an item of work: request (-1: there is none), its first row, number of rows, block of rows, part, number of
# parts, where the first part is kept, which counter counts them, and the index of its newest row
ITEM = 9


@launch.jit_for_any_size
def _list_work(
    query_start, indices, last_keys, items, num_requests, num_items, wanted, exact_parts, least_rows, most_rows,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, WINDOW: tl.constexpr, HAS_LAST: tl.constexpr,
    LEAST: tl.constexpr, MOST: tl.constexpr, BLOCK_B: tl.constexpr, CHUNK: tl.constexpr, ITEM: tl.constexpr,
):  # fmt: skip
    """Program n writes the items of request n: all its blocks of rows, each with as many parts as its keys are worth.
    The last block comes first: it sees the most keys, and what begins last should not take longest. The last program
    also marks what is left of the list as empty. Requests with fewer or more rows are left out."""
    number = tl.program_id(0)
    seat = tl.arange(0, BLOCK_B)
    exists = seat < num_requests
    begin = tl.load(query_start + seat, mask=exists, other=0)
    rows = tl.load(query_start + seat + 1, mask=exists, other=0) - begin
    some = (rows >= least_rows) & (rows <= most_rows)
    newest = begin + rows - 1
    index = tl.load(indices + newest, mask=some, other=-1).to(tl.int32)
    end = index + 1
    if HAS_LAST:
        end = tl.maximum(end, tl.load(last_keys + newest, mask=some, other=-1).to(tl.int32) + 1)
    keys = end
    if WINDOW > 0:
        keys = tl.minimum(keys, WINDOW + rows)
    blocks = tl.where(some, (rows * GROUP + BLOCK_M - 1) // BLOCK_M, 0)
    if exact_parts > 0:
        parts = tl.full((BLOCK_B,), exact_parts, dtype=tl.int32)
    else:
        share = tl.maximum(tl.cdiv(tl.sum(blocks.to(tl.int64) * keys), wanted), LEAST).to(tl.int32)
        rounded = tl.where(share == LEAST, share - 1, share // 2)  # few keys in all: nobody has more than the least
        parts = tl.minimum(tl.maximum((keys + rounded) // share, 1), MOST)
    count = blocks * parts
    mine = seat == number
    first = tl.sum(tl.where(seat < number, count, 0))
    first_block = tl.sum(tl.where(seat < number, blocks, 0))
    own_parts = tl.sum(tl.where(mine, parts, 0))
    own_count = tl.sum(tl.where(mine, count, 0))
    own_blocks = tl.sum(tl.where(mine, blocks, 0))
    own_begin, own_rows = tl.sum(tl.where(mine, begin, 0)), tl.sum(tl.where(mine, rows, 0))
    own_index = tl.sum(tl.where(mine, index, 0))
    for shift in range(0, own_count, CHUNK):
        place = shift + tl.arange(0, CHUNK)
        block = place // own_parts
        at = items + (first + place) * ITEM
        fits = place < own_count
        tl.store(at, number + place * 0, mask=fits)
        tl.store(at + 1, own_begin + place * 0, mask=fits)
        tl.store(at + 2, own_rows + place * 0, mask=fits)
        tl.store(at + 3, own_blocks - 1 - block, mask=fits)
        tl.store(at + 4, place % own_parts, mask=fits)
        tl.store(at + 5, own_parts + place * 0, mask=fits)
        tl.store(at + 6, first + block * own_parts, mask=fits)
        tl.store(at + 7, first_block + block, mask=fits)
        tl.store(at + 8, own_index + place * 0, mask=fits)
    if number == num_requests - 1:
        for shift in range(first + own_count, num_items, CHUNK):
            place = shift + tl.arange(0, CHUNK)
            tl.store(items + place * ITEM, place * 0 - 1, mask=place < num_items)


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
    memo: dict[Any, Any]  # layers whose work is shared out alike share the list


Span = tuple[int, int]  # from so many rows to so many
ANY: Span = (1, 2**31 - 1)


@dataclass(frozen=True)
class Form:
    """A launch: for requests with how many rows, and what a program of it works on at a time."""

    rows: Span
    block_m: int  # lanes: rows times heads
    block_n: int  # keys
    num_warps: int = 4
    num_stages: int = 2
    num_programs: int | None = None  # that keep the device busy, if not as many as usual
    least_keys: int | None = None  # that are worth a program of their own, if not as many as it reads at a time


@dataclass(frozen=True)
class WorkList:
    items: Tensor  # [W, ITEM] int32
    counters: Tensor  # of parts that are finished, by block of rows and key head; 0 before and after every launch


def work_for(
    keys: Keys, group: int, num_kv_heads: int, form: Form, window: int, parts: int | None
) -> tuple[WorkList, bool]:
    """The list for rows and layers like these, made once for a pass; and whether it was made just now."""
    shape = (form.block_m, form.rows, form.num_programs, _least_keys(form))
    name = (ATTENTION_WORK, group, num_kv_heads, shape, window, parts, keys.last_key is None)
    is_new = name not in keys.memo
    if is_new:
        keys.memo[name] = _list(keys, group, num_kv_heads, form, window, parts)
    return keys.memo[name], is_new


def _least_keys(form: Form) -> int:
    if form.least_keys is not None:
        return form.least_keys
    return min(form.block_n, LEAST_KEYS) if form.block_m < 64 else LEAST_KEYS


def _list(keys: Keys, group: int, num_kv_heads: int, form: Form, window: int, parts: int | None) -> WorkList:
    block_m, rows = form.block_m, form.rows
    num_requests, num_rows = len(keys.query_start) - 1, len(keys.indices)
    least_rows, most_rows = rows[0], min(rows[1], keys.max_rows)
    # a request has at most one block that is not full, and no more than for the most rows that any has
    num_listed = min(num_requests, num_rows // least_rows)
    num_blocks = min(num_rows * group // block_m + num_listed, num_listed * triton.cdiv(most_rows * group, block_m))
    wanted = triton.cdiv(form.num_programs or WANTED_PROGRAMS, num_kv_heads)
    num_items = num_blocks + wanted if parts is None else num_blocks * parts
    device = keys.query_start.device
    items = torch.empty(num_items, ITEM, dtype=torch.int32, device=device)
    counters = torch.zeros(num_blocks * num_kv_heads, dtype=torch.int32, device=device)
    _list_work[(num_requests,)](
        keys.query_start, keys.indices, keys.indices if keys.last_key is None else keys.last_key, items,
        num_requests, num_items, wanted, 0 if parts is None else parts, least_rows, most_rows,
        GROUP=group, BLOCK_M=block_m, WINDOW=window, HAS_LAST=keys.last_key is not None,
        LEAST=_least_keys(form), MOST=MAX_PARTS, BLOCK_B=triton.next_power_of_2(num_requests), CHUNK=128,
        ITEM=ITEM, num_warps=1,
    )  # fmt: skip
    return WorkList(items, counters)
