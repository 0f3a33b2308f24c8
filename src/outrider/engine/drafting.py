"""Drafting as one object: the drafter of an engine, if it has one, how much it drafts, and when it rests.
A drafter at rest is left out of rounds. What it misses of the text is kept, and shown to it later all at once, as if it
were one more part of the prompt: then its memory is what it would have been."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from outrider.config import EngineConfig
from outrider.drafters.base import Drafter
from outrider.engine.governor import Governor
from outrider.engine.policy import DepthPolicy, FixedDepth, RowSizes
from outrider.engine.request import Request, Work
from outrider.engine.runner import Runner, exact_shape
from outrider.types import Draft, Hidden, RoundShape, Step, Verdict

Showing = Callable[[Sequence[Work]], None]


class Drafting:
    def __init__(self, drafter: Drafter | None, policy: DepthPolicy, predicting: Drafter | None = None) -> None:
        """`predicting`: who drafts in rounds with requests that bring a prediction."""
        self.drafter, self.policy, self.predicting = drafter, policy, predicting
        self.lookahead = drafter.lookahead if drafter is not None else 0
        self.listener: Callable[[Request], None] | None = None  # is told of every request that has ended

    @classmethod
    def of(cls, config: EngineConfig, drafter: Drafter | None, predicting: Drafter | None = None) -> Drafting:
        """As the user wants it: whoever forces a drafter wants to see all of its drafts."""
        settings, lookahead = config.speculative, drafter.lookahead if drafter is not None else 0
        adapts = settings is not None and settings.adaptive and not settings.force and lookahead > 0
        policy = Governor(lookahead, config.max_num_seqs + 1) if adapts else FixedDepth(lookahead)
        return cls(drafter, policy, predicting)

    def bind(self, runner: Runner, row_sizes: RowSizes | None, catch_up: Showing | None = None) -> None:
        """To the engine that drafts so. `row_sizes`: numbers of rows that its rounds can have; None: any. `catch_up`:
        shows the drafter what it has missed, from recordings."""
        self._runner, self._cache, self._row_sizes, self._catch_up = runner, runner.cache, row_sizes, catch_up

    def having(self, policy: DepthPolicy, drafter: Drafter | None) -> Drafting:
        """The same with another policy and another drafter, which shares the cached layers of this one."""
        other = Drafting(drafter, policy, self.predicting)
        other.bind(self._runner, self._row_sizes, self._catch_up)
        return other

    def taps(self, shape: RoundShape) -> tuple[int, ...]:
        """The target's hidden states that a round is asked for."""
        return () if self.drafter is None or (shape.rests and not shape.misses) else self.drafter.taps

    @property
    def is_recordable(self) -> bool:
        return self.drafter is None or self.drafter.recordable

    @property
    def remembers(self) -> bool:
        """Whether there is a drafter that must see all of a text."""
        return self.drafter is not None and not self.drafter.reads_tokens_only

    @property
    def reads_last(self) -> bool:
        """Whether a drafter looks at what came out of the last layer, and not at taps alone."""
        return self.drafter is not None and self.drafter.reads_last

    def depth(self, requests: Sequence[Request]) -> int:
        """How many tokens to draft: as many as the request that wants most, and as are worth it. A prediction is always
        worth a try."""
        if self.drafter is None or not requests:
            return 0
        most = self.policy.depth(requests, self._row_sizes)
        if any(request.prediction is not None for request in requests):
            most = self.drafter.lookahead
        if not most:
            return 0
        wanted = [request.most_drafts() for request in requests]
        return max(most if want is None else min(want, most) for want in wanted)

    def may_pause(self, requests: Sequence[Request]) -> bool:
        """Whether a round may draft nothing, though drafts pay."""
        return self.policy.adaptive and not any(request.prediction is not None for request in requests)

    def follows(self, num_running: int, num_unseen: int, num_left: int) -> bool:
        """Whether the drafter will follow the text of one more request beside so many; the rest as in
        DepthPolicy.wants(). If not, it is never drafted for: then even its prompt costs what it would cost without a
        drafter."""
        return not self.remembers or self.policy.wants(1 + num_running, num_unseen, num_left)

    def rests(self, plan: Sequence[Work], depth: int) -> bool:
        """Whether the drafter has nothing to do in a round: nobody wants drafts, and what it misses can be kept, or it
        does not follow the text anyway."""
        if depth or self.drafter is None or any(work.request.prediction is not None for work in plan):
            return False
        return all(not work.request.is_followed or self._can_be_missed(work) for work in plan)

    def _can_be_missed(self, work: Work) -> bool:
        room = self._cache.shape.num_missable
        return work.is_round and (not self.remembers or work.end - work.request.num_followed <= room)

    def plan_rest(self, plan: Sequence[Work]) -> None:
        """The drafter will not see this work."""
        for work in plan:
            work.rests = self.remembers

    def catch_up(self, requests: Sequence[Request]) -> None:
        """The drafter sees what it has missed of these requests, also in rounds that are under way."""
        behind = [request for request in requests if _has_missed(request)]
        if not behind or self.drafter is None:
            return
        plan = [_missed_work(request) for request in behind]
        has_images = any(work.request.has_images_after(work.end - work.num_rows) for work in plan)
        if self._catch_up is not None and self.is_recordable and not has_images:
            self._catch_up(plan)
        else:
            self.see_missed(self._runner.pack(plan, exact_shape(plan, 0), missed=True))
        for request in behind:
            request.num_followed = request.num_computed
            for work in request.flying:
                work.rests = False

    def see_missed(self, step: Step) -> None:
        """The drafter sees rows that it has missed."""
        assert self.drafter is not None
        hidden = self._cache.missed(step)
        nothing = torch.zeros_like(step.num_rows)
        verdict = Verdict(tokens=nothing[:, None], count=nothing, kept=step.num_rows)
        self._cache.keep_taps(step, hidden, verdict)
        self.drafter.propose(step, hidden, verdict)
        state, slots = step.state, step.batch.slots
        state.followed[slots] = state.computed[slots]

    def draft(self, step: Step, hidden: Hidden, verdict: Verdict) -> Draft | None:
        """The last part of a round: a draft for the next one, None if nobody drafts. Asks the host nothing unless the
        drafter does."""
        if step.shape.rests:
            if step.shape.misses:
                self._cache.miss(step, hidden)
            return None
        self._cache.keep_taps(step, hidden, verdict)
        predictions = any(prediction is not None for prediction in step.predictions)
        drafter = self.predicting if predictions else self.drafter
        if drafter is None or (drafter.reads_tokens_only and drafter.ranks is not None and drafter.ranks.rank):
            return None  # a text is looked into by one rank
        draft = drafter.propose(step, hidden, verdict)
        _check_form(draft, len(step.batch.slots), drafter)
        return draft

    def draft_width(self, plan: Sequence[Work], shape: RoundShape) -> int:
        """How many tokens wide the draft of a round is; 0: nobody drafts."""
        predictions = any(work.request.prediction is not None for work in plan)
        drafter = self.predicting if predictions else self.drafter
        return 0 if drafter is None or shape.rests or not (shape.depth or predictions) else drafter.lookahead

    def learn(self, request: Request) -> None:
        """A request has ended."""
        if self.listener is not None:
            self.listener(request)
        if self.drafter is not None and request.num_outputs:
            self.drafter.learn(request.tokens, request.params.tenant)


def _check_form(draft: Draft, num_requests: int, drafter: Drafter) -> None:
    """Asks for sizes alone, which the host knows. Memory and recordings are made for this many tokens of a draft."""
    found = (tuple(draft.tokens.shape), tuple(draft.count.shape))
    wanted = ((num_requests, drafter.lookahead), (num_requests,))
    assert found == wanted, (
        f"{type(drafter).__name__}.propose: tokens and count must be [B, lookahead] and [B], here "
        f"{list(wanted[0])} and {list(wanted[1])}, not {list(found[0])} and {list(found[1])}"
    )
    assert draft.tokens.dtype == draft.count.dtype == torch.long, (
        f"{type(drafter).__name__}.propose: tokens and count must be int64, not {draft.tokens.dtype} and "
        f"{draft.count.dtype}"
    )


def _has_missed(request: Request) -> bool:
    if not request.is_followed:
        return False
    return request.num_followed < request.num_computed or any(work.rests for work in request.flying)


def _missed_work(request: Request) -> Work:
    end = request.num_computed + sum(work.num_rows for work in request.flying)  # at most
    return Work(request, end - request.num_followed, 0, emits=False, end=end)
