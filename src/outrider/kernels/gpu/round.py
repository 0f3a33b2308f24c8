"""The operations of a round in few launches; kernels/round.py says what each of them does, and in torch, how."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu import launch
from outrider.kernels.mail import Mail
from outrider.kernels.round import NUM_COUNTS, Catching, Layout, Rows
from outrider.types import Draft, RoundShape, Seats, SlotState, Step, Verdict

BLOCK = 1024  # entries of a page table that are copied at a time
PAIRS = 8192  # rows x requests that a program compares to find which row is whose


@triton.jit
def _owner(ends, place, num_requests):
    """Of places [R], given where each request's run ends [B]: whose run a place is in, and where that run begins."""
    passed = ends[None, :] <= place[:, None]
    owner = tl.minimum(tl.sum(passed.to(tl.int32), 1), num_requests - 1)
    return owner, tl.max(tl.where(passed, ends[None, :], 0), 1)


@launch.jit_for_any_size
def _lay_out(
    slots, pending, allowed, emits, tokens, seen, computed, draft_count, page_table,
    query_start, input_ids, indices, requests, row_slots, locations,
    starts, num_rows, num_drafts, emits_out, judged, judged_slots, judged_next, judged_start, table,
    tokens_row, table_row, page_size, num_requests, total, num_judged, null_slot,
    MISSED: tl.constexpr, ROWS: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (n, 0): a few rows, and as many judged ones. Program (n, 1): the page table of request n."""
    launch.await_last(EARLY)
    number = tl.program_id(0)
    if tl.program_id(1) == 1:
        if number < num_requests:
            slot = tl.load(slots + number)
            for begin in range(0, table_row, BLOCK):
                place = begin + tl.arange(0, BLOCK)
                inside = place < table_row
                copied = tl.load(page_table + slot * table_row + place, mask=inside, other=0)
                tl.store(table + number.to(tl.int64) * table_row + place, copied, mask=inside)
        return
    seat = tl.arange(0, BLOCK_B)
    exists = seat < num_requests
    slot = tl.load(slots + seat, mask=exists, other=null_slot)
    known = tl.load(pending + seat, mask=exists, other=0)
    taken = known > 0
    says = tl.load(emits + seat, mask=exists, other=0) > 0
    start = tl.where(taken, tl.load(seen + slot), 0)
    if MISSED:
        known = tl.load(computed + slot) - start
    drafts = tl.minimum(tl.load(draft_count + slot), tl.load(allowed + seat, mask=exists, other=0))
    drafts = tl.where(says, drafts, 0).to(tl.int32)
    count = tl.where(taken, known.to(tl.int32) + drafts, 0)
    ends = tl.cumsum(count, 0)
    wanted = tl.where(says, 1 + drafts, 0)
    judged_ends = tl.cumsum(wanted, 0)
    if number == 0:
        tl.store(query_start + seat, ends - count, mask=exists)
        tl.store(query_start + 1 + seat, ends, mask=seat == num_requests - 1)
        tl.store(judged_start + seat, judged_ends - wanted, mask=exists)
        tl.store(judged_start + 1 + seat, judged_ends, mask=seat == num_requests - 1)
        tl.store(starts + seat, start, mask=exists)
        tl.store(num_rows + seat, count.to(tl.int64), mask=exists)
        tl.store(num_drafts + seat, drafts.to(tl.int64), mask=exists)
        tl.store(emits_out + seat, says, mask=exists)
    at = number * ROWS + tl.arange(0, ROWS)
    fits, inside = at < total, at < tl.max(ends)
    owner, first = _owner(ends, at, num_requests)
    own_slot = tl.where(inside, tl.load(slots + owner), null_slot)
    index = tl.where(inside, tl.load(seen + own_slot) + at - first, 0)
    page = tl.load(page_table + own_slot * table_row + index // page_size, mask=fits & inside, other=0).to(tl.int64)
    token = tl.load(tokens + own_slot * tokens_row + index, mask=fits & inside, other=0)
    tl.store(input_ids + at, token, mask=fits)
    tl.store(indices + at, index, mask=fits)
    tl.store(requests + at, owner.to(tl.int64), mask=fits)
    tl.store(row_slots + at, own_slot, mask=fits)
    tl.store(locations + at, page * page_size + index % page_size, mask=fits)
    if number * ROWS < num_judged:
        owner, first = _owner(judged_ends, at, num_requests)
        is_owner = seat[None, :] == owner[:, None]
        row = tl.sum(tl.where(is_owner, (ends - 1 - drafts)[None, :], 0), 1) + at - first
        place = tl.sum(tl.where(is_owner, (start + count - drafts)[None, :], 0), 1) + at - first
        real, fits = at < tl.max(judged_ends), at < num_judged
        tl.store(judged + at, tl.where(real, row, 0).to(tl.int64), mask=fits)
        tl.store(judged_slots + at, tl.where(real, tl.load(slots + owner), null_slot), mask=fits)
        tl.store(judged_next + at, tl.where(real, place, 1), mask=fits)


def lay_out(
    seats: Seats,
    shape: RoundShape,
    state: SlotState,
    pages: tuple[Tensor, int],
    *,
    missed: bool = False,
    out: Layout | None = None,
) -> Layout:
    page_table, page_size = pages
    slots, count, total = seats.slots, shape.num_seats, shape.num_rows
    early, block_b = launch.early(slots), triton.next_power_of_2(count)
    layout = Layout.empty(shape, page_table) if out is None else out
    rows = layout.rows
    block = _rows_per_program(block_b)
    _lay_out[(max(triton.cdiv(total, block), triton.cdiv(shape.num_judged, block), count), 2)](
        slots, seats.pending, seats.allowed, seats.emits, state.tokens, state.followed if missed else state.computed,
        state.computed, state.draft_count, page_table,
        rows.query_start, rows.input_ids, rows.indices, rows.request, rows.row_slots, rows.locations,
        layout.starts, layout.num_rows, layout.num_drafts, layout.emits, layout.judged, layout.judged_slots,
        layout.judged_next, layout.judged_start, layout.page_table,
        state.tokens.stride(0), page_table.shape[1], page_size, count, total, shape.num_judged, state.null_slot,
        MISSED=missed, ROWS=block, BLOCK_B=block_b, BLOCK=BLOCK, EARLY=early, num_warps=4, **launch.options(early),
    )  # fmt: skip
    return layout


def _new_rows(slots: Tensor, total: int) -> Rows:
    input_ids, indices, request, row_slots, locations = (slots.new_empty(total) for _ in range(5))
    query_start = slots.new_empty(len(slots) + 1, dtype=torch.int32)
    return Rows(query_start, input_ids, indices, request, row_slots, locations)


def _rows_per_program(block_b: int) -> int:
    return max(min(PAIRS // block_b, 64), 16)


@launch.jit_for_any_size
def _judge(
    choice, input_ids, slots, emits, query_start, judged_start, num_drafts, starts,
    tokens, lengths, computed, kept_state, chosen_out, count_out, kept_out,
    tokens_row, width, BLOCK_W: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    launch.await_last(EARLY)
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request)
    says = tl.load(emits + request) != 0
    drafts = tl.load(num_drafts + request)
    end = tl.load(query_start + request + 1).to(tl.int64)
    num_rows = end - tl.load(query_start + request)
    column = tl.arange(0, BLOCK_W)
    last = tl.where(says, drafts, -1)  # of its judged rows
    chosen = tl.load(choice + tl.load(judged_start + request) + column, mask=column <= last, other=0)
    draft = tl.load(input_ids + end - drafts + column, mask=column < last, other=-1)
    differs = (chosen != draft) | (column >= drafts)
    accepted = tl.min(tl.where(differs, column, BLOCK_W)).to(tl.int64)
    count = tl.where(says, accepted + 1, 0)
    kept = tl.where(says, num_rows - drafts + accepted, num_rows)
    length = tl.load(lengths + slot)
    tl.store(tokens + slot * tokens_row + length + column, chosen, mask=column < count)
    tl.store(lengths + slot, length + count)
    tl.store(computed + slot, tl.load(starts + request) + kept)
    tl.store(kept_state + slot, kept - (num_rows - drafts))
    tl.store(chosen_out + request * width + column, chosen, mask=column < width)
    tl.store(count_out + request, count)
    tl.store(kept_out + request, kept)


def judge(step: Step, choice: Tensor, out: Verdict | None = None) -> Verdict:
    state, batch, early = step.state, step.batch, launch.early(choice)
    num_requests, width = len(batch.slots), 1 + step.shape.max_drafts
    choice = choice.contiguous() if len(choice) else choice.new_zeros(1)
    if out is None:
        count, kept = torch.empty_like(step.starts), torch.empty_like(step.starts)
        out = Verdict(choice.new_empty(num_requests, width), count, kept)
    _judge[(num_requests,)](
        choice, batch.input_ids, batch.slots, step.emits, batch.query_start, step.judged_start, step.num_drafts,
        step.starts, state.tokens, state.lengths, state.computed, state.kept_state, out.tokens, out.count,
        out.kept, state.tokens.stride(0), width,
        BLOCK_W=triton.next_power_of_2(width), EARLY=early, num_warps=1, **launch.options(early),
    )  # fmt: skip
    return out


@launch.jit_for_any_size
def _extension_rows(
    slots, starts, num_rows, old_start, lengths, tokens, page_table,
    new_start, requests, row_slots, indices, positions, input_ids, locations, last,
    tokens_row, table_row, page_size, num_requests, total, last_index, null_slot, first_key, lag, back, extra,
    ROWS: tl.constexpr, BLOCK_B: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    launch.await_last(EARLY)
    more = 1 + back + extra
    seat = tl.arange(0, BLOCK_B)
    exists = seat < num_requests
    begins = tl.load(old_start + seat, mask=exists, other=0) + more * seat
    ends = tl.load(old_start + 1 + seat, mask=exists, other=1 << 29) + more * (seat + 1)
    if tl.program_id(0) == 0:
        tl.store(new_start + seat, begins, mask=exists)
        tl.store(new_start + 1 + seat, ends, mask=seat == num_requests - 1)
        slot = tl.load(slots + seat, mask=exists, other=null_slot)
        newest = tl.load(lengths + slot) - 1 - tl.load(starts + seat, mask=exists, other=0)
        newest = tl.minimum(newest, tl.load(num_rows + seat, mask=exists, other=0))
        tl.store(last + seat, begins + back + newest, mask=exists)
    at = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    fits = at < total
    owner, first = _owner(ends, at, num_requests)
    inside = at < tl.max(tl.where(exists, ends, 0))
    slot = tl.where(inside, tl.load(slots + owner), null_slot)
    place = tl.load(starts + owner) - back + at - first
    known = inside & (place >= first_key) & (place < tl.load(lengths + slot) + extra)
    index = tl.where(inside, tl.minimum(tl.maximum(place, 0), last_index), 0)
    page_at = page_table + owner.to(tl.int64) * table_row + index // page_size
    page = tl.load(page_at, mask=fits & known, other=0).to(tl.int64)
    tl.store(requests + at, owner.to(tl.int64), mask=fits)
    tl.store(row_slots + at, slot, mask=fits)
    tl.store(indices + at, index, mask=fits)
    tl.store(positions + at, tl.maximum(index - lag, 0), mask=fits)
    tl.store(input_ids + at, tl.load(tokens + slot * tokens_row + index, mask=fits, other=0), mask=fits)
    tl.store(locations + at, page * page_size + index % page_size, mask=fits)


def extension_rows(step: Step, catching: Catching) -> tuple[Rows, Tensor, Tensor]:
    batch, state, early = step.batch, step.state, launch.early(step.starts)
    num_requests = len(batch.slots)
    total = len(batch.input_ids) + catching.more * num_requests
    rows, positions, last = _new_rows(batch.slots, total), batch.slots.new_empty(total), torch.empty_like(batch.slots)
    block_b = triton.next_power_of_2(num_requests)
    block = _rows_per_program(block_b)
    _extension_rows[(triton.cdiv(total, block),)](
        batch.slots, step.starts, step.num_rows, batch.query_start, state.lengths, state.tokens, batch.page_table,
        rows.query_start, rows.request, rows.row_slots, rows.indices, positions, rows.input_ids, rows.locations,
        last, state.tokens.stride(0), batch.page_table.stride(0), batch.page_size, num_requests, total,
        state.tokens.shape[1] - 1, state.null_slot, catching.first_key, catching.lag, catching.back,
        catching.extra,
        ROWS=block, BLOCK_B=block_b, EARLY=early, num_warps=4, **launch.options(early),
    )  # fmt: skip
    return rows, positions, last


@launch.jit_for_any_size
def _write_outcome(
    slots, lengths, tokens, computed, followed, draft_count, judged, count, kept, predicted, choice, draft, made,
    num_forced, forced, number, table, tokens_row, forced_row, draft_row, draft_column, width, depth, most, columns,
    room, NUM_ROUNDS: tl.constexpr,
    HAS_DRAFT: tl.constexpr, HAS_PREDICTED: tl.constexpr, HAS_FORCED: tl.constexpr, FOLLOWS: tl.constexpr,
    COUNTS: tl.constexpr, BLOCK_W: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`most`: tokens that a grammar may put into a draft; `room`: for each of NUM_ROUNDS outcomes."""
    launch.await_last(EARLY)
    request = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + request)
    row = table + request * columns
    if NUM_ROUNDS > 0:
        row += (tl.load(number) % NUM_ROUNDS) * room
    place = tl.arange(0, BLOCK_W)
    drafted = tl.full((), 0, dtype=tl.int64)
    is_predicted, is_forced = tl.full((), 0, dtype=tl.int64), tl.full((), 0, dtype=tl.int64)
    said = tl.load(count + request)
    chosen = tl.load(choice + request * width + place, mask=place < width, other=0)
    if HAS_PREDICTED:
        is_predicted = tl.load(predicted + request).to(tl.int64)
    if HAS_DRAFT:
        drafted = tl.load(made + request).to(tl.int64)
        token = tl.load(draft + request * draft_row + place * draft_column, mask=place < depth, other=0)
        if HAS_FORCED:
            left = tl.load(num_forced + request * forced_row).to(tl.int64) - said
            left = tl.minimum(left, most)
            if (left > 0) & (said > 0) & (is_predicted == 0):
                own = forced + request * forced_row + place
                begun = tl.load(own, mask=place < said, other=0).to(tl.int64)
                if tl.sum(((place < said) & (begun != chosen)).to(tl.int32)) == 0:
                    is_forced = tl.full((), 1, dtype=tl.int64)
                    next_one = tl.load(own + said, mask=place < left, other=0).to(tl.int64)
                    differs = tl.sum(((place < left) & (next_one != token)).to(tl.int32)) > 0
                    if differs | (drafted < left):
                        token = tl.where(place < left, next_one, token)
                        drafted = left
        tl.store(tokens + slot * tokens_row + tl.load(lengths + slot) + place, token, mask=place < drafted)
        tl.store(row + COUNTS + width + place, token, mask=place < depth)
    tl.store(draft_count + slot, drafted)
    if FOLLOWS:
        tl.store(followed + slot, tl.load(computed + slot))
    tl.store(row, tl.load(judged + request))
    tl.store(row + 1, drafted)
    tl.store(row + 2, said)
    tl.store(row + 3, tl.load(kept + request))
    tl.store(row + 4, is_predicted)
    tl.store(row + 5, is_forced)
    tl.store(row + COUNTS + place, chosen, mask=place < width)


def write_outcome(step: Step, verdict: Verdict, draft: Draft | None, mail: Mail | None = None) -> Tensor:
    state, early, guidance = step.state, launch.early(step.starts), step.guidance
    num_requests, width = verdict.tokens.shape
    depth = 0 if draft is None else draft.tokens.shape[1]
    predicted = None if draft is None else draft.predicted
    columns, none = NUM_COUNTS + width + depth, verdict.count
    table = verdict.tokens.new_empty(num_requests, columns) if mail is None else mail.tables(num_requests, columns)
    _write_outcome[(num_requests,)](
        step.batch.slots, state.lengths, state.tokens, state.computed, state.followed, state.draft_count,
        step.num_drafts, verdict.count, verdict.kept, none if predicted is None else predicted, verdict.tokens,
        none if draft is None else draft.tokens, none if draft is None else draft.count,
        none if guidance is None else guidance.num_forced, none if guidance is None else guidance.forced,
        none if mail is None else mail.number, table,
        state.tokens.stride(0), 0 if guidance is None else guidance.forced.stride(0),
        *((0, 0) if draft is None else draft.tokens.stride()), width, depth, min(step.depth, depth), columns,
        0 if mail is None else mail.outcomes.stride(0), NUM_ROUNDS=0 if mail is None else len(mail.outcomes),
        HAS_DRAFT=draft is not None, HAS_PREDICTED=predicted is not None, HAS_FORCED=guidance is not None,
        FOLLOWS=not step.shape.rests, COUNTS=NUM_COUNTS, BLOCK_W=triton.next_power_of_2(max(width, depth)),
        EARLY=early, num_warps=1, **launch.options(early),
    )  # fmt: skip
    return table
