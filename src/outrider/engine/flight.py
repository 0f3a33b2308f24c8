"""A round under way: launched on the device, in part at least, its outcome not yet read. The host plans the next ones
meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.engine.policy import Judged, Landed
from outrider.engine.request import Work
from outrider.engine.round import Round, RoundParts
from outrider.kernels.round import read_outcome
from outrider.types import Hidden, Outcome, RoundShape


@dataclass
class Flight:
    plan: list[Work]
    shape: RoundShape
    launched: float  # when its planning began, in seconds
    parts: RoundParts | None  # None: all of it is on the device
    left: tuple[RoundParts, tuple[Tensor, Tensor] | None] | None = None  # to be ended, given what grammars say
    outcomes: Tensor | None = None  # [B, ...] on the host, good once `landed` has happened
    landed: torch.cuda.Event | None = None  # None: it has
    logits: Tensor | None = None  # [L, V] of the judged rows, where somebody asks for log-probabilities
    hidden: Hidden | None = None  # of all rows, where somebody asks for those of a prompt

    @property
    def is_wanted(self) -> bool:
        """Whether any of its requests is still there."""
        return any(work.is_current for work in self.plan)

    def end(self, parts: Round) -> None:
        """Sends what is left of it to the device; in stages, waits for what the last one tells."""
        assert self.left is not None
        (own, said), self.left = self.left, None
        if wants_logprobs(self.plan):
            self.logits = parts.whole_logits(own.logits, written_over=own.writes_over_logits(said))
        if wants_prompt_logprobs(self.plan):
            self.hidden = parts.last_hidden(own.hidden)
        own.choose(said)
        self.outcomes, self.landed = own.outcome()

    def wait(self) -> None:
        """Waits until the outcome of the round has reached the host."""
        if self.landed is not None:
            self.landed.synchronize()

    def read(self) -> list[tuple[Work, Outcome, int]]:
        """Once it has landed: of each request its work, what the round brought, and where its judged rows begin."""
        assert self.outcomes is not None
        rows, begin, found = self.outcomes.tolist(), 0, []
        for work, row in zip(self.plan, rows, strict=False):
            outcome = read_outcome(row, self.shape)
            found.append((work, outcome, begin))
            begin += 1 + outcome.num_judged if work.emits else 0
        return found

    def read_rows(self) -> list[tuple[Work, int]]:
        """Once it has landed: of each request its work, and where its rows begin."""
        begin, found = 0, []
        for work, outcome, _ in self.read():
            found.append((work, begin))
            begin += work.pending + outcome.num_judged
        return found


def landed(flight: Flight, outcomes: Sequence[Outcome], judged: list[Judged], seconds: float, rests: bool) -> Landed:
    """What a policy is told of a round that is over. `outcomes`: of the requests that got tokens; `rests`: the drafter
    had nothing to do. Rows that only fill up a recording count as drafts' where everybody decodes."""
    shape, plan = flight.shape, flight.plan
    decoding = sum(work.num_rows for work in plan if work.is_round)
    num_rows = shape.num_rows if all(work.is_round for work in plan) else decoding
    return Landed(
        num_requests=len(plan),
        depth=shape.depth,
        rests=rests,
        num_rows=num_rows,
        num_other_rows=shape.num_rows - num_rows,
        num_tokens=sum(len(outcome.tokens) for outcome in outcomes),
        num_made=sum(len(outcome.draft) for outcome in outcomes),
        num_wanted=shape.depth * len(outcomes),
        seconds=seconds,
        judged=judged,
    )


def wants_logprobs(plan: Sequence[Work]) -> bool:
    return any(work.emits and work.request.params.logprobs is not None for work in plan)


def wants_prompt_logprobs(plan: Sequence[Work]) -> bool:
    return any(work.request.params.prompt_logprobs is not None for work in plan)
