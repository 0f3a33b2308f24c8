"""Packs a plan into tensors. Lengths, tokens and page tables are read on the device; only shapes come from the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.engine.cache import Cache
from outrider.engine.sampler import sampling_of
from outrider.engine.scheduler import Work
from outrider.engine.seats import Seats
from outrider.types import Batch, Recurrence, Sampling, Step


def write_locations(page_table: Tensor, request: Tensor, indices: Tensor, page_size: int) -> Tensor:
    """Where rows with these cache indices are written: page * page_size + offset."""
    page = page_table[request, indices // page_size].long()
    return page * page_size + indices % page_size


class Runner:
    def __init__(self, cache: Cache, vocab_size: int, device: torch.device) -> None:
        self.cache = cache
        self.vocab_size = vocab_size
        self.device = device
        self._sampling_key: tuple[str, ...] = ()
        self._sampling: Sampling | None = None

    def pack(self, plan: Sequence[Work], depth: int) -> Step:
        cache, state, page_size = self.cache, self.cache.state, self.cache.shape.page_size
        numbers = [(work.request.slot, work.start, work.num_rows, work.num_drafts) for work in plan]
        slots, starts, num_rows, num_drafts = self._tensor(list(zip(*numbers, strict=True)))
        query_start = torch.zeros(len(plan) + 1, dtype=torch.long, device=self.device)
        torch.cumsum(num_rows, 0, out=query_start[1:])
        total = sum(work.num_rows for work in plan)
        request = torch.repeat_interleave(num_rows, output_size=total)
        indices = starts[request] + torch.arange(total, device=self.device) - query_start[request]
        page_table = cache.page_table[slots]
        images = any(work.request.has_images_after(work.start) for work in plan)
        judged = 1 + max(work.num_drafts for work in plan)
        first = query_start[1:] - 1 - num_drafts  # the row of the last known token
        column = torch.arange(judged, device=self.device)
        logit_rows = torch.minimum(first[:, None] + column, query_start[1:, None] - 1)
        batch = Batch(
            input_ids=state.tokens[slots[request], indices],
            positions=state.positions_at(slots[request], indices),
            indices=indices,
            query_start=query_start.int(),
            request=request,
            slots=slots,
            page_table=page_table,
            write_locations=write_locations(page_table, request, indices, page_size),
            page_size=page_size,
            max_len=max(work.start + work.num_rows for work in plan),
            max_rows=max(work.num_rows for work in plan),
            recurrence=Recurrence(state.kept_state[slots], logit_rows) if cache.recurrent else None,
            features=state.features_at(slots[request], indices) if images else None,
            last_key=state.last_key[slots[request], indices] if images and state.last_key is not None else None,
        )
        return Step(
            batch=batch,
            starts=starts,
            num_rows=num_rows,
            logit_rows=logit_rows,
            num_drafts=num_drafts,
            num_valid=num_drafts,
            emits=torch.tensor([work.emits for work in plan], device=self.device),
            sampling=self._sampling_of(plan),
            state=state,
            depth=depth,
            tenants=tuple(work.request.params.tenant for work in plan),
            predictions=tuple(work.request.prediction for work in plan),
        )

    def pack_round(self, seats: Seats, num_drafts: int, depth: int) -> Step:
        """A round of requests that all decode, each with room for `num_drafts` drafts, however many it has: shapes are
        known beforehand, and everything else is read from the device."""
        from outrider.kernels.gpu import bookkeeping  # only a GPU has recorded rounds

        cache, state, page_size, layout = self.cache, self.cache.state, self.cache.shape.page_size, seats.layout
        rows = bookkeeping.pack(
            seats.slots, seats.taken, seats.allowed, state, cache.page_table, page_size, 1 + num_drafts
        )
        batch = Batch(
            input_ids=rows.input_ids,
            positions=rows.indices if state.positions is None else self._turns(seats, rows.indices),
            indices=rows.indices,
            query_start=layout.query_start,
            request=layout.request,
            slots=seats.slots,
            page_table=rows.page_table,
            write_locations=rows.locations,
            page_size=page_size,
            max_len=cache.shape.max_len,
            max_rows=1 + num_drafts,
            recurrence=Recurrence(state.kept_state[seats.slots], layout.logit_rows) if cache.recurrent else None,
        )
        return Step(
            batch=batch,
            starts=rows.starts,
            num_rows=layout.num_rows,
            logit_rows=layout.logit_rows,
            num_drafts=layout.num_drafts,
            num_valid=rows.num_valid,
            emits=seats.taken,
            sampling=seats.sampling,
            state=state,
            depth=depth,
            tenants=(None,) * len(seats.slots),
        )

    def _turns(self, seats: Seats, indices: Tensor) -> Tensor:
        return self.cache.state.positions_at(seats.slots[seats.layout.request], indices)

    def _tensor(self, columns: list[tuple[int, ...]]) -> tuple[Tensor, ...]:
        """All of them in one copy."""
        return torch.tensor(columns, dtype=torch.long, device=self.device).unbind()

    def _sampling_of(self, plan: Sequence[Work]) -> Sampling:
        """Options never change while a request lives, so the tensors are rebuilt only when the company does."""
        key = tuple(work.request.request_id for work in plan)
        if self._sampling is None or key != self._sampling_key:
            requests = [work.request for work in plan]
            self._sampling_key, self._sampling = key, sampling_of(requests, self.vocab_size, self.device)
        return self._sampling
