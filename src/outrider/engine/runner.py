"""Packs a round into tensors. Lengths, tokens and page tables are read on the device; only sizes come from the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.engine.cache import Cache
from outrider.engine.options import Options, SamplingNeeds
from outrider.engine.request import Work
from outrider.kernels.round import Layout, lay_out
from outrider.types import Batch, Recurrence, RoundShape, Sampling, Seats, Step

if TYPE_CHECKING:
    from outrider.engine.orders import Orders


def exact_shape(plan: Sequence[Work], depth: int, *, rests: bool = False) -> RoundShape:
    """The sizes of a round that has room for these and nothing else."""
    return RoundShape(
        num_seats=len(plan),
        num_rows=sum(work.num_rows for work in plan),
        num_judged=sum(1 + work.allowed for work in plan if work.emits),
        max_drafts=max(work.allowed for work in plan),
        depth=depth,
        max_rows=max(work.num_rows for work in plan),
        max_len=max(work.end for work in plan),
        rests=rests,
        misses=any(work.request.is_followed for work in plan),
        judges_all=all(work.is_round for work in plan),
    )


class Runner:
    def __init__(self, cache: Cache, vocab_size: int, device: torch.device) -> None:
        self.cache = cache
        self.vocab_size = vocab_size
        self.device = device
        self.options = Options(cache.shape.num_slots, vocab_size, device)
        self.orders: Orders | None = None  # to other ranks, where there are some

    def seat_table(self, plan: Sequence[Work], shape: RoundShape) -> Tensor:
        """What the device is told of a plan, on the host: [4, B], see Seats."""
        null = [self.cache.state.null_slot, 0, 0, 0]
        rows = [[work.request.slot, work.pending, work.allowed, int(work.emits)] for work in plan]
        rows += [null] * (shape.num_seats - len(plan))
        return torch.tensor(rows, dtype=torch.long).T.contiguous()

    def pack(self, plan: Sequence[Work], shape: RoundShape, *, missed: bool = False) -> Step:
        """The rows of these requests; `missed`: those that the drafter has not seen, instead of the next ones. Other
        ranks are told to do the same."""
        requests = [work.request for work in plan]
        table, asked = self.seat_table(plan, shape), SamplingNeeds.of(requests)
        number = 0
        has_images = any(work.request.has_images_after(work.end - work.num_rows) for work in plan)
        if self.orders is not None and missed:
            self.orders.catch_up(table, shape, asked)
        elif self.orders is not None:
            number = self.orders.forward(table, shape, asked, has_images=has_images)
        step = self.pack_table(table, shape, asked, missed=missed, has_images=has_images)
        step.number = number
        step.tenants = tuple(request.params.tenant for request in requests)
        step.predictions = tuple(request.prediction for request in requests)
        return step

    def pack_table(
        self, table: Tensor, shape: RoundShape, asked: SamplingNeeds, *, missed: bool = False, has_images: bool = False
    ) -> Step:
        """Packs a round of whoever is in the table [4, B]: see seat_table()."""
        self.cache.settle()
        seats = Seats.of(self.cache.upload(table))
        step = self.pack_seats(seats, shape, self.options.sampling_for(asked), missed=missed)
        if has_images:
            batch, state = step.batch, self.cache.state
            batch.features = state.features_at(batch.row_slots, batch.indices)
            batch.last_key = None if state.last_key is None else state.last_key[batch.row_slots, batch.indices]
        return step

    def pack_seats(
        self,
        seats: Seats,
        shape: RoundShape,
        sampling: Sampling,
        *,
        missed: bool = False,
        out: Layout | None = None,
    ) -> Step:
        """A round of whoever sits there. Asks the host nothing: it may be recorded, and replayed with others seated.
        `out`: where to put its layout."""
        pages = self.cache.page_table, self.cache.shape.page_size
        layout = lay_out(seats, shape, self.cache.state, pages, missed=missed, out=out)
        step = self.step(layout, seats, shape, sampling)
        if self.cache.recurrent:
            step.batch.recurrence = self._recurrence(layout, seats, shape)
        return step

    def step(self, layout: Layout, seats: Seats, shape: RoundShape, sampling: Sampling) -> Step:
        """A round that is laid out, but for what recurrent layers need in its pass."""
        state, rows = self.cache.state, layout.rows
        batch = Batch(
            input_ids=rows.input_ids,
            positions=state.positions_at(rows.row_slots, rows.indices),
            indices=rows.indices,
            query_start=rows.query_start,
            request=rows.request,
            row_slots=rows.row_slots,
            slots=seats.slots,
            page_table=layout.page_table,
            write_locations=rows.locations,
            page_size=self.cache.shape.page_size,
            max_len=shape.max_len,
            max_rows=shape.max_rows,
        )
        return Step(
            batch=batch,
            shape=shape,
            starts=layout.starts,
            num_rows=layout.num_rows,
            num_drafts=layout.num_drafts,
            emits=layout.emits,
            judged=layout.judged,
            judged_slots=layout.judged_slots,
            judged_next=layout.judged_next,
            judged_start=layout.judged_start,
            sampling=sampling,
            state=state,
            tenants=(None,) * shape.num_seats,
            predictions=(None,) * shape.num_seats,
        )

    def _recurrence(self, layout: Layout, seats: Seats, shape: RoundShape) -> Recurrence:
        """States are kept after the last known token, and after every draft."""
        last = layout.rows.query_start[1:, None].long() - 1
        column = torch.arange(1 + shape.max_drafts, device=last.device)
        rows = torch.minimum(last - layout.num_drafts[:, None] + column, last)
        return Recurrence(self.cache.state.kept_state[seats.slots], rows, wanted=self.cache.state.wanted)
