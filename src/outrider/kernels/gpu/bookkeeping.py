"""What a round does beside its networks, in few launches: rows are laid out, drafts judged, tokens and states kept.
The slow way stands in engine/runner.py, verify.py, cache.py and drafters/base.py; these kernels do the same."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu import launch
from outrider.types import Batch, SlotState, Step, Verdict

ROWS = 64  # of a request that a program lays out
BLOCK = 1024


@triton.jit
def _pack(
    slots, taken, allowed, tokens, computed, draft_count, page_table,
    input_ids, indices, locations, starts, num_valid, table,
    tokens_row, table_row, last_index, page_size, width,
    BLOCK_W: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request)
    seated = tl.load(taken + request)
    start = tl.where(seated, tl.load(computed + slot), 0)  # nobody stays where he is
    valid = tl.minimum(tl.load(draft_count + slot), tl.load(allowed + request))
    tl.store(starts + request, start)
    tl.store(num_valid + request, tl.minimum(valid, width - 1))
    row = tl.arange(0, BLOCK_W)
    fits = row < width
    index = tl.minimum(start + row, last_index)
    page = tl.load(page_table + slot * table_row + index // page_size, mask=fits, other=0).to(tl.int64)
    at = request * width + row
    tl.store(input_ids + at, tl.load(tokens + slot * tokens_row + index, mask=fits, other=0), mask=fits)
    tl.store(indices + at, index, mask=fits)
    tl.store(locations + at, page * page_size + index % page_size, mask=fits)
    for begin in range(0, table_row, BLOCK):
        place = begin + tl.arange(0, BLOCK)
        inside = place < table_row
        copied = tl.load(page_table + slot * table_row + place, mask=inside, other=0)
        tl.store(table + request * table_row + place, copied, mask=inside)


@dataclass(frozen=True)
class Rows:
    """The rows of a round with fixed shapes."""

    input_ids: Tensor  # [B * width]
    indices: Tensor
    locations: Tensor
    starts: Tensor  # [B]
    num_valid: Tensor  # [B]
    page_table: Tensor  # [B, M]


def pack(
    slots: Tensor, taken: Tensor, allowed: Tensor, state: SlotState, page_table: Tensor, page_size: int, width: int
) -> Rows:
    """`width` rows of every seat: the last committed token, then the draft."""
    count, early = len(slots), launch.early(slots)
    input_ids, indices, locations = (slots.new_empty(count * width) for _ in range(3))
    starts, num_valid = (slots.new_empty(count) for _ in range(2))
    table = page_table.new_empty(count, page_table.shape[1])
    rows = Rows(input_ids, indices, locations, starts, num_valid, table)
    _pack[(count,)](
        slots, taken, allowed, state.tokens, state.computed, state.draft_count, page_table,
        rows.input_ids, rows.indices, rows.locations, rows.starts, rows.num_valid, rows.page_table,
        state.tokens.stride(0), page_table.shape[1], state.tokens.shape[1] - 2, page_size, width,
        BLOCK_W=triton.next_power_of_2(width), BLOCK=BLOCK, EARLY=early, num_warps=1, **launch.options(early),
    )  # fmt: skip
    return rows


@triton.jit
def _settle(
    choice, input_ids, slots, taken, num_valid, starts, tokens, lengths, computed, kept_state, count_out, kept_out,
    tokens_row, width, BLOCK_W: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request)
    seated = tl.load(taken + request)
    valid = tl.load(num_valid + request)
    row = tl.arange(0, BLOCK_W)
    chosen = tl.load(choice + request * width + row, mask=row < width, other=-1)
    draft = tl.load(input_ids + request * width + row + 1, mask=row < width - 1, other=-2)
    differs = (chosen != draft) | (row >= valid)
    accepted = tl.min(tl.where(differs, row, BLOCK_W)).to(tl.int64)
    count = tl.where(seated, accepted + 1, 0)
    kept = tl.where(seated, accepted + 1, width)
    length = tl.load(lengths + slot)
    tl.store(tokens + slot * tokens_row + length + row, chosen, mask=row < count)
    tl.store(lengths + slot, length + count)
    tl.store(computed + slot, tl.load(starts + request) + kept)
    tl.store(kept_state + slot, kept - 1)
    tl.store(count_out + request, count)
    tl.store(kept_out + request, kept)


def settle(step: Step, choice: Tensor) -> Verdict:
    """Agreement, and the tokens that come of it are committed: choice [B, J], as many rows for every request."""
    state, batch, early = step.state, step.batch, launch.early(choice)
    num_requests, width = choice.shape
    choice = choice.contiguous()
    count, kept = torch.empty_like(step.starts), torch.empty_like(step.starts)
    _settle[(num_requests,)](
        choice, batch.input_ids, batch.slots, step.emits, step.num_valid, step.starts,
        state.tokens, state.lengths, state.computed, state.kept_state, count, kept, state.tokens.stride(0), width,
        BLOCK_W=triton.next_power_of_2(width), EARLY=early, num_warps=1, **launch.options(early),
    )  # fmt: skip
    return Verdict(choice, count, kept)


@triton.jit
def _keep_taps(
    taps, carried, slots, query_start, num_kept, indices, starts, page_table, carry, tails,
    table_row, page_size, size, num_carried, num_tails, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (request, n, block): the n-th carried row for n < num_carried, then row n of the pass for its page."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request, number = tl.program_id(0).to(tl.int64), tl.program_id(1)
    first = tl.load(query_start + request).to(tl.int64)
    num_rows = tl.load(query_start + request + 1) - first
    kept = tl.load(num_kept + request)
    place = tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    fits = place < size
    if number < num_carried:
        row = kept - num_carried + number
        if row < 0:
            value = tl.load(carried + (request * num_carried + num_carried + row) * size + place, mask=fits)
        else:
            value = tl.load(taps + (first + row) * size + place, mask=fits)
        slot = tl.load(slots + request)
        tl.store(carry + (slot * num_carried + number) * size + place, value, mask=fits)
    else:
        row = (number - num_carried).to(tl.int64)
        if row < num_rows:
            index = tl.load(indices + first + row)
            if ((index + 1) % page_size == 0) & (index < tl.load(starts + request) + kept):
                page = tl.load(page_table + request * table_row + index // page_size).to(tl.int64)
                for tail in range(num_tails):
                    source = row - num_tails + 1 + tail
                    if source < 0:
                        value = tl.load(
                            carried + (request * num_carried + num_carried + source) * size + place, mask=fits
                        )
                    else:
                        value = tl.load(taps + (first + source) * size + place, mask=fits)
                    tl.store(tails + (page * num_tails + tail) * size + place, value, mask=fits)


def keep_taps(step: Step, taps: Tensor, carried: Tensor, verdict: Verdict, kept: tuple[Tensor, Tensor]) -> None:
    """The taps [T, n, H] of the last kept rows go to the slots' carry [S, C, n, H], those of the last rows of a page to
    its tails [P, N, n, H]. `carried` [B, C, n, H] is the carry as it was."""
    carry, tails = kept
    batch, early = step.batch, launch.early(taps)
    size = taps[0].numel()
    num_carried, num_tails = carry.shape[1], tails.shape[1]
    grid = (len(batch.slots), num_carried + batch.max_rows, triton.cdiv(size, BLOCK))
    _keep_taps[grid](
        taps.contiguous(), carried, batch.slots, batch.query_start, verdict.kept, batch.indices, step.starts,
        batch.page_table, carry, tails, batch.page_table.stride(0), batch.page_size, size, num_carried, num_tails,
        BLOCK=BLOCK, EARLY=early, **launch.options(early),
    )  # fmt: skip


@triton.jit
def _follow(
    slots, starts, num_rows, query_start, lengths, tokens, page_table,
    out_start, requests, indices, positions, input_ids, locations, last,
    tokens_row, table_row, page_size, num_requests, last_index, first_key, lag, back, extra,
    ROWS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    more = 1 + back + extra
    slot, start = tl.load(slots + request), tl.load(starts + request)
    count, length = tl.load(num_rows + request), tl.load(lengths + slot)
    first = tl.load(query_start + request).to(tl.int64) + more * request
    if tl.program_id(1) == 0:
        tl.store(out_start + request, first.to(tl.int32))
        tl.store(last + request, first + back + tl.minimum(length - 1 - start, count))
        if request == num_requests - 1:
            tl.store(out_start + num_requests, (first + count + more).to(tl.int32))
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    fits = row < count + more
    place = start - back + row
    known = (place >= first_key) & (place < length + extra)
    index = tl.minimum(tl.maximum(place, 0), last_index)
    page = tl.load(page_table + request * table_row + index // page_size, mask=fits & known, other=0).to(tl.int64)
    at = first + row
    tl.store(requests + at, request + tl.zeros_like(at), mask=fits)
    tl.store(indices + at, index, mask=fits)
    tl.store(positions + at, tl.maximum(index - lag, 0), mask=fits)
    tl.store(input_ids + at, tl.load(tokens + slot * tokens_row + index, mask=fits, other=0), mask=fits)
    tl.store(locations + at, page * page_size + index % page_size, mask=fits)


@dataclass(frozen=True)
class Followed:
    """The rows with which a drafter follows the text."""

    query_start: Tensor
    request: Tensor
    indices: Tensor
    positions: Tensor
    input_ids: Tensor
    locations: Tensor
    last: Tensor


def follow(step: Step, first_key: int, lag: int, back: int, extra: int) -> Followed:
    """One row for every token of the pass and `1 + back + extra` more: see drafters/base.py."""
    batch, state, early = step.batch, step.state, launch.early(step.starts)
    num_requests, more = len(batch.slots), 1 + back + extra
    total = len(batch.input_ids) + more * num_requests
    request, indices, positions, input_ids, locations = (batch.slots.new_empty(total) for _ in range(5))
    rows = Followed(
        query_start=torch.empty_like(batch.query_start),
        request=request,
        indices=indices,
        positions=positions,
        input_ids=input_ids,
        locations=locations,
        last=torch.empty_like(batch.slots),
    )
    _follow[(num_requests, triton.cdiv(batch.max_rows + more, ROWS))](
        batch.slots, step.starts, step.num_rows, batch.query_start, state.lengths, state.tokens, batch.page_table,
        rows.query_start, rows.request, rows.indices, rows.positions, rows.input_ids, rows.locations, rows.last,
        state.tokens.stride(0), batch.page_table.stride(0), batch.page_size, num_requests, state.tokens.shape[1] - 1,
        first_key, lag, back, extra, ROWS=ROWS, EARLY=early, num_warps=1, **launch.options(early),
    )  # fmt: skip
    return rows


@triton.jit
def _shift(
    taps, carried, requests, new_start, old_start, num_rows, out, size, num_carried, back,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(requests + row)
    offset = row - tl.load(new_start + request)
    before = tl.minimum(offset - back - 1, tl.load(num_rows + request) - 1)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    fits = place < size
    if before < 0:
        value = tl.load(carried + (request * num_carried + num_carried + before) * size + place, mask=fits)
    else:
        value = tl.load(taps + (tl.load(old_start + request) + before) * size + place, mask=fits)
    tl.store(out + row * size + place, value, mask=fits)


def shift(step: Step, taps: Tensor, carried: Tensor, rows: Batch, back: int) -> Tensor:
    """The taps [T, n, H] of the token before each of the rows; the first ones were carried [B, C, n, H]."""
    total, size, early = len(rows.request), taps[0].numel(), launch.early(taps)
    out = taps.new_empty(total, *taps.shape[1:])
    _shift[(total, triton.cdiv(size, BLOCK))](
        taps.contiguous(), carried.contiguous(), rows.request, rows.query_start, step.batch.query_start, step.num_rows,
        out, size, carried.shape[1], back, BLOCK=BLOCK, EARLY=early, **launch.options(early),
    )  # fmt: skip
    return out


@triton.jit
def _note(
    slots, lengths, tokens, draft_count, num_valid, count, kept, choice, draft, made, table,
    tokens_row, width, depth, columns, HAS_DRAFT: tl.constexpr, BLOCK_W: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request)
    row = table + request * columns
    place = tl.arange(0, BLOCK_W)
    drafted = 0
    if HAS_DRAFT:
        drafted = tl.load(made + request).to(tl.int64)
        token = tl.load(draft + request * depth + place, mask=place < depth, other=0)
        tl.store(tokens + slot * tokens_row + tl.load(lengths + slot) + place, token, mask=place < drafted)
        tl.store(row + 4 + width + place, token, mask=place < depth)
    tl.store(draft_count + slot, drafted)
    tl.store(row, tl.load(num_valid + request))
    tl.store(row + 1, drafted)
    tl.store(row + 2, tl.load(count + request))
    tl.store(row + 3, tl.load(kept + request))
    tl.store(
        row + 4 + place, tl.load(choice + request * width + place, mask=place < width, other=0), mask=place < width
    )


def note(step: Step, verdict: Verdict, tokens: Tensor | None, made: Tensor | None) -> Tensor:
    """Keeps the draft [B, K] behind the committed tokens, and writes down what the host must know, [B, 4 + J + K]:
    drafts judged, drafts made, tokens committed, rows kept, then choices and draft."""
    state, early = step.state, launch.early(step.starts)
    num_requests, width = verdict.tokens.shape
    depth = 0 if tokens is None else tokens.shape[1]
    columns = 4 + width + depth
    table = verdict.tokens.new_empty(num_requests, columns)
    nothing = verdict.count
    _note[(num_requests,)](
        step.batch.slots, state.lengths, state.tokens, state.draft_count, step.num_valid, verdict.count, verdict.kept,
        verdict.tokens, nothing if tokens is None else tokens.contiguous(), nothing if made is None else made, table,
        state.tokens.stride(0), width, depth, columns, HAS_DRAFT=tokens is not None,
        BLOCK_W=triton.next_power_of_2(max(width, depth)), EARLY=early, num_warps=1, **launch.options(early),
    )  # fmt: skip
    return table
