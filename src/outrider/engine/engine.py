"""The engine: requests go in, and round by round their tokens come out.
A round is launched, then its outcome is read; on a GPU the next one is launched before, so that it never waits."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from outrider.config import EngineConfig, SpeculativeConfig
from outrider.drafters.base import Drafter
from outrider.engine.cache import NUM_MISSABLE, Cache, CacheShape
from outrider.engine.drafting import Drafting
from outrider.engine.flight import Flight, to_host, wants_logprobs, wants_prompt_logprobs
from outrider.engine.governor import Governor
from outrider.engine.grammar import Grammars, Guide
from outrider.engine.graphs import NUM_ROWS, Graphs, Result
from outrider.engine.logprobs import add_prompt_logprobs, logprob_table
from outrider.engine.memory import Budget
from outrider.engine.pages import PagePool
from outrider.engine.policy import DepthPolicy, FixedDepth, Judged, Landed, judged_of
from outrider.engine.request import Request, Work
from outrider.engine.runner import Runner, exact_shape
from outrider.engine.sampler import Masks, sample
from outrider.engine.scheduler import Limits, Plan, Scheduler
from outrider.engine.verify import synthetic_choice
from outrider.engine.watchdog import Watchdog
from outrider.kernels.dispatch import has_triton
from outrider.kernels.round import judge, write_outcome
from outrider.models.base import Target
from outrider.sampling_params import Guided, SamplingParams
from outrider.tokenizer import Tokenizer
from outrider.types import Hidden, Outcome, Step

MAX_FLYING = 2  # rounds under way on a GPU: one runs, the next is already queued
WARM_UP_LENGTHS = (2, 6, 12, 24, 48, 200)  # few rows, some, many: each have kernels of their own


class Engine:
    def __init__(
        self,
        config: EngineConfig,
        target: Target,
        drafter: Drafter | None,
        budget: Budget,
        tokenizer: Tokenizer | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.target, self.tokenizer = target, tokenizer
        self.lookahead = drafter.lookahead if drafter is not None else 0
        self.max_model_len = budget.max_model_len
        self.end_ids: frozenset[int] = frozenset()
        self._grammars: Grammars | None = None  # made with the first guided request
        models = [target] if drafter is None else [target, drafter]
        shape = cache_shape(config, target, drafter, budget)
        self.cache = Cache(shape, models, config.torch_device, next(target.parameters()).dtype)
        # more rows bring nothing, and keep those waiting who decode; but everybody must be able to move in every round
        most = config.max_num_batched_tokens
        num_rows = min(most, NUM_ROWS[-1]) if records(config) else most
        limits = Limits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=max(num_rows, config.max_num_seqs * (1 + self.lookahead)),
            max_model_len=self.max_model_len,
            page_size=config.page_size,
            lookahead=self.lookahead,
            # a page holds keys and values; a recurrent state would have to be recomputed from the start anyway
            prefix_caching=config.enable_prefix_caching and not self.cache.recurrent,
        )
        self.scheduler = Scheduler(limits, PagePool(budget.num_pages))
        self.runner = Runner(self.cache, target.vocab_size, config.torch_device)
        self.watchdog = _watchdog(config, drafter)
        settings = config.speculative
        self._synthetic_choice = synthetic_choice(settings)
        self._graphs = Graphs(self.runner, self._round, config.max_num_seqs) if records(config) else None
        policy = depth_policy(settings, self.lookahead, shape.num_slots, self._graphs)
        self.drafting = Drafting(drafter, policy, self.runner)
        self._max_flying = 1 if config.torch_device.type == "cpu" and self._graphs is None else MAX_FLYING
        self._flights: deque[Flight] = deque()
        self.clock, self._landed_at = clock, 0.0

    # requests come and go

    def guide(self, guided: Guided, prompt: Sequence[int] = ()) -> Guide:
        """What a guided request needs; a ValueError where it asks for what cannot be had."""
        if self._grammars is None:
            self._grammars = Grammars(self.tokenizer, self.target.vocab_size, self.end_ids)
        return self._grammars.guide(guided, prompt)

    def add(self, request: Request) -> None:
        self.scheduler.add(request)

    def abort(self, request: Request) -> None:
        if not request.finished:
            self.scheduler.abort(request)
            self.drafting.learn(request)

    @property
    def has_work(self) -> bool:
        return self.scheduler.has_work

    # one step

    @torch.inference_mode()
    def step(self) -> list[Request]:
        """Launches rounds, then reads the outcome of the oldest; returns the requests that have something new."""
        while len(self._flights) < self._max_flying and self._is_foreseeable:
            begin = self.clock()
            depth = self.drafting.depth(self.scheduler.running or self.scheduler.next_in_line)
            plan = self.scheduler.next(depth, flying=bool(self._flights), follows=self.drafting.follows)
            if not plan.work:
                break
            self._flights.append(self._launch(plan, depth, begin))
            self.scheduler.launched(plan.work)
        while self._flights:
            flight = self._flights.popleft()
            if flight.is_wanted:
                return self._land(flight)
        return []

    @property
    def _is_foreseeable(self) -> bool:
        """Whether the next round can be planned before the outcome of those under way is known: what a grammar allows,
        and what follows in a prediction, depends on it."""
        return not any(
            request.flying and (request.guide is not None or request.prediction is not None)
            for request in self.scheduler.running
        )

    def _launch(self, plan: Plan, depth: int, begin: float) -> Flight:
        """Sends a round to the device: recorded where it can be, step by step otherwise."""
        work = plan.work
        self._place(plan)
        rests = self.drafting.rests(work, depth)
        if rests:
            self.drafting.plan_rest(work)
        else:
            self.drafting.catch_up([each.request for each in work])
        shape, hidden = exact_shape(work, depth, rests=rests), None
        fitted = self._graphs.fitted(work, shape) if self._graphs is not None and self._is_recordable(work) else None
        if self._graphs is not None and fitted is not None:
            shape, result = fitted, self._graphs.launch(work, fitted)
        else:
            step = self.runner.pack(work, shape)
            result, hidden = self._round_and_hidden(step, lambda: self._masks(work, step))
        outcomes, landed = to_host(result.outcomes)
        logits = result.logits if wants_logprobs(work) else None
        if logits is not None and fitted is not None:  # the next replay writes over it
            logits = logits.clone()
        return Flight(
            work, shape, begin, outcomes, landed, logits, hidden if wants_prompt_logprobs(work) else None
        )  # fmt: skip

    def _is_recordable(self, plan: Sequence[Work]) -> bool:
        """What the host must decide in every round, or look at afterwards, cannot be recorded."""
        return self.drafting.is_recordable and not any(
            work.request.guide is not None
            or work.request.prediction is not None
            or work.request.params.prompt_logprobs is not None
            or work.request.has_images_after(work.end - work.num_rows)
            for work in plan
        )

    def _round(self, step: Step) -> Result:
        return self._round_and_hidden(step)[0]

    def _round_and_hidden(
        self, step: Step, masks: Callable[[], Masks | None] = lambda: None
    ) -> tuple[Result, Hidden]:  # fmt: skip
        """The round, recorded or not: nothing in it waits for the device. `masks` says what grammars allow; it is asked
        while the target is at work."""
        hidden = self.target(step.batch, self.drafting.taps)
        logits = self.target.logits(hidden.last[step.judged])
        choice = sample(logits, step.sampling, step.batch, step.judged, step.state, masks())
        if self._synthetic_choice is not None and not step.shape.rests:
            choice = self._synthetic_choice(choice, step)
        verdict = judge(step, choice)
        draft = self.drafting.draft(step, hidden, verdict)
        return Result(write_outcome(step, verdict, draft), logits), hidden

    def _land(self, flight: Flight) -> list[Request]:
        """The outcome of a round reaches the requests that are still there."""
        flight.wait()
        end = self.clock()
        read = [each for each in flight.read() if each[0].is_current]
        if flight.hidden is not None:
            add_prompt_logprobs(flight.read_rows(), flight.hidden, self.target, self.tokenizer)
        judged = []
        for work, outcome, begin in read:
            logits = flight.logits[begin : begin + 1 + outcome.num_judged] if flight.logits is not None else None
            if _has_draft(work) and not flight.shape.rests:
                judged.append(judged_of(work.request, outcome))
            self._settle(work, outcome, logits)
        self._note(flight, [outcome for work, outcome, _ in read if work.emits], judged, end)
        self._heal([work for work, _, _ in read])
        return [work.request for work, _, _ in read if work.emits]

    # the parts of a step

    def _note(self, flight: Flight, outcomes: Sequence[Outcome], judged: list[Judged], end: float) -> None:
        """Tells the policy of a round. It has kept everybody waiting since it began, or since the one before was over;
        where none is under way, also while its outcome was read."""
        end = end if self._flights else self.clock()
        seconds, self._landed_at = end - max(flight.launched, self._landed_at), end
        shape = flight.shape
        decoding = sum(work.num_rows for work in flight.plan if work.is_round)
        num_rows = shape.num_rows if all(work.is_round for work in flight.plan) else decoding
        landed = Landed(
            num_requests=len(flight.plan),
            depth=shape.depth,
            rests=shape.rests or not (shape.depth or self.drafting.remembers),
            num_rows=num_rows,
            num_other_rows=shape.num_rows - num_rows,
            num_tokens=sum(len(outcome.tokens) for outcome in outcomes),
            num_made=sum(len(outcome.draft) for outcome in outcomes),
            num_wanted=shape.depth * len(outcomes),
            seconds=seconds,
            judged=judged,
        )
        self.drafting.policy.note(landed)

    def _place(self, plan: Plan) -> None:
        """Slots of new requests are filled, and page tables learn of new pages."""
        page_size = self.cache.shape.page_size
        for request in plan.admitted:
            reused = request.pages[: request.num_computed // page_size]
            self.cache.admit(request.slot, request.tokens, reused, request.images)
            request.num_placed = len(reused)
            self.drafting.policy.admit(request.slot)
        if plan.admitted:
            self.runner.options.write(plan.admitted, self.cache.upload)
        places = []
        for request in (work.request for work in plan.work):
            new = enumerate(request.pages[request.num_placed :], start=request.num_placed)
            places += [(request.slot, place, page) for place, page in new]
            request.num_placed = len(request.pages)
        self.cache.place_pages(places)

    def _masks(self, plan: Sequence[Work], step: Step) -> Masks | None:
        """What grammars allow after each judged row; the target is still at work on the device meanwhile. Which drafts
        a guided request has is known, as nothing of it is under way; how many the others have, the device knows."""
        places: list[tuple[int, int]] = []  # number in the plan, judged row of that request
        bits: list[Tensor] = []
        for number, work in enumerate(plan):
            if work.emits and work.request.guide is not None:
                for place, mask in work.request.guide.masks(work.request.draft[: work.allowed]):
                    places.append((number, place))
                    bits.append(mask)
        if not places:
            return None
        requests, offsets = self.cache.upload(torch.tensor(places)).unbind(1)
        return Masks(step.judged_start[requests] + offsets, self.cache.upload(torch.stack(bits)))

    def _settle(self, work: Work, outcome: Outcome, logits: Tensor | None) -> None:
        """What a round brought reaches its request; logits [J, V] of the judged rows."""
        request, tokens = work.request, outcome.tokens
        taken = self._commit(work, outcome)
        if request.params.logprobs is not None and taken:
            assert logits is not None
            request.logprobs += logprob_table(logits[:taken], tokens[:taken], request.params.logprobs, self.tokenizer)
        request.draft_is_predicted = outcome.predicted
        self.scheduler.update(work, outcome.kept, len(outcome.draft))
        if request.finished:
            self.drafting.learn(request)
        request.draft = outcome.draft

    def _commit(self, work: Work, outcome: Outcome) -> int:
        """How many of the tokens the request takes before it ends."""
        request, tokens, num_judged = work.request, outcome.tokens, outcome.num_judged
        is_round = work.is_round and request.num_outputs > 0
        taken = 0
        for taken, token in enumerate(tokens, start=1):
            request.append(token, self.max_model_len, taken if taken < len(tokens) else 0)
            if request.finished:
                break
        if is_round and taken:
            accepted = min(len(tokens) - 1, taken)
            request.count_round(num_judged, accepted)
            self._watch(request, num_judged, accepted)
            if request.params.trace:
                request.trace.append({"draft": request.draft[:num_judged], "accepted": accepted})
        return taken

    def _watch(self, request: Request, num_judged: int, accepted: int) -> None:
        """Tells the watchdog of a round. What a client predicts says nothing about the drafter."""
        if self.watchdog is None or (num_judged and request.draft_is_predicted):
            return
        if num_judged:
            made = (num_judged, accepted)
            self.watchdog.drafted_round(request.standing, request.request_id, len(request.tokens), made)
        else:
            self.watchdog.plain_round(request.standing)

    def _heal(self, plan: Sequence[Work]) -> None:
        """Requests whose memory seems to be spoilt start over from the tokens that they have."""
        for work in reversed(plan):  # each goes to the head of the queue
            if work.request.standing.needs_rebuild and not work.request.finished:
                work.request.standing.needs_rebuild = False
                self.scheduler.restart(work.request)

    # beside the steps

    @property
    def drafter(self) -> Drafter | None:
        return self.drafting.drafter

    @contextmanager
    def drafting_with(self, drafter: Drafter | None, policy: DepthPolicy) -> Iterator[None]:
        """For a while another drafter drafts, which shares the cached layers of the engine's own, or another policy
        says how much."""
        assert not self.has_work, "the drafter of an engine at work cannot be changed"
        before, self.drafting = self.drafting, Drafting(drafter, policy, self.runner)
        self.drafting.predicting = before.predicting
        try:
            yield
        finally:
            self.drafting = before

    def drain(self) -> None:
        """Rounds under way whose requests have all left are forgotten."""
        while self._flights:
            self._flights.popleft().wait()

    @torch.inference_mode()
    def warm_up(self) -> None:
        """On a GPU: compiles kernels and records rounds, so that the first requests do not wait for it."""
        if self.runner.device.type == "cpu" and self._graphs is None:
            return
        if self._graphs is not None and self.drafting.is_recordable:
            depths, may_rest = self.drafting.policy.depths, self.drafter is not None
            most = self.scheduler.limits.max_num_batched_tokens
            self._graphs.warm_up(self._graphs.usual_shapes(depths, most, may_rest=may_rest))
        room = self.scheduler.pool.capacity * self.scheduler.limits.page_size - 1 - self.lookahead
        room = min(self.max_model_len, room)
        with self.drafting_with(self.drafter, FixedDepth(self.lookahead)):  # nothing is to be learnt from this
            for length in WARM_UP_LENGTHS:  # neither prompts are recorded, nor what a drafter sees after a rest
                self._run_alone(min(length, room - 2), 2)
                self._run_alone(2, min(length, NUM_MISSABLE, room - 2), num_drafts=0)

    def _run_alone(self, prompt_len: int, max_tokens: int, num_drafts: int | None = None) -> None:
        params = SamplingParams(max_tokens=max_tokens, temperature=0, num_speculative_tokens=num_drafts)
        request = Request(f"warm-up-{prompt_len}-{max_tokens}", [0] * prompt_len, params, seed=0)
        self.add(request)
        while not request.finished:
            if request.num_outputs == max_tokens - 2:
                self.drafting.catch_up([request])
            self.step()

    @property
    def num_recordings(self) -> int:
        return 0 if self._graphs is None else self._graphs.num_recordings

    @property
    def recording_seconds(self) -> dict[str, float]:
        """Where the time for recordings went: first runs, which compile kernels, and recording itself."""
        if self._graphs is None:
            return {}
        return {"kernels": self._graphs.compile_seconds, "recordings": self._graphs.record_seconds}

    @property
    def num_recorded_rounds(self) -> int:
        """How many rounds were replayed from recordings."""
        return 0 if self._graphs is None else self._graphs.num_launched

    def replay_ms(self, count: int) -> float | None:
        """Device time of the last recorded round, replayed back to back: a measurement that spoils the requests."""
        return None if self._graphs is None else self._graphs.replay_ms(count)

    def close(self) -> None:
        self.cache.free()


def cache_shape(config: EngineConfig, target: Target, drafter: Drafter | None, budget: Budget) -> CacheShape:
    lookahead = drafter.lookahead if drafter is not None else 0
    return CacheShape(
        num_pages=budget.num_pages,
        page_size=config.page_size,
        num_slots=config.max_num_seqs + 1,
        # rounds that are under way when a request ends go on a little
        max_len=budget.max_model_len + (1 + lookahead) * (1 + MAX_FLYING),
        num_taps=len(drafter.taps) if drafter is not None else 0,
        hidden_size=target.hidden_size,
        lookahead=lookahead,
        num_axes=target.num_position_axes,
        num_carried=drafter.num_carried if drafter is not None else 1,
        num_missable=NUM_MISSABLE,
    )


def depth_policy(
    settings: SpeculativeConfig | None, lookahead: int, num_slots: int, graphs: Graphs | None
) -> DepthPolicy:
    """Whoever forces a drafter wants to see all of its drafts."""
    if settings is None or not lookahead or settings.force or not settings.adaptive:
        return FixedDepth(lookahead)
    return Governor(lookahead, num_slots, graphs.row_sizes if graphs is not None else None)


def _has_draft(work: Work) -> bool:
    """Whether a draft of the drafter's waited for this round."""
    return work.is_round and bool(work.request.draft) and not work.request.draft_is_predicted


def records(config: EngineConfig) -> bool:
    """Whether rounds can be recorded there, and are to be."""
    return config.torch_device.type == "cuda" and has_triton() and not config.enforce_eager


def _watchdog(config: EngineConfig, drafter: Drafter | None) -> Watchdog | None:
    """A drafter that was forced is used however bad it is; one that reads tokens only has nothing to compute again."""
    if config.watchdog is None or drafter is None:
        return None
    forced = config.speculative is not None and config.speculative.force
    return Watchdog(config.watchdog, acts=not forced, rebuilds=not drafter.from_text)
