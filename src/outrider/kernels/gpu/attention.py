"""Attention over pages for rows of all kinds at once: prompts, drafts, single tokens after a long text.
Work is shared out from a list that the device makes: a few rows of one request, with some of its keys. Whoever is the
last to finish with some rows puts their parts together. In exact mode the parts of a row depend on nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu import launch
from outrider.kernels.gpu.attention_parts import finish, leave, put_together
from outrider.kernels.gpu.attention_work import ANY, ITEM, Form, Keys, Span, work_for
from outrider.kernels.gpu.hopper import on_hopper
from outrider.kernels.gpu.page_bits import attend_words, in_float16, softmax_step

BLOCK_BYTES = 65536  # of keys and values that a program reads at a time
FEW_ROWS = 16  # of a request: a draft, or less; where others read prompts, such requests have a launch of their own
# of a launch for few rows over pages in 8 bits: keys, warps, stages, programs; as measured (scripts/h200/pages.py)
FP8_FORM = (128, 4, 4, 264)
# the same over pages in 16 bits, for few requests, each of which several programs share (scripts/h200/decode.py)
FEW_REQUESTS, FEW_FORM = 24, (64, 4, 4, 264)
LOG2_E = 1.4426950408889634  # scores are kept in units of log 2: powers of two are what a device computes


@triton.jit
def attend_blocks(
    best, weight, total, query, query_rest, index, last, keys_at, values_at, table, begin, end, low, high, part, parts,
    key_row, value_row, first_key, scale, softcap, PAGE: tl.constexpr, WIDE: tl.constexpr, MASKED: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr,
    VALUE: tl.constexpr, SAME: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_N: tl.constexpr, IEEE: tl.constexpr,
):  # fmt: skip
    """The rows of a program see those of the blocks low <= number < high that are their part's. Scores are in units of
    log 2. MASKED: not every row sees every key of them. SAME: the first MAIN numbers of a key are its value."""
    LANES: tl.constexpr = query.shape[0]
    FP8: tl.constexpr = keys_at.dtype.element_ty == tl.float8e4nv and not IEEE and (LANES < 64 or MAIN <= 128)
    # of halves that are smaller, warps would compute the same numbers
    IN_HALVES: tl.constexpr = DIM % 2 == 0 and VALUE % 2 == 0 and MAIN >= 64 and BLOCK_VALUE >= 4 * LANES
    if FP8 and IN_HALVES and LANES < 64:
        return attend_words(
            best, weight, total, query, query_rest, index, last, keys_at, values_at, table, begin, end, low, high, part,
            parts, key_row, value_row, first_key, scale, softcap, PAGE, WIDE, MASKED, WINDOW, SOFTCAP, DIM, MAIN, REST,
            VALUE, SAME, BLOCK_VALUE, BLOCK_N,
        )  # fmt: skip
    if FP8:
        query, query_rest = in_float16(query), in_float16(query_rest)
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    place, value_place = tl.arange(0, MAIN), tl.arange(0, BLOCK_VALUE)
    first = low + (part - low % parts + parts) % parts
    key = first * BLOCK_N + tl.arange(0, BLOCK_N)
    next_page = tl.load(table + key // PAGE, mask=key < end, other=0)
    for number in range(first, high, parts):
        key = number * BLOCK_N + tl.arange(0, BLOCK_N)
        exists = (key < end) & (key >= begin)
        location = next_page * PAGE + key % PAGE
        if WIDE:
            location = location.to(tl.int64)
        next_key = key + parts * BLOCK_N  # where its page is must be known before keys can be asked for in advance
        next_page = tl.load(table + next_key // PAGE, mask=next_key < end, other=0)
        key_at = keys_at + location * key_row
        value_at = values_at + location * value_row
        if MASKED:
            keys = tl.load(key_at[:, None] + place[None, :], mask=exists[:, None] & (place < DIM)[None, :], other=0.0)
            values = keys
            if not SAME:
                values = tl.load(
                    value_at[:, None] + value_place[None, :],
                    mask=exists[:, None] & (value_place < VALUE)[None, :], other=0.0,
                )  # fmt: skip
        else:
            keys = tl.load(key_at[:, None] + place[None, :], mask=(place < DIM)[None, :], other=0.0)
            values = keys
            if not SAME:
                values = tl.load(
                    value_at[:, None] + value_place[None, :], mask=(value_place < VALUE)[None, :], other=0.0
                )
        # pages may hold fewer bits
        score = tl.dot(query, keys.to(query.dtype).T, input_precision=precision)
        if REST > 0:
            more = MAIN + tl.arange(0, REST)
            keys = tl.load(key_at[:, None] + more[None, :], mask=exists[:, None] & (more < DIM)[None, :], other=0.0)
            score += tl.dot(query_rest, keys.to(query.dtype).T, input_precision=precision)
        best, weight, shrink, share = softmax_step(
            best, weight, score, key, index, last, first_key, scale, softcap, MASKED, WINDOW, SOFTCAP, FP8
        )
        total = total * shrink[:, None]
        total = tl.dot(share.to(query.dtype), values.to(query.dtype), total, input_precision=precision)
    return best, weight, total


@triton.jit(do_not_specialize=["first_key", "table_row"])
def _attend(
    items, counters, q, k_pages, v_pages, page_table, indices, last_keys, sinks, out, partial, maxima, sums,
    q_row, q_head, key_row, key_head, value_row, value_head, table_row, scale, value_scale, softcap, num_heads,
    num_kv_heads, first_key, PAGE: tl.constexpr, WIDE: tl.constexpr, ITEM: tl.constexpr, SPLIT: tl.constexpr,
    GROUP: tl.constexpr, WINDOW: tl.constexpr, HAS_LAST: tl.constexpr, HAS_SINKS: tl.constexpr,
    SOFTCAP: tl.constexpr, DIM: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr, VALUE: tl.constexpr,
    SAME: tl.constexpr, BLOCK_VALUE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, IEEE: tl.constexpr,
    LANES: tl.constexpr, WARPS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A program has a few rows of one request, with all query heads that share a key head, and every `parts`-th block
    of keys. Rows and heads are laid out as row * GROUP + head. SPLIT: blocks that all rows see are computed apart.
    EARLY: the launch before this one, which makes queries and the newest keys, may still be at work. What lies where is
    older, and looked up meanwhile."""
    item = items + tl.program_id(0) * ITEM
    request, first_row, num_rows = tl.load(item), tl.load(item + 1), tl.load(item + 2)
    block, part, parts = tl.load(item + 3), tl.load(item + 4), tl.load(item + 5)
    first_part, counter = tl.load(item + 6).to(tl.int64), tl.load(item + 7)
    if request < 0:
        if EARLY:  # nobody who comes later shall find this launch at its end, and the one before it still at work
            tl.extra.cuda.gdc_wait()
        return
    kv_head = tl.program_id(1)
    lane = block * BLOCK_M + tl.arange(0, BLOCK_M)
    inside = lane < num_rows * GROUP
    row = (first_row + lane // GROUP).to(tl.int64)
    head = kv_head * GROUP + lane % GROUP
    index = tl.load(indices + row, mask=inside, other=-1).to(tl.int32)
    last = tl.load(last_keys + row, mask=inside, other=-1).to(tl.int32) if HAS_LAST else index
    end = tl.max(last) + 1
    begin = first_key + 0
    if WINDOW > 0:
        lowest = tl.min(tl.where(inside, index, 2147483647)) - WINDOW + 1
        begin = tl.maximum(begin, lowest)
    low, high = begin // BLOCK_N, tl.cdiv(end, BLOCK_N)
    keys_at, values_at = k_pages + kv_head * key_head, v_pages + kv_head * value_head
    table = page_table + request * table_row
    if EARLY:
        tl.extra.cuda.gdc_wait()

    place = tl.arange(0, MAIN)
    q_at = q + row[:, None] * q_row + head[:, None] * q_head
    query = tl.load(q_at + place[None, :], mask=inside[:, None] & (place < DIM)[None, :], other=0.0)
    query_rest = query
    if REST > 0:
        more = MAIN + tl.arange(0, REST)
        query_rest = tl.load(q_at + more[None, :], mask=inside[:, None] & (more < DIM)[None, :], other=0.0)
    best = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    weight = tl.zeros((BLOCK_M,), dtype=tl.float32)
    total = tl.zeros((BLOCK_M, BLOCK_VALUE), dtype=tl.float32)
    if SPLIT:
        first_full = begin
        if WINDOW > 0:
            first_full = tl.maximum(begin, tl.max(index) - WINDOW + 1)
        full = tl.minimum(tl.cdiv(first_full, BLOCK_N), high)
        full_end = tl.maximum((tl.min(tl.where(inside, last, 2147483647)) + 1) // BLOCK_N, full)
        if full > low:
            best, weight, total = attend_blocks(
                best, weight, total, query, query_rest, index, last, keys_at, values_at, table, begin, end, low, full,
                part, parts, key_row, value_row, first_key, scale, softcap, PAGE, WIDE, True, WINDOW, SOFTCAP, DIM,
                MAIN, REST, VALUE, SAME, BLOCK_VALUE, BLOCK_N, IEEE,
            )  # fmt: skip
        best, weight, total = attend_blocks(
            best, weight, total, query, query_rest, index, last, keys_at, values_at, table, begin, end, full, full_end,
            part, parts, key_row, value_row, first_key, scale, softcap, PAGE, WIDE, False, WINDOW, SOFTCAP, DIM, MAIN,
            REST, VALUE, SAME, BLOCK_VALUE, BLOCK_N, IEEE,
        )  # fmt: skip
        low = full_end
    best, weight, total = attend_blocks(
        best, weight, total, query, query_rest, index, last, keys_at, values_at, table, begin, end, low, high,
        part, parts, key_row, value_row, first_key, scale, softcap, PAGE, WIDE, True, WINDOW, SOFTCAP, DIM, MAIN, REST,
        VALUE, SAME, BLOCK_VALUE, BLOCK_N, IEEE,
    )  # fmt: skip
    if parts > 1:
        counter_at = counters + counter * num_kv_heads + kv_head
        if leave(
            best, weight, total, maxima, sums, partial, counter_at, inside, first_part, part, parts, kv_head,
            num_kv_heads, VALUE, BLOCK_VALUE, BLOCK_M,
        ):  # fmt: skip
            put_together(
                maxima, sums, partial, sinks, out, first_part, parts, first_row, num_rows, block, kv_head, num_heads,
                num_kv_heads, value_scale, GROUP, HAS_SINKS, VALUE, BLOCK_VALUE, BLOCK_M, LANES, WARPS,
            )  # fmt: skip
    else:
        finish(
            best, weight, total, sinks, out, first_row, lane, kv_head, num_heads, inside, value_scale, GROUP, HAS_SINKS,
            VALUE, BLOCK_VALUE,
        )  # fmt: skip


def paged_attention(
    q: Tensor,
    pages: tuple[Tensor, Tensor],
    keys: Keys,
    scale: float,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    value_scale: float = 1.0,
    parts: int | None = None,
) -> Tensor:
    """q [T, heads, D], pages [P, page_size, kv heads, D] and [..., D_v] -> [T, heads, D_v]. `parts`: how many programs
    share a row's keys; None: as many as keep the device busy, which is not the same in every company."""
    k_pages, v_pages = pages
    num_rows, num_heads, dim = q.shape
    num_kv_heads, value_dim = k_pages.shape[2], v_pages.shape[3]
    out = q.new_empty(num_rows, num_heads, value_dim)
    if not num_rows:
        return out
    group = num_heads // num_kv_heads
    main, rest = split_dim(dim)
    last_key, table = keys.last_key, keys.page_table
    forms = forms_for(keys, group, (dim, value_dim), q.element_size(), parts, k_pages.element_size())
    prompts = on_hopper("prompt_attention", q.device) if forms[0].block_m == 128 else None
    if prompts is not None and prompts.fits(q, pages, keys):
        forms[0] = prompts.form(forms[0].rows, q.device)
    else:
        prompts = None
    work_of = {form: work_for(keys, group, num_kv_heads, form, window, parts) for form in forms}

    def run(form: Form) -> None:
        work, is_new = work_of[form]
        if form == forms[0] and prompts is not None:
            beside, _ = work_of[forms[1]]
            prompts.attend(
                q, pages, keys, work, beside, out, scale * LOG2_E, window=window, softcap=softcap * LOG2_E,
                sinks=sinks, value_scale=value_scale,
            )  # fmt: skip
            return
        # whoever comes early reads the list before it waits: the list, and all before it, must have been waited for.
        # It does not ask the next one to come early, which would sit down where attention leaves room (docs/diary.md)
        early = len(forms) == 1 and not is_new and launch.early(q)
        lanes = min(triton.next_power_of_2(group), form.block_m) if keys.max_rows == 1 else form.block_m
        places = len(work.items) * num_kv_heads * form.block_m
        partial = torch.empty(places, value_dim, dtype=torch.float32, device=q.device)
        maxima, sums = torch.empty(2, places, dtype=torch.float32, device=q.device).unbind()
        _attend[(len(work.items), num_kv_heads)](
            work.items, work.counters, q, k_pages, v_pages, table, keys.indices,
            keys.indices if last_key is None else last_key, out if sinks is None else sinks, out, partial, maxima, sums,
            q.stride(0), q.stride(1), k_pages.stride(1), k_pages.stride(2), v_pages.stride(1), v_pages.stride(2),
            table.stride(0), scale * LOG2_E, value_scale, softcap * LOG2_E, num_heads, num_kv_heads, keys.first_key,
            keys.page_size, any(len(each) * each.stride(0) >= 2**31 for each in pages),
            ITEM=ITEM, SPLIT=parts is None and form.block_m >= 64,
            GROUP=group, WINDOW=window, HAS_LAST=last_key is not None, HAS_SINKS=sinks is not None,
            SOFTCAP=softcap != 0.0, DIM=dim, MAIN=main, REST=rest, VALUE=value_dim,
            SAME=k_pages.data_ptr() == v_pages.data_ptr() and value_dim == main,
            BLOCK_VALUE=max(triton.next_power_of_2(value_dim), 16), BLOCK_M=form.block_m, BLOCK_N=form.block_n,
            IEEE=q.dtype == torch.float32, LANES=lanes, WARPS=form.num_warps, EARLY=early,
            num_warps=form.num_warps, num_stages=form.num_stages, **launch.options(early),
        )  # fmt: skip

    _side_by_side(run, forms, q.device)
    return out


def forms_for(
    keys: Keys, group: int, dims: tuple[int, int], num_bytes: int, parts: int | None, page_bytes: int = 2
) -> list[Form]:
    """Rows of prompts use the device best in large blocks, in which a single token's row would have nearly all lanes
    empty: where some read prompts, others have a launch of their own."""
    lanes, dim = keys.max_rows * group, dims[0]
    whole = BLOCK_BYTES // (sum(dims) * num_bytes)
    most = 64 if num_bytes > 2 else 128

    def form(rows: Span, block_m: int) -> Form:
        is_large = block_m >= 64  # smaller steps, more of them on their way: beside it there is room for another launch
        block_n = min(max(1 << ((whole // 2 if is_large else whole).bit_length() - 1), 32), most)
        if dim > 256 and block_m == 16 and num_bytes == 2:
            block_n = 64  # of latents, which are keys and values at once
        is_wide = block_m == 128 or (dim >= 256 and not is_large)
        stages = 3 if is_large or page_bytes == 1 else 2  # of half the bytes, two blocks are on their way
        if page_bytes == 1 and dim == 128 and not is_large:
            return Form(rows, block_m, *FP8_FORM)
        is_few = parts is None and len(keys.page_table) <= FEW_REQUESTS  # exact sums do not depend on company
        if page_bytes == 2 and dim == 128 and not is_large and is_few:
            return Form(rows, block_m, *FEW_FORM)
        return Form(rows, block_m, block_n, 8 if is_wide else 4, stages)

    if parts is not None:
        return [form(ANY, 16)]
    if keys.max_rows <= FEW_ROWS or dim > 256:
        return [form(ANY, 64 if lanes > 32 and dim <= 256 else 32 if lanes > 16 else 16)]
    many = form((FEW_ROWS + 1, keys.max_rows), 128 if dim <= 128 else 64)
    return [many, form((1, FEW_ROWS), 16 if group <= 4 else 32)]


def _side_by_side(run: Callable[[Form], None], forms: list[Form], device: torch.device) -> None:
    """All of them at the same time: prompts compute, single rows wait for memory."""
    first, *others = forms
    if not others or device.type != "cuda":
        for form in forms:
            run(form)
        return
    current, side = torch.cuda.current_stream(device), _side_stream(device)
    side.wait_stream(current)
    run(first)
    with torch.cuda.stream(side):
        for form in others:
            run(form)
    current.wait_stream(side)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def split_dim(dim: int) -> tuple[int, int]:
    """A head in two pieces whose sizes are powers of two: 576 = 512 + 64."""
    whole = triton.next_power_of_2(dim)
    if whole == dim or dim < 32:
        return max(whole, 16), 0
    return whole // 2, max(triton.next_power_of_2(dim - whole // 2), 16)
