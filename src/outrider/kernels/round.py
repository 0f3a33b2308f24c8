"""What a round does beside its networks: rows are laid out, drafts are judged, tokens and taps are kept, the outcome is
written down for the host. No operation asks the host anything, so that a round can be recorded and replayed."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels import native_round
from outrider.kernels.dispatch import use_native_round, use_triton
from outrider.kernels.mail import Mail
from outrider.types import NULL_PAGE, Draft, Outcome, RoundShape, Seats, SlotState, Step, Verdict

NUM_COUNTS = 6  # numbers of an outcome that come before its tokens


@dataclass(frozen=True)
class Rows:
    """The rows of a pass, request after request; those left over only fill up a fixed size, and are written nowhere."""

    query_start: Tensor  # [B + 1] int32
    input_ids: Tensor  # [T]
    indices: Tensor  # [T] cache indices
    request: Tensor  # [T]
    row_slots: Tensor  # [T]
    locations: Tensor  # [T] page * page_size + offset


@dataclass(frozen=True)
class Layout:
    """A round as laid out: its rows, and what is judged. See Step."""

    rows: Rows
    page_table: Tensor  # [B, M]
    starts: Tensor  # [B]
    num_rows: Tensor  # [B]
    num_drafts: Tensor  # [B]
    emits: Tensor  # [B] bool
    judged: Tensor  # [L]
    judged_slots: Tensor  # [L]
    judged_next: Tensor  # [L]
    judged_start: Tensor  # [B + 1] int32

    @classmethod
    def empty(cls, shape: RoundShape, page_table: Tensor) -> Layout:
        """Room for a round of these sizes, for requests with rows in this page table."""

        def new(*size: int, dtype: torch.dtype = torch.long) -> Tensor:
            return page_table.new_empty(size, dtype=dtype)

        count, total = shape.num_seats, shape.num_rows
        return cls(
            rows=Rows(new(count + 1, dtype=torch.int32), *(new(total) for _ in range(5))),
            page_table=new(count, page_table.shape[1], dtype=page_table.dtype),
            starts=new(count),
            num_rows=new(count),
            num_drafts=new(count),
            emits=new(count, dtype=torch.bool),
            judged=new(shape.num_judged),
            judged_slots=new(shape.num_judged),
            judged_next=new(shape.num_judged),
            judged_start=new(count + 1, dtype=torch.int32),
        )

    def within(self, shape: RoundShape) -> Layout:
        """The first part of this room, for a smaller round."""
        count, total, rows = shape.num_seats, shape.num_rows, self.rows
        whole = (rows.input_ids, rows.indices, rows.request, rows.row_slots, rows.locations)
        return Layout(
            rows=Rows(rows.query_start[: count + 1], *(each[:total] for each in whole)),
            page_table=self.page_table[:count],
            starts=self.starts[:count],
            num_rows=self.num_rows[:count],
            num_drafts=self.num_drafts[:count],
            emits=self.emits[:count],
            judged=self.judged[: shape.num_judged],
            judged_slots=self.judged_slots[: shape.num_judged],
            judged_next=self.judged_next[: shape.num_judged],
            judged_start=self.judged_start[: count + 1],
        )

    def copy_from(self, other: Layout) -> Layout:
        for name, value in vars(other).items():
            if name != "rows":
                vars(self)[name].copy_(value)
        for name, value in vars(other.rows).items():
            vars(self.rows)[name].copy_(value)
        return self


def lay_out(
    seats: Seats,
    shape: RoundShape,
    state: SlotState,
    pages: tuple[Tensor, int],
    *,
    missed: bool = False,
    out: Layout | None = None,
) -> Layout:
    """Every seat's rows: known tokens from where its cache ends, then as many drafts as there are and may be judged.
    `pages`: the page table [S, M] and the page size. `missed`: the rows that the drafter has not seen yet instead.
    `out`: where to put them."""
    if use_triton(seats.slots):
        from outrider.kernels.gpu import round as gpu

        return gpu.lay_out(seats, shape, state, pages, missed=missed, out=out)
    if use_native_round(seats.slots):
        start, rows, each, table = native_round.lay_out(seats, shape, state, pages, missed=missed)
        found = Layout(Rows(start, *rows), table, *each)
    else:
        found = lay_out_reference(seats, shape, state, pages, missed=missed)
    return found if out is None else out.copy_from(found)


def lay_out_reference(
    seats: Seats, shape: RoundShape, state: SlotState, pages: tuple[Tensor, int], *, missed: bool
) -> Layout:
    page_table, page_size = pages
    slots, taken, emits = seats.slots, seats.pending > 0, seats.emits > 0
    starts = torch.where(taken, (state.followed if missed else state.computed)[slots], 0)
    pending = state.computed[slots] - starts if missed else seats.pending
    num_drafts = torch.where(emits, torch.minimum(state.draft_count[slots], seats.allowed), 0)
    num_rows = torch.where(taken, pending + num_drafts, 0)
    query_start = _starts(num_rows)
    request, offset, inside = _owners(query_start, shape.num_rows)
    indices = torch.where(inside, starts[request] + offset, 0)
    row_slots = torch.where(inside, slots[request], state.null_slot)
    table = page_table[slots]
    page = torch.where(inside, table[request, indices // page_size], NULL_PAGE).long()
    rows = Rows(
        query_start=query_start.int(),
        input_ids=torch.where(inside, state.tokens[row_slots, indices], 0),
        indices=indices,
        request=request,
        row_slots=row_slots,
        locations=page * page_size + indices % page_size,
    )
    judged_start = _starts(torch.where(emits, 1 + num_drafts, 0))
    owner, place, real = _owners(judged_start, shape.num_judged)
    judged = torch.where(real, query_start[1:][owner] - 1 - num_drafts[owner] + place, 0)
    judged_slots = torch.where(real, slots[owner], state.null_slot)
    judged_next = torch.where(real, (starts + num_rows - num_drafts)[owner] + place, 1)
    return Layout(
        rows, table, starts, num_rows, num_drafts, emits, judged, judged_slots, judged_next, judged_start.int()
    )


def _starts(counts: Tensor) -> Tensor:
    """Where each of several runs begins, and where the last one ends: [B] -> [B + 1]."""
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0))


def _owners(starts: Tensor, total: int) -> tuple[Tensor, Tensor, Tensor]:
    """Of `total` places: which run each belongs to, its place within the run, and whether it belongs to one at all.
    Those behind the last run are said to be the last one's."""
    place = torch.arange(total, device=starts.device)
    run = torch.searchsorted(starts[1:], place, right=True).clamp(max=len(starts) - 2)
    return run, place - starts[run], place < starts[-1]


def agree(choice: Tensor, draft: Tensor, num_drafts: Tensor) -> Tensor:
    """How many draft tokens are accepted: the longest prefix that equals the target's choices.

    choice [B, K + 1], draft [B, K], num_drafts [B] -> [B]
    """
    column = torch.arange(draft.shape[1], device=draft.device)
    same = (choice[:, :-1] == draft) & (column < num_drafts[:, None])
    return same.long().cumprod(dim=1).sum(dim=1)


def judge(step: Step, choice: Tensor, out: Verdict | None = None) -> Verdict:
    """Verification by agreement: a draft token stands if and only if it is the token the target chooses itself. What
    stands is committed: tokens are appended, lengths move. choice [L]: the target's token after each judged row.
    `out`: where to put the verdict."""
    if use_triton(choice):
        from outrider.kernels.gpu import round as gpu

        return gpu.judge(step, choice, out)
    found = native_round.judge(step, choice) if use_native_round(choice) else judge_reference(step, choice)
    if out is None:
        return found
    for name, value in vars(found).items():
        vars(out)[name].copy_(value)
    return out


def judge_reference(step: Step, choice: Tensor) -> Verdict:
    batch, state, slots = step.batch, step.state, step.batch.slots
    column = torch.arange(1 + step.shape.max_drafts, device=choice.device)
    mine = step.emits[:, None] & (column <= step.num_drafts[:, None])
    place = torch.where(mine, step.judged_start[:-1, None] + column, 0)
    tokens = torch.where(mine, choice[place], 0) if len(choice) else torch.zeros_like(place)
    first = batch.query_start[1:] - 1 - step.num_drafts  # the row of the last known token
    row = torch.where(column[1:] <= step.num_drafts[:, None], first[:, None] + column[1:], 0)
    accepted = agree(tokens, batch.input_ids[row], step.num_drafts)
    count = torch.where(step.emits, accepted + 1, 0)
    kept = step.num_rows - torch.where(step.emits, step.num_drafts - accepted, 0)
    lengths = state.lengths[slots]
    dump = state.tokens.shape[1] - 1
    state.tokens[slots[:, None], torch.where(column < count[:, None], lengths[:, None] + column, dump)] = tokens
    state.lengths[slots] = lengths + count
    state.computed[slots] = step.starts + kept
    state.kept_state[slots] = kept - (step.num_rows - step.num_drafts)
    return Verdict(tokens, count, kept)


@dataclass(frozen=True)
class Catching:
    """How a drafter's rows differ from the target's; see drafters/base.py, extend()."""

    first_key: int = 0
    lag: int = 0
    back: int = 0
    extra: int = 0

    @property
    def more(self) -> int:
        """Rows of each request beyond those of the pass."""
        return 1 + self.back + self.extra


def extension_rows(step: Step, catching: Catching) -> tuple[Rows, Tensor, Tensor]:
    """One row for every token of the pass and `more` of every request: cache indices start - back ..., those of the
    tokens `lag` places before, and which row is each request's newest token [B]."""
    if use_triton(step.starts):
        from outrider.kernels.gpu import round as gpu

        return gpu.extension_rows(step, catching)
    if use_native_round(step.starts):
        *rows, last = native_round.extension_rows(
            step, catching.more, first_key=catching.first_key, back=catching.back, extra=catching.extra
        )
        return Rows(*rows), _lagging(rows[2], catching.lag), last
    return extension_rows_reference(step, catching)


def _lagging(indices: Tensor, lag: int) -> Tensor:
    return (indices - lag).clamp(min=0) if lag else indices


def extension_rows_reference(step: Step, catching: Catching) -> tuple[Rows, Tensor, Tensor]:
    batch, state, back, more = step.batch, step.state, catching.back, catching.more
    num_requests = len(batch.slots)
    query_start = batch.query_start.long() + more * torch.arange(num_requests + 1, device=batch.slots.device)
    request, offset, inside = _owners(query_start, len(batch.input_ids) + more * num_requests)
    places = step.starts[request] - back + offset
    lengths = state.lengths[batch.slots]
    known = inside & (places >= catching.first_key) & (places < lengths[request] + catching.extra)
    # rows before the text, or beyond all room, are not written
    indices = torch.where(inside, places.clamp(0, state.tokens.shape[1] - 1), 0)
    row_slots = torch.where(inside, batch.slots[request], state.null_slot)
    page = batch.page_table[request, indices // batch.page_size].long()
    rows = Rows(
        query_start=query_start.int(),
        input_ids=state.tokens[row_slots, indices],
        indices=indices,
        request=request,
        row_slots=row_slots,
        locations=torch.where(known, page, NULL_PAGE) * batch.page_size + indices % batch.page_size,
    )
    last = query_start[:-1] + back + torch.minimum(lengths - 1 - step.starts, step.num_rows)
    return rows, _lagging(indices, catching.lag), last


def with_forced(step: Step, verdict: Verdict, draft: Draft) -> Draft:
    """The draft, but where a grammar forces what comes next, that: unless the draft says the same and more. What is
    forced was foreseen before the verdict, and counts if the verdict begins it."""
    if step.guidance is None:
        return draft
    said, depth = verdict.count, min(step.depth, draft.tokens.shape[1])
    forced, num_left = step.guidance.forced.long(), (step.guidance.num_forced - said).clamp(0, depth)
    place, ahead = (torch.arange(size, device=said.device) for size in (verdict.tokens.shape[1], depth))
    begun = ((verdict.tokens == forced[:, : len(place)]) | (place >= said[:, None])).all(1)
    counts = begun & (said > 0) & (num_left > 0)
    if draft.predicted is not None:
        counts &= ~draft.predicted
    next_ones = forced.gather(1, (said[:, None] + ahead).clamp(max=forced.shape[1] - 1))
    inside = ahead < num_left[:, None]
    agrees = ((draft.tokens[:, :depth] == next_ones) | ~inside).all(1) & (draft.count >= num_left)
    replaced = counts & ~agrees
    tokens = draft.tokens.clone()
    tokens[:, :depth] = torch.where(replaced[:, None] & inside, next_ones, tokens[:, :depth])
    return Draft(tokens, torch.where(replaced, num_left, draft.count), draft.predicted, counts)


def write_outcome(step: Step, verdict: Verdict, draft: Draft | None, mail: Mail | None = None) -> Tensor:
    """Keeps the draft, or what a grammar forces instead, right behind the committed tokens, where the next round finds
    both with one gather, notes how much of the text the drafter has seen, and writes down what the host must know,
    [B, NUM_COUNTS + J + K]; read_outcome() reads a row of it. `mail`: where the outcome goes; then [R, B, ...]."""
    if use_triton(step.starts):
        from outrider.kernels.gpu import round as gpu

        return gpu.write_outcome(step, verdict, draft, mail)
    if use_native_round(step.starts):
        draft = None if draft is None else with_forced(step, verdict, draft)
        found = native_round.write_outcome(step, verdict, draft, NUM_COUNTS)
    else:
        found = write_outcome_reference(step, verdict, draft)
    return found if mail is None else mail.put(found)


def write_outcome_reference(step: Step, verdict: Verdict, draft: Draft | None) -> Tensor:
    state, slots = step.state, step.batch.slots
    none = torch.zeros_like(verdict.count)
    draft = None if draft is None else with_forced(step, verdict, draft)
    made = none if draft is None else draft.count
    predicted = none if draft is None or draft.predicted is None else draft.predicted.long()
    forced = none if draft is None or draft.forced is None else draft.forced.long()
    counts = torch.stack([step.num_drafts, made, verdict.count, verdict.kept, predicted, forced], dim=1)
    state.draft_count[slots] = made
    if not step.shape.rests:
        state.followed[slots] = state.computed[slots]
    if draft is None:
        return torch.cat([counts, verdict.tokens], dim=1)
    column = torch.arange(draft.tokens.shape[1], device=slots.device)
    dump = state.tokens.shape[1] - 1
    place = torch.where(column < made[:, None], state.lengths[slots][:, None] + column, dump)
    state.tokens[slots[:, None], place] = draft.tokens
    return torch.cat([counts, verdict.tokens, draft.tokens], dim=1)


def read_outcome(row: list[int], shape: RoundShape) -> Outcome:
    """What a row of write_outcome() says."""
    num_judged, num_drafts, count, kept, predicted, forced = row[:NUM_COUNTS]
    tokens, drafts = row[NUM_COUNTS:], row[NUM_COUNTS + 1 + shape.max_drafts :]
    return Outcome(num_judged, tokens[:count], kept, drafts[:num_drafts], bool(predicted), bool(forced))
