"""The operations of a round on a CPU, in C: what takes dozens of small torch operations is one call."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from outrider.kernels.lookup import Lookup
from outrider.kernels.native import _address, _native
from outrider.types import Batch, Draft, RoundShape, Seats, SlotState, Step, Verdict

_LAY_OUT = struct.Struct("@24q 8q")  # the work structures of round.c
_JUDGE = struct.Struct("@15q 3q")
_OUTCOME = struct.Struct("@15q 6q")
_EXTENSION = struct.Struct("@14q 10q")
_KEEP_TAPS = struct.Struct("@5q 7q 4q")
_KEEP_MISSED = struct.Struct("@4q 3q")
_SHIFT_TAPS = struct.Struct("@5q 4q 2q")
_ROWS_AHEAD = struct.Struct("@6q 4q")
_LOOKUP = struct.Struct("@5q 6q")


def _whole(tensor: Tensor) -> int:
    return _address(tensor, torch.int64)


def _small(tensor: Tensor) -> int:
    return _address(tensor, torch.int32)


def _flags(tensor: Tensor) -> int:
    return _address(tensor, torch.bool)


def lay_out(
    seats: Seats, shape: RoundShape, state: SlotState, pages: tuple[Tensor, int], *, missed: bool
) -> tuple[Tensor, tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
    """query_start; input_ids, indices, request, row_slots, locations; starts, num_rows, num_drafts, emits, judged,
    judged_slots, judged_next, judged_start; page_table. See kernels/round.py."""
    page_table, page_size = pages
    count, total, long = shape.num_seats, shape.num_rows, torch.int64
    rows, each = torch.empty(5, total, dtype=long), torch.empty(3, count, dtype=long)
    starts = torch.empty(2, count + 1, dtype=torch.int32)
    emits, judged = torch.empty(count, dtype=torch.bool), torch.empty(3, shape.num_judged, dtype=long)
    table = page_table.new_empty(count, page_table.shape[1])
    query_start, judged_start = starts.unbind()
    work = _LAY_OUT.pack(
        *map(_whole, (seats.slots, seats.pending, seats.allowed, seats.emits, state.tokens)),
        _whole(state.followed if missed else state.computed),
        *map(_whole, (state.computed, state.draft_count)),
        _small(page_table),
        _small(query_start),
        *map(_whole, rows.unbind()),
        *map(_whole, each.unbind()),
        _flags(emits),
        *map(_whole, judged.unbind()),
        _small(judged_start),
        _small(table),
        *(state.tokens.shape[1], page_table.shape[1], page_size, count, total, shape.num_judged),
        *(state.null_slot, int(missed)),
    )
    _native().lay_out(work)
    return query_start, rows.unbind(), (*each.unbind(), emits, *judged.unbind(), judged_start), table


def judge(step: Step, choice: Tensor) -> Verdict:
    state, batch = step.state, step.batch
    num_requests, width = len(batch.slots), 1 + step.shape.max_drafts
    count, kept = torch.empty(2, num_requests, dtype=torch.int64).unbind()
    chosen = torch.empty(num_requests, width, dtype=torch.int64)
    choice = choice.contiguous()
    work = _JUDGE.pack(
        *map(_whole, (choice, batch.input_ids, batch.slots)),
        _flags(step.emits),
        *map(_small, (batch.query_start, step.judged_start)),
        *map(_whole, (step.num_drafts, step.starts, state.tokens, state.lengths, state.computed, state.kept_state)),
        *map(_whole, (chosen, count, kept)),
        *(state.tokens.shape[1], width, num_requests),
    )
    _native().judge(work)
    return Verdict(chosen, count, kept)


def write_outcome(step: Step, verdict: Verdict, draft: Draft | None, num_counts: int) -> Tensor:
    state, slots = step.state, step.batch.slots
    num_requests, width = verdict.tokens.shape
    tokens = draft.tokens.contiguous() if draft is not None else None
    made = draft.count.contiguous() if draft is not None else None
    flags = (None, None) if draft is None else (draft.predicted, draft.forced)
    depth = 0 if tokens is None else tokens.shape[1]
    outcomes = torch.empty(num_requests, num_counts + width + depth, dtype=torch.int64)
    given = (slots, state.lengths, state.computed, step.num_drafts, verdict.count, verdict.kept)
    work = _OUTCOME.pack(
        *map(_whole, given),
        *(0 if flag is None else _flags(flag) for flag in flags),
        _whole(verdict.tokens),
        0 if tokens is None else _whole(tokens),
        0 if made is None else _whole(made),
        *map(_whole, (state.tokens, state.followed, state.draft_count, outcomes)),
        *(state.tokens.shape[1], width, depth, int(not step.shape.rests), num_counts, num_requests),
    )
    _native().write_outcome(work)
    return outcomes


def extension_rows(step: Step, more: int, *, first_key: int, back: int, extra: int) -> tuple[Tensor, ...]:
    """query_start; input_ids, indices, request, row_slots, locations; last. See kernels/round.py."""
    batch, state, count = step.batch, step.state, len(step.batch.slots)
    total = len(batch.input_ids) + more * count
    rows, last = torch.empty(5, total, dtype=torch.int64), torch.empty(count, dtype=torch.int64)
    query_start = torch.empty(count + 1, dtype=torch.int32)
    work = _EXTENSION.pack(
        *map(_whole, (batch.slots, step.starts, step.num_rows, state.lengths, state.tokens)),
        *map(_small, (batch.query_start, batch.page_table, query_start)),
        *map(_whole, (*rows.unbind(), last)),
        *(state.tokens.shape[1], batch.page_table.shape[1], batch.page_size, count, total),
        *(state.tokens.shape[1] - 1, state.null_slot, first_key, back, extra),
    )
    _native().extension_rows(work)
    return (query_start, *rows.unbind(), last)


def _tap_source(step: Step, taps: Tensor, carried: Tensor) -> tuple[int, ...]:
    """tap_source of round.c."""
    size = taps.shape[1] * taps.shape[2]
    return _address(taps), _address(carried), _small(step.batch.query_start), size, carried.shape[1]


def keep_taps(step: Step, taps: Tensor, carried: Tensor, verdict: Verdict, kept: tuple[Tensor, Tensor]) -> None:
    batch, (carry, tails) = step.batch, kept
    work = _KEEP_TAPS.pack(
        *_tap_source(step, taps, carried),
        *map(_whole, (batch.slots, step.starts, verdict.kept, batch.indices)),
        _small(batch.page_table),
        _address(carry),
        _address(tails),
        *(batch.page_table.shape[1], batch.page_size, tails.shape[1], len(batch.slots)),
    )
    _native().keep_taps(work)


def keep_missed(batch: Batch, taps: Tensor, missed: Tensor) -> None:
    size = taps.shape[1] * taps.shape[2]
    rows = map(_whole, (batch.row_slots, batch.indices))
    _native().keep_missed(_KEEP_MISSED.pack(_address(taps), *rows, _address(missed), len(taps), size, missed.shape[1]))


def shift_taps(step: Step, taps: Tensor, carried: Tensor, rows: Batch, back: int) -> Tensor:
    out = taps.new_empty(len(rows.request), *taps.shape[1:])
    work = _SHIFT_TAPS.pack(
        *_tap_source(step, taps, carried),
        *map(_whole, (step.num_rows, rows.request)),
        _small(rows.query_start),
        _address(out),
        *(back, len(out)),
    )
    _native().shift_taps(work)
    return out


def rows_ahead(step: Step, depth: int) -> tuple[Tensor, Tensor]:
    """indices and write locations [depth, B]."""
    batch, state, count = step.batch, step.state, len(step.batch.slots)
    indices, locations = torch.empty(2, depth, count, dtype=torch.int64).unbind()
    work = _ROWS_AHEAD.pack(
        *map(_whole, (batch.slots, state.lengths)),
        _flags(step.emits),
        _small(batch.page_table),
        *map(_whole, (indices, locations)),
        *(batch.page_table.shape[1], batch.page_size, depth, count),
    )
    _native().rows_ahead(work)
    return indices, locations


def lookup(tokens: Tensor, slots: Tensor, lengths: Tensor, how: Lookup) -> tuple[Tensor, Tensor]:
    """What followed [B, room], and how many of them are proposed [B]; what stands behind those means nothing."""
    found, counts = tokens.new_empty(len(slots), how.room), torch.empty_like(lengths)
    sizes = how.depth, how.room, how.shortest, how.longest
    work = _LOOKUP.pack(*map(_whole, (tokens, slots, lengths, found, counts)), tokens.shape[1], len(slots), *sizes)
    _native().lookup(work)
    return found, counts
