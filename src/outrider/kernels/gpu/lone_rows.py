"""Attention where everybody has one row, or a few, as few steps after one another as there can be. What a program is to
do is one look-up, its pages the next; then it asks for all keys and values of its first block, into registers, and only
then waits for the launch before it, which makes queries and the newest keys. For a few hundred keys that block is all
of its part, and there is no loop; longer texts go on with that of attention.py. Parts are put together after one
look-up."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu import launch
from outrider.kernels.gpu.attention import LOG2_E, attend_blocks, split_dim
from outrider.kernels.gpu.attention_parts import finish, leave
from outrider.kernels.gpu.attention_work import ANY, ITEM, Form, Keys, work_for
from outrider.kernels.gpu.page_bits import softmax_step

BLOCK_M, MOST_LANES = 16, 128  # lanes: rows of a request times the heads that share a key head
MOST_PARTS = 8  # that are looked up at once
HELD = 64  # numbers of them that a thread holds
PIECE_DIM = tl.constexpr(128)  # numbers of a key that are multiplied at a time


@dataclass(frozen=True)
class Rows:
    """How a program reads. Forms that fill registers twice over (128 keys of 128 numbers by 4 warps, twice as many by
    8) spill; docs/diary.md has what each makes of one row."""

    keys: int  # at a time
    warps: int
    slices: int = 1  # of the values, each a program of its own
    least_keys: int | None = None  # that are worth a program, if not as many
    num_programs: int | None = None  # that the list has room for, if not as many as usual: most find nothing to do
    loop_keys: int | None = None  # at a time, of what is left of a longer text, if not as many
    ahead: bool = True  # they are asked for before the launch before this one has ended
    lanes: int = 32  # of a program, at most, where requests have several rows
    signals: bool = False  # the next launch may begin while parts are put together: most of the device is free
    requests: int = 8  # at most: more of them keep a device busy as they are


# by a head's size, as measured (scripts/h200/rows.py), of requests of one row, and of several (a verification's);
# others are read by attention.py
EARLY, EARLY_WIDE = Rows(64, 4, signals=True), Rows(64, 8, signals=True)
CHOSEN = {64: EARLY, 128: replace(EARLY, requests=64), 256: Rows(32, 4, signals=True), 576: Rows(64, 8, slices=8)}
BY_LANES = Rows(64, 4, lanes=16, signals=True)
SEVERAL = {64: EARLY_WIDE, 128: BY_LANES, 256: Rows(128, 8, slices=2, signals=True), 576: Rows(64, 8, slices=4)}
MANY_LANES = {64: BY_LANES}  # instead, where requests have more lanes than that form's programs


@triton.jit
def _together(
    maxima, sums, partial, first_part, parts, inside, place, num_places, VALUE: tl.constexpr,
    BLOCK_VALUE: tl.constexpr, BLOCK_M: tl.constexpr, LANES: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """What programs have left of all parts of a row: PIECE of them are asked for before any is looked at."""
    lane, value_place = tl.arange(0, LANES), tl.arange(0, BLOCK_VALUE)
    best = tl.full((LANES,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((LANES,), dtype=tl.float32)
    total = tl.zeros((LANES, BLOCK_VALUE), dtype=tl.float32)
    stride = num_places * BLOCK_M
    at = (first_part * num_places + place) * BLOCK_M + lane
    fits = (value_place < VALUE)[None, :]
    for first in range(0, parts, PIECE):
        tops, seen, values = (), (), ()
        for number in tl.static_range(PIECE):
            exists = inside & (lane * 0 + first + number < parts)
            value_at = partial + at[:, None] * VALUE + value_place[None, :]
            top = tl.load(maxima + at, mask=exists, other=float("-inf"), cache_modifier=".cg")
            one = tl.load(sums + at, mask=exists, other=0.0, cache_modifier=".cg")
            value = tl.load(value_at, mask=exists[:, None] & fits, other=0.0, cache_modifier=".cg")
            tops, seen, values = tops + (top,), seen + (one,), values + (value,)  # type: ignore[assignment] # noqa: RUF005
            at += stride
        better = best
        for number in tl.static_range(PIECE):
            better = tl.maximum(better, tops[number])
        safe = tl.where(better == float("-inf"), 0.0, better)
        shrink = tl.exp2(best - safe)
        weight, total = weight * shrink, total * shrink[:, None]
        for number in tl.static_range(PIECE):
            share = tl.exp2(tops[number] - safe)
            weight += seen[number] * share
            total += values[number] * share[:, None]
        best = better
    return best, weight, total


@triton.jit
def _ask(at, exists, before, DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, FIRST: tl.constexpr):
    """Heads from at [N, 1] on, piece by piece. FIRST: nothing was asked for yet; else what is not asked for now is as
    it was before."""
    SIZE: tl.constexpr = MAIN if MAIN < PIECE_DIM else PIECE_DIM
    found = ()
    for number in tl.static_range(MAIN // SIZE):
        place = number * SIZE + tl.arange(0, SIZE)[None, :]
        other = 0.0 if FIRST else before[number]
        found = found + (tl.load(at + place, mask=exists & (place < DIM), other=other),)  # type: ignore[assignment] # noqa: RUF005
    if REST > 0:
        place = MAIN + tl.arange(0, REST)[None, :]
        other = 0.0 if FIRST else before[MAIN // SIZE]
        found = found + (tl.load(at + place, mask=exists & (place < DIM), other=other),)  # type: ignore[assignment] # noqa: RUF005
    return found


@triton.jit
def _ask_whole(at, exists, DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr):
    place = tl.arange(0, MAIN)[None, :]
    whole = tl.load(at + place, mask=exists & (place < DIM), other=0.0)
    rest = whole
    if REST > 0:
        more = MAIN + tl.arange(0, REST)[None, :]
        rest = tl.load(at + more, mask=exists & (more < DIM), other=0.0)
    return whole, rest


@triton.jit(do_not_specialize=["first_key", "table_row"])
def _attend_rows(
    items, counters, q, k_pages, v_pages, page_table, sinks, out, partial, maxima, sums, q_row, q_head, key_row,
    key_head, value_row, value_head, table_row, scale, value_scale, softcap, num_heads, num_kv_heads, first_key,
    PAGE: tl.constexpr, WIDE: tl.constexpr, ITEM: tl.constexpr, GROUP: tl.constexpr, WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr, SOFTCAP: tl.constexpr, DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    VALUE: tl.constexpr, SLICES: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, LOOP_N: tl.constexpr, IEEE: tl.constexpr, LANES: tl.constexpr, PIECE: tl.constexpr,
    AHEAD: tl.constexpr, SIGNALS: tl.constexpr, SEVERAL: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As attention._attend for requests of one row, or of SEVERAL, whose lanes may be several blocks. VALUE: numbers of
    a slice of the values. The list is looked up by loads that are volatile only so that none of them is put off until
    another one is here."""
    item = items + tl.program_id(1) * ITEM
    request, first_row = tl.load(item, volatile=True), tl.load(item + 1, volatile=True)
    part, parts = tl.load(item + 4, volatile=True), tl.load(item + 5, volatile=True)
    first_part, counter = tl.load(item + 6, volatile=True), tl.load(item + 7, volatile=True)
    newest = tl.load(item + 8, volatile=True)
    rows, first_lane = 1, 0
    if SEVERAL:
        rows, first_lane = tl.load(item + 2, volatile=True), tl.load(item + 3, volatile=True) * BLOCK_M
    if request < 0:
        if EARLY:
            tl.extra.cuda.gdc_wait()
        return
    kv_head, piece = tl.program_id(0) // SLICES, tl.program_id(0) % SLICES
    begin = first_key + 0
    if WINDOW > 0:
        begin = tl.maximum(begin, newest - rows - WINDOW + 2)
    low = begin // BLOCK_N
    keys_at = k_pages + kv_head * key_head
    values_at = v_pages + kv_head * value_head + piece * VALUE
    table = page_table + request * table_row
    if EARLY and not AHEAD:
        tl.extra.cuda.gdc_wait()

    block = low + part
    key = block * BLOCK_N + tl.arange(0, BLOCK_N)
    location = tl.load(table + key // PAGE, mask=key <= newest, other=0) * PAGE + key % PAGE
    if WIDE:
        location = location.to(tl.int64)
    oldest_new = newest + 1 - rows if AHEAD else newest + 1  # from here on the launch before makes them
    known = ((key >= begin) & (key < oldest_new))[:, None]
    value_place = tl.arange(0, BLOCK_VALUE)[None, :]
    key_at = keys_at + location[:, None] * key_row
    value_at = values_at + location[:, None] * value_row + value_place
    keys = _ask(key_at, known, (), DIM, MAIN, REST, True)
    values = tl.load(value_at, mask=known & (value_place < VALUE), other=0.0)
    if EARLY and AHEAD:
        tl.extra.cuda.gdc_wait()

    lane = first_lane + tl.arange(0, BLOCK_M)
    inside = lane < rows * GROUP
    row, head = (lane // GROUP, lane % GROUP) if SEVERAL else (lane * 0, lane)
    q_at = q + (first_row + row).to(tl.int64)[:, None] * q_row + (kv_head * GROUP + head)[:, None] * q_head
    query = _ask(q_at, inside[:, None], (), DIM, MAIN, REST, True)
    if AHEAD and (block + 1) * BLOCK_N > oldest_new:  # what was asked for stays; the newest keys are added
        is_new = ((key >= oldest_new) & (key <= newest))[:, None]
        keys = _ask(key_at, is_new, keys, DIM, MAIN, REST, False)
        values = tl.load(value_at, mask=is_new & (value_place < VALUE), other=values)
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    score = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for number in tl.static_range(len(keys)):
        score = tl.dot(query[number], keys[number].T, score, input_precision=precision)
    best = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((BLOCK_M,), dtype=tl.float32)
    index = newest + 1 - rows + row
    best, weight, _, share = softmax_step(
        best, weight, score, key, index, index, first_key, scale, softcap, True, WINDOW, SOFTCAP, False
    )
    total = tl.dot(share.to(values.dtype), values, input_precision=precision)
    rest = (low + parts) * BLOCK_N
    if rest <= newest:  # a longer text
        whole, query_rest = _ask_whole(q_at, inside[:, None], DIM, MAIN, REST)
        best, weight, total = attend_blocks(
            best, weight, total, whole, query_rest, index, index, keys_at, values_at, table, rest, newest + 1,
            rest // LOOP_N, tl.cdiv(newest + 1, LOOP_N), part, parts, key_row, value_row, rest, scale, softcap, PAGE,
            WIDE, True, WINDOW, SOFTCAP, DIM, MAIN, REST, VALUE, False, BLOCK_VALUE, LOOP_N, IEEE,
        )  # fmt: skip
    if parts > 1:
        here, num_places = tl.program_id(0), num_kv_heads * SLICES
        if leave(
            best, weight, total, maxima, sums, partial, counters + counter * num_places + here, inside,
            first_part.to(tl.int64), part, parts, here, num_places, VALUE, BLOCK_VALUE, BLOCK_M,
        ):  # fmt: skip
            if SIGNALS and EARLY:
                tl.extra.cuda.gdc_launch_dependents()
            few = first_lane + tl.arange(0, LANES)
            best_of_all, weight_of_all, total_of_all = _together(
                maxima, sums, partial, first_part.to(tl.int64), parts, few < rows * GROUP, here, num_places, VALUE,
                BLOCK_VALUE, BLOCK_M, LANES, PIECE,
            )  # fmt: skip
            finish(
                best_of_all, weight_of_all, total_of_all, sinks, out, first_row, few, kv_head, num_heads,
                few < rows * GROUP, value_scale, GROUP, HAS_SINKS, VALUE, BLOCK_VALUE, SLICES, piece,
            )  # fmt: skip
    else:
        finish(
            best, weight, total, sinks, out, first_row, lane, kv_head, num_heads, inside, value_scale, GROUP, HAS_SINKS,
            VALUE, BLOCK_VALUE, SLICES, piece,
        )  # fmt: skip


def fits(q: Tensor, pages: tuple[Tensor, Tensor], keys: Keys) -> bool:
    """Whether few have one row each, or a few, whose newest keys are their own, and such heads are read here. (A GPU's
    registers are not made for float32.)"""
    num_rows, num_heads, dim = q.shape
    lanes, several = keys.max_rows * (num_heads // pages[0].shape[2]), keys.max_rows > 1
    num_requests = len(keys.query_start) - 1 if several else num_rows
    chosen = (SEVERAL if several else CHOSEN).get(dim)
    return (
        chosen is not None
        and num_requests <= chosen.requests
        and (q.element_size() == 2 or not q.is_cuda)
        and keys.last_key is None
        and pages[0].dtype == q.dtype
        and lanes <= (MOST_LANES if several else BLOCK_M)
    )


def attend_rows(
    q: Tensor,
    pages: tuple[Tensor, Tensor],
    keys: Keys,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    value_scale: float = 1.0,
) -> Tensor:
    """See attention.paged_attention()."""
    k_pages, v_pages = pages
    num_rows, num_heads, dim = q.shape
    num_kv_heads, value_dim = k_pages.shape[2], v_pages.shape[3]
    out = q.new_empty(num_rows, num_heads, value_dim)
    if not num_rows:
        return out
    several, group, table = keys.max_rows > 1, num_heads // num_kv_heads, keys.page_table
    chosen = (SEVERAL if several else CHOSEN)[dim]
    if several and keys.max_rows * group > chosen.lanes:
        chosen = MANY_LANES.get(dim, chosen)
    slices = chosen.slices if value_dim % (chosen.slices * 16) == 0 else 1
    block_m = BLOCK_M if keys.max_rows * group <= BLOCK_M else chosen.lanes
    form = Form(ANY, block_m, chosen.keys, chosen.warps, num_programs=chosen.num_programs, least_keys=chosen.least_keys)
    num_places, value_dim = num_kv_heads * slices, value_dim // slices
    work, is_new = work_for(keys, group, num_places, form, window, None)
    early = not is_new and launch.early(q)
    places = len(work.items) * num_places * block_m
    partial = torch.empty(places, value_dim, dtype=torch.float32, device=q.device)
    maxima, sums = torch.empty(2, places, dtype=torch.float32, device=q.device).unbind()
    (main, rest), block_value = split_dim(dim), max(triton.next_power_of_2(value_dim), 16)
    lanes = block_m if several else triton.next_power_of_2(group)
    piece = min(HELD * 32 * chosen.warps // (lanes * block_value), MOST_PARTS)
    _attend_rows[(num_places, len(work.items))](
        work.items, work.counters, q, k_pages, v_pages, table, out if sinks is None else sinks, out, partial, maxima,
        sums, q.stride(0), q.stride(1), k_pages.stride(1), k_pages.stride(2), v_pages.stride(1), v_pages.stride(2),
        table.stride(0), scale * LOG2_E, value_scale, softcap * LOG2_E, num_heads, num_kv_heads, keys.first_key,
        keys.page_size, any(len(each) * each.stride(0) >= 2**31 for each in pages),
        ITEM=ITEM, GROUP=group, WINDOW=window, HAS_SINKS=sinks is not None, SOFTCAP=softcap != 0.0, DIM=dim, MAIN=main,
        REST=rest, VALUE=value_dim, SLICES=slices,
        BLOCK_VALUE=block_value, BLOCK_M=block_m, BLOCK_N=chosen.keys,
        LOOP_N=chosen.loop_keys or chosen.keys, IEEE=q.dtype == torch.float32,
        LANES=lanes, PIECE=max(piece, 2), AHEAD=chosen.ahead, SIGNALS=chosen.signals, SEVERAL=several, EARLY=early,
        num_warps=chosen.warps, num_stages=2, **launch.options(early),
    )  # fmt: skip
    return out
