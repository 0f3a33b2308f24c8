"""The engine: requests go in, and round by round their tokens come out.
A round is launched, then its outcome is read; on a GPU the next one is launched before, so that it never waits."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor

from outrider.config import EngineConfig
from outrider.drafters.base import Drafter
from outrider.engine.cache import Cache
from outrider.engine.commit import commit
from outrider.engine.drafting import Drafting
from outrider.engine.flight import Flight, landed, wants_logprobs, wants_prompt_logprobs
from outrider.engine.graphs import Graphs
from outrider.engine.guidance import guidance_of
from outrider.engine.launched import LaunchedRanks
from outrider.engine.logprobs import Figures, add_prompt_logprobs, figures_of_round, told
from outrider.engine.memory import Budget, cache_shape
from outrider.engine.orders import Orders
from outrider.engine.pages import PagePool
from outrider.engine.placing import Placing
from outrider.engine.policy import DepthPolicy, judged_of
from outrider.engine.request import Progress, Request, Work
from outrider.engine.round import EagerRound, Round, RoundParts, is_checked
from outrider.engine.round_sizes import NUM_ROWS
from outrider.engine.runner import Runner, exact_shape
from outrider.engine.scheduler import Plan, Scheduler, SchedulerLimits
from outrider.engine.snapshots import Snapshots
from outrider.engine.stages import StagedRound
from outrider.engine.stopwatch import Stopwatch
from outrider.engine.team import RankLostError, Team
from outrider.engine.verify import synthetic_choice
from outrider.engine.watchdog import Watchdog
from outrider.engine.workers import Workers, return_workers
from outrider.grammar.guide import Grammars, Guide
from outrider.kernels.dispatch import has_triton
from outrider.models.base import Target
from outrider.sampling_params import Guided, SamplingParams
from outrider.tokenizer import Tokenizer
from outrider.types import Outcome, RoundShape

MAX_FLYING = 2  # rounds under way on a GPU: one runs, the next is already queued
PROMPT_ROWS = {"cpu": 256, "cuda": 1024}  # beside those who decode: a tenth of a second for a small model, or 20 ms


class Engine:
    def __init__(
        self,
        config: EngineConfig,
        target: Target,
        drafting: Drafting,
        budget: Budget,
        tokenizer: Tokenizer | None = None,
        team: Team | None = None,
    ) -> None:
        """`team`: the ranks that it is one of, where it does not compute alone."""
        self.target, self.tokenizer = target, tokenizer
        drafter, self.lookahead = drafting.drafter, drafting.lookahead
        self.max_model_len = budget.max_model_len
        self.end_ids: frozenset[int] = frozenset()
        models = [target] if drafter is None else [target, drafter]
        shape = cache_shape(config, target, drafter, budget, MAX_FLYING)
        self.cache = Cache(shape, models, config.torch_device, next(target.parameters()).dtype)
        # more rows bring nothing, and keep those waiting who decode; but everybody must be able to move in every round
        most = config.max_num_batched_tokens
        recorder = self.recorder(config) if team is None else None
        num_rows = min(most, NUM_ROWS[-1]) if recorder is not None else most
        limits = SchedulerLimits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=max(num_rows, config.max_num_seqs * (1 + self.lookahead)),
            max_model_len=self.max_model_len,
            page_size=config.page_size,
            lookahead=self.lookahead,
            # a page holds keys and values; without snapshots a recurrent state must be recomputed from the start anyway
            prefix_caching=config.enable_prefix_caching and (not self.cache.recurrent or budget.num_snapshots > 0),
            num_prompt_rows=PROMPT_ROWS[config.torch_device.type],
            num_groups=team.num_stages if team is not None else 1,
            round_sizes=NUM_ROWS if recorder is not None else (),
        )
        snapshots = None
        if budget.num_snapshots:
            snapshots = Snapshots(budget.num_snapshot_places, config.page_size, config.snapshot_interval)
        forgets = snapshots.pool.forget if snapshots is not None else lambda name: None
        self.scheduler = Scheduler(limits, PagePool(budget.num_pages, forgets, budget.num_ample), snapshots)
        self.runner = Runner(self.cache, target.vocab_size, config.torch_device)
        self.watchdog = Watchdog.of(config, drafter)
        kind = Round if limits.num_groups == 1 else StagedRound
        self.parts = kind(target, drafting, synthetic_choice(config.speculative), team.world if team else None)
        self.orders = Orders(team.channel) if team is not None and team.is_first else None
        self.runner.orders = self.orders
        self.workers: Workers | LaunchedRanks | None = None  # the other ranks
        self.graphs = recorder(self.runner, self.parts, config.max_num_seqs) if recorder is not None else None
        if self.graphs is not None:
            drafting.bind(self.runner, self.graphs.row_sizes, self.graphs.catch_up)
        else:
            drafting.bind(self.runner, None)
        self._max_flying = 1 if config.torch_device.type == "cpu" and self.graphs is None else MAX_FLYING
        self._max_flying = max(self._max_flying, limits.num_groups)
        self._flights: deque[Flight] = deque()
        self.stopwatch = Stopwatch()
        self._grammars: Grammars | None = None
        self._making_grammars = threading.Lock()

    @staticmethod
    def recorder(config: EngineConfig) -> type[Graphs] | None:
        """What records rounds there; None: nothing can, or shall."""
        return Graphs if config.torch_device.type == "cuda" and has_triton() and not config.enforce_eager else None

    # requests come and go

    def guide(self, guided: Guided, prompt: Sequence[int] = ()) -> Guide:
        """What a guided request needs; a ValueError where it asks for what cannot be had."""
        return self.grammars.guide(guided, prompt)

    @property
    def grammars(self) -> Grammars:
        """Made with the first guided request, by whichever thread prepares it."""
        with self._making_grammars:
            if self._grammars is None:
                self._grammars = Grammars(self.tokenizer, self.target.vocab_size, self.end_ids)
            return self._grammars

    def check(self, params: SamplingParams) -> None:
        """Raises ValueError for sampling filters that this engine does not know."""
        self.runner.options.check(params)
        if params.extra_args and isinstance(self.workers, Workers):
            self.workers.check_filters(params.extra_args)

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

    def step(self) -> list[Progress]:
        """Launches rounds, then reads the outcome of the oldest: how far it has brought which requests."""
        with self.workers.watched() if self.workers is not None else nullcontext():
            return self._step()

    @torch.inference_mode()
    def _step(self) -> list[Progress]:
        if not self._is_staged:  # the last stage tells of every round
            self._flights = deque(flight for flight in self._flights if flight.is_wanted)
        self._launch_rounds()
        if not self._flights:
            return []
        landing, following = self._flights.popleft(), self._flights[0] if self._flights else None
        waits = following is not None and following.parts is not None
        news = self._land(landing)
        if waits:
            self._launch_rounds()  # what is left of that one would not keep the device busy for long
        return news

    def _launch_rounds(self) -> None:
        while len(self._flights) < self._max_flying and self._is_foreseeable:
            begin = self.stopwatch.now()
            requests = self.scheduler.at_hand
            depth = self.drafting.depth(requests)
            if depth and self.drafting.may_pause(requests) and self.scheduler.is_crowded(max(depth // 2, 1)):
                depth = 0
            if depth and self.graphs is not None:
                self.graphs.allot_beside(*self.scheduler.beside_prompts)
            plan = self.scheduler.next(depth, flying=bool(self._flights), follows=self.drafting.follows)
            if not plan.work:
                break
            self._flights.append(self._launch(plan, depth, begin))
            self.scheduler.launched(plan.work)

    @property
    def _is_foreseeable(self) -> bool:
        """Whether the next round can begin before the outcome of those under way is known: what follows in a prediction
        depends on it. And one round begins after the other: whatever waits for a grammar comes first. In stages rounds
        under way have requests of their own; but of one that was aborted, the slot is not free until they are over."""
        if self._is_staged:
            return all(work.is_current for flight in self._flights for work in flight.plan)
        if self._flights and self._flights[-1].parts is not None:
            return False
        return not any(request.flying and request.prediction is not None for request in self.scheduler.running)

    def _launch(self, plan: Plan, depth: int, begin: float) -> Flight:
        """Sends a round to the device: all of it, or, where a grammar waits for the outcome of a round under way, the
        target's pass, which needs no grammar."""
        work = plan.work
        if self.orders is not None:
            self.orders.waits = not (self._is_staged and self._flights)
        num_made = 0 if self.graphs is None else self.graphs.num_made
        self._place(plan)
        rests = self.drafting.rests(work, depth)
        if rests:
            self.drafting.plan_rest(work)
        else:
            self.drafting.catch_up([each.request for each in work])
        parts, shape = self._parts(work, depth, rests=rests)
        if self.graphs is not None and self.graphs.num_made > num_made:
            self.stopwatch.disturb()
        parts.forward()
        flight = Flight(work, shape, begin, parts)
        if not any(_waits_for_outcome(each.request) for each in work):
            self._finish(flight)
        return flight

    def _finish(self, flight: Flight) -> None:
        """Sends the rest of a round to the device, if something is left. Whatever its grammars wait for has landed."""
        if flight.parts is None:
            return
        parts, plan, flight.parts = flight.parts, flight.plan, None
        said = guidance_of(plan, flight.shape, 1 + max(self.lookahead, flight.shape.max_drafts))
        if self.orders is not None:
            assert isinstance(parts, EagerRound)
            parts.draft_width = width = self.drafting.draft_width(plan, flight.shape)
            gathers = (wants_logprobs(plan), wants_prompt_logprobs(plan))
            self.orders.waits = not self._is_staged
            self.orders.finish(parts.number, said, gathers=gathers, draft_width=width)
        flight.left = parts, said
        if not self._is_staged:
            flight.end(self.parts)

    def _hear(self, flight: Flight) -> None:
        """In stages, the last one does the rest of a round, and tells: all others hear of it when it lands."""
        if flight.left is not None:
            assert self.orders is not None
            assert isinstance(flight.left[0], EagerRound)
            self.orders.land(flight.left[0].number, at_once=is_checked())
            flight.end(self.parts)

    def _logits_of(self, states: Tensor) -> Tensor:
        """The logits [R, V] of hidden states [R, H], of the whole vocabulary."""
        if self.orders is not None:
            self.orders.logits(states)
        return self.parts.logits_of(states)

    def _parts(self, plan: Sequence[Work], depth: int, *, rests: bool) -> tuple[RoundParts, RoundShape]:
        """How a round is done: from recordings where it can be, step by step otherwise; and its sizes then."""
        if self.graphs is not None and self._is_recordable(plan):
            fitted = self.graphs.fitted(plan, depth, rests=rests)
            if fitted is not None:
                return self.graphs.round(plan, fitted), fitted
        shape = exact_shape(plan, depth, rests=rests)
        return self.parts.of(self.runner.pack(plan, shape)), shape

    def _is_recordable(self, plan: Sequence[Work]) -> bool:
        """What the host must decide in every round, or look at afterwards, cannot be recorded."""
        return self.drafting.is_recordable and not any(
            work.request.prediction is not None
            or work.request.params.prompt_logprobs is not None
            or work.request.has_images_after(work.end - work.num_rows)
            for work in plan
        )

    def _land(self, flight: Flight) -> list[Progress]:
        """The outcome of a round reaches the requests that are still there."""
        self._finish(flight)
        self._hear(flight)
        flight.wait()
        end = self.stopwatch.now()
        read = [each for each in flight.read() if each[0].is_current]
        if flight.hidden is not None:
            add_prompt_logprobs(flight.read_rows(), flight.hidden, self._logits_of, self.tokenizer)
        judged = [judged_of(work.request, outcome) for work, outcome, _ in read if _has_draft(work)]
        brought = self._settle_all(flight, read)
        # where no round is under way, everybody has waited also while the outcome was read
        seconds = self.stopwatch.lap(flight, end if self._flights else self.stopwatch.now())
        rests = flight.shape.rests or not (flight.shape.depth or self.drafting.remembers)
        outcomes = [outcome for work, outcome, _ in read if work.emits]
        self.drafting.policy.note(landed(flight, outcomes, [] if flight.shape.rests else judged, seconds, rests))
        self._recompute_spoilt([work for work, _, _ in read])
        return brought

    def _settle_all(self, flight: Flight, read: Sequence[tuple[Work, Outcome, int]]) -> list[Progress]:
        """What a round brought reaches its requests: first those with a grammar, whom the next round waits for in the
        middle. The others are seen to while the device does the rest of it."""
        brought: dict[Work, Progress] = {}
        for is_guided in (True, False):
            some = [each for each in read if (each[0].request.guide is not None) is is_guided]
            figures = figures_of_round(flight.logits, some)
            for work, outcome, _ in some:
                brought[work] = self._settle(work, outcome, figures.get(work, []))
            if is_guided and self._flights and self._flights[0].is_wanted:
                self._finish(self._flights[0])
        return [brought[work] for work, _, _ in read]

    # the parts of a step

    def _place(self, plan: Plan) -> None:
        """Slots of new requests are filled, and page tables learn of new pages."""
        for request in plan.admitted:
            self.drafting.policy.admit(request.slot)
        placing = Placing.of(plan, self.cache.shape.page_size)
        if self.orders is not None:
            self.orders.place(placing)
        placing.put(self.cache, self.runner.options)

    def _settle(self, work: Work, outcome: Outcome, figures: Sequence[Figures]) -> Progress:
        """What a round brought reaches its request. `figures`: of its tokens, where it asks for log-probabilities."""
        request, tokens = work.request, outcome.tokens
        progress = self._commit(work, outcome)
        taken = progress.num_new
        if request.params.logprobs is not None:
            request.logprobs += told(figures[:taken], tokens[:taken], request.params.logprobs, self.tokenizer)
        request.draft, request.num_refused = outcome.draft, 0
        request.draft_is_predicted, request.draft_is_forced = outcome.predicted, outcome.forced
        if request.guide is not None and not request.finished and request.flying in ([], [work]):
            # nothing that judges the draft is under way: what the grammar forbids need not be judged
            request.num_refused = len(outcome.draft) - request.guide.num_fitting(outcome.draft)
        self.scheduler.update(work, outcome.kept, len(outcome.draft) - request.num_refused)
        if request.finished:
            self.drafting.learn(request)
        return progress

    def _commit(self, work: Work, outcome: Outcome) -> Progress:
        return commit(work, outcome, self.max_model_len, self.watchdog)

    def _recompute_spoilt(self, plan: Sequence[Work]) -> None:
        """Requests whose memory seems to be spoilt start over from the tokens that they have."""
        for work in reversed(plan):  # each goes to the head of the queue
            if work.request.standing.needs_rebuild and not work.request.finished:
                work.request.standing.needs_rebuild = False
                self.scheduler.restart(work.request)

    # beside the steps

    @property
    def _is_staged(self) -> bool:
        return isinstance(self.parts, StagedRound)

    @property
    def drafting(self) -> Drafting:
        return self.parts.drafting

    @property
    def drafter(self) -> Drafter | None:
        return self.drafting.drafter

    @contextmanager
    def drafting_with(self, policy: DepthPolicy, drafter: Drafter | None = None) -> Iterator[None]:
        """For a while another policy says how much is drafted, and perhaps another drafter drafts, which shares the
        cached layers of the engine's own."""
        assert not self.has_work, "the drafter of an engine at work cannot be changed"
        for flight in self._flights:  # of requests that were aborted
            self._hear(flight)
        before = self.drafting
        self.parts.drafting = before.having(policy, drafter or before.drafter)
        try:
            yield
        finally:
            self.parts.drafting = before

    @property
    def num_recordings(self) -> int:
        return 0 if self.graphs is None else self.graphs.num_recordings

    @property
    def recording_seconds(self) -> dict[str, float]:
        """Seconds that warming up spent on recordings, by part of a round."""
        spent = {} if self.graphs is None else self.graphs.record_seconds
        return {f"{part.value} recordings": seconds for part, seconds in spent.items()}

    @property
    def num_recorded_rounds(self) -> int:
        """How many rounds were replayed from recordings."""
        return 0 if self.graphs is None else self.graphs.num_launched

    def replay_ms(self, count: int) -> float | None:
        """Device time of the last recorded round, replayed back to back: a measurement that spoils the requests."""
        return None if self.graphs is None else self.graphs.replay_ms(count)

    def close(self) -> None:
        if self.workers is not None:
            workers, self.workers = self.workers, None
            try:
                with workers.watched():
                    assert self.orders is not None
                    for flight in self._flights:
                        self._hear(flight)
                    self.orders.close()
            except RankLostError:
                pass  # they are gone already
            return_workers(workers)
        self.cache.free()
        if self._grammars is not None:
            self._grammars.trial.close()


def _waits_for_outcome(request: Request) -> bool:
    """Whether what a request's grammar says next depends on a round under way."""
    return request.guide is not None and any(work.emits for work in request.flying)


def _has_draft(work: Work) -> bool:
    """Whether a draft of the drafter's waited for this round."""
    return work.is_round and bool(work.request.draft) and not work.request.draft_is_predicted
