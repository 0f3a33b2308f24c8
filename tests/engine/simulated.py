"""An engine without a model, in simulated time: the real scheduler, the real policy and the sizes that rounds are
recorded for, with what a round takes read from a table that was measured, and drafts that are right as often as is
said. Like on a GPU, a round is planned before the outcome of the one before it is known."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np

from outrider.bench.load.serve_load import Load
from outrider.bench.load.traffic_sides import Clients
from outrider.drafters.base import Drafter
from outrider.engine.drafting import Drafting
from outrider.engine.flight import Flight, landed
from outrider.engine.graphs import Graphs
from outrider.engine.pages import PagePool
from outrider.engine.policy import DepthPolicy, Judged, judged_of
from outrider.engine.request import Request, Work
from outrider.engine.round_sizes import NUM_ROWS
from outrider.engine.scheduler import Scheduler, SchedulerLimits
from outrider.sampling_params import SamplingParams
from outrider.types import Outcome, RoundShape

LOOKAHEAD, NUM_FLYING, NUM_MISSABLE, NUM_PROMPT_ROWS = 5, 2, 64, 1024
RIGHT, WRONG = 1, 0  # tokens: the target always says the former
Rate = Callable[[int, float], float]  # of a request, given its number and when it was sent
Milliseconds = Callable[[RoundShape, int], float]  # of a round, and how many rows of prompts it reads

# Milliseconds, 8B on an H200, fitted to 11,500 rounds of traffic there with fixed and with other depths: 5.6 for 32
# requests, 6.7 with two drafts each, 7.2 to 8.2 with five of which 16 to 128 are judged; beside prompts 20.5 and 25.3
# with 768 and 1,024 rows. Those of 640 are a guess: products of 512 and 768 take four and six waves of a device.
ROWS = (1, 32, 64, 128, 192, 256, 512)
LINEARS = (4.08, 4.7, 4.87, 5.26, 6.1, 6.9, 11.8)
READING_ROWS = (64, 128, 256, 384, 512, 640, 768, 1024, 1536, 2048)  # prompts among them
READING_LINEARS = (5.4, 6.4, 8.8, 11.0, 12.2, 15.3, 18.4, 22.9, 33.8, 44.8)
SEAT, DRAFT_ROW = 0.0231, 0.002  # attention and the choice of tokens, and of each judged draft
DRAFTER, DRAFTER_STEP, DRAFTER_SEAT, DRAFTER_PROMPT_ROW = 0.18, 0.222, 0.0017, 0.0009  # at all, a token, of one seat
CATCHING_UP, CAUGHT_UP_ROW = 0.3, 0.001  # a drafter that has rested


def milliseconds(shape: RoundShape, num_prompt_rows: int) -> float:
    """Of a round."""
    rows, linears = (READING_ROWS, READING_LINEARS) if num_prompt_rows else (ROWS, LINEARS)
    took = float(np.interp(shape.num_rows, rows, linears)) + SEAT * shape.num_seats
    took += DRAFT_ROW * max(shape.num_judged - shape.num_seats, 0)
    if not shape.rests:
        took += DRAFTER + (DRAFTER_STEP + DRAFTER_SEAT * shape.num_seats) * shape.depth
        took += DRAFTER_PROMPT_ROW * num_prompt_rows
    return took


def small_milliseconds(shape: RoundShape, num_prompt_rows: int) -> float:
    """The same for a target of 135M parameters: drafts are dear beside it, and all is over soon."""
    took = 0.93 + 0.006 * shape.num_seats + 0.0007 * shape.num_rows + 0.0017 * num_prompt_rows
    return took if shape.rests else took + 0.1 + 0.16 * shape.depth + 0.0012 * num_prompt_rows


def cpu_milliseconds(shape: RoundShape, num_prompt_rows: int) -> float:
    """The same for a tiny target on two cores: every row is dear."""
    took = 0.9 + 0.1 * (shape.num_seats if num_prompt_rows else shape.num_rows) + 0.12 * num_prompt_rows
    drafts = 0.2 * shape.depth * (1 + 0.1 * shape.num_seats)
    return took if shape.rests else took + 0.05 + drafts + 0.0125 * num_prompt_rows


class SimulatedDrafting(Drafting):
    """What a drafter would do is bookkeeping here."""

    remembers, is_recordable = True, True

    def __init__(self, policy: DepthPolicy) -> None:
        super().__init__(None, policy)
        self.drafter: Drafter = SimpleNamespace(lookahead=LOOKAHEAD)  # type: ignore[assignment]
        self._cache = SimpleNamespace(shape=SimpleNamespace(num_missable=NUM_MISSABLE))  # type: ignore[assignment]
        self.seconds = 0.0  # that the device was busy with what had been missed

    def catch_up(self, requests: list[Request]) -> None:  # type: ignore[override]
        missed = 0
        for request in requests:
            if request.is_followed and (request.num_followed < request.num_computed or _has_rested(request)):
                missed += request.num_computed - request.num_followed
                request.num_followed = request.num_computed
                for work in request.flying:
                    missed, work.rests = missed + work.num_rows, False
        if missed:
            self.seconds += (CATCHING_UP + CAUGHT_UP_ROW * missed) / 1e3


def _has_rested(request: Request) -> bool:
    return any(work.rests for work in request.flying)


@dataclass
class Answer:
    """What becomes of a request: which tokens of its drafts would be right, and the draft that the device holds."""

    request: Request
    is_right: list[bool]
    draft: list[int] = field(default_factory=list)
    num_made: int = 0  # tokens of the answer, as the device knows it


@dataclass
class SimulatedFlight(Flight):
    over: float = 0.0
    num_prompt_rows: int = 0
    found: list[Outcome] = field(default_factory=list)


class SimulatedEngine:
    def __init__(self, policy: DepthPolicy, num_seqs: int, rate: Rate, max_len: int, seed: int = 0) -> None:
        limits = SchedulerLimits(
            num_seqs, NUM_ROWS[-1], max_len, 16, LOOKAHEAD, False, NUM_PROMPT_ROWS, round_sizes=NUM_ROWS
        )
        self.scheduler = Scheduler(limits, PagePool(num_seqs * (max_len // 16 + 4)))
        self.drafting, self.rate = SimulatedDrafting(policy), rate
        self.graphs = Graphs.__new__(Graphs)
        self.graphs._max_num_seats, self.graphs._lookahead, self.graphs._max_len = num_seqs, LOOKAHEAD, max_len
        self.graphs._is_recurrent = False
        self.graphs._parts = SimpleNamespace(drafting=self.drafting)  # type: ignore[assignment]
        self.drafting._row_sizes = self.graphs.row_sizes
        self.now = self._busy_until = 0.0  # seconds
        self._last = 0.0  # when the round before was over
        self._chance, self._answers = random.Random(seed), dict[Request, Answer]()
        self._flights: deque[SimulatedFlight] = deque()
        self.rounds: list[tuple[RoundShape, float, int]] = []  # seconds, and tokens, of every round
        self._max_len = max_len
        self.milliseconds: Milliseconds = milliseconds

    def add(self, request: Request) -> None:
        rate = self.rate(request.seed, self.now)
        right = [self._chance.random() < rate for _ in range((request.params.max_tokens or 0) + 2 * LOOKAHEAD + 2)]
        self._answers[request] = Answer(request, right)
        self.scheduler.add(request)

    def step(self) -> list[Request]:
        """As Engine.step(): whose answers have ended."""
        self._flights = deque(flight for flight in self._flights if flight.is_wanted)
        while len(self._flights) < NUM_FLYING:
            begin, requests = self.now, self.scheduler.at_hand
            depth = self.drafting.depth(requests)
            if depth and self.drafting.may_pause(requests) and self.scheduler.is_crowded(max(depth // 2, 1)):
                depth = 0
            if depth:
                self.graphs.allot_beside(*self.scheduler.beside_prompts)
            plan = self.scheduler.next(depth, flying=bool(self._flights), follows=self.drafting.follows)
            if not plan.work:
                break
            for request in plan.admitted:
                self.drafting.policy.admit(request.slot)
            self._flights.append(self._launch(plan.work, depth, begin))
            self.scheduler.launched(plan.work)
        return self._land(self._flights.popleft()) if self._flights else []

    def _launch(self, plan: list[Work], depth: int, begin: float) -> SimulatedFlight:
        rests = self.drafting.rests(plan, depth)
        if rests:
            self.drafting.plan_rest(plan)
        else:
            self.drafting.catch_up([work.request for work in plan])
        shape = self.graphs.fitted(plan, depth, rests=rests)
        assert shape is not None
        read = sum(work.pending for work in plan if not work.is_round)
        for work in plan:
            work.allowed = min(work.allowed, shape.depth)
        took = self.milliseconds(shape, read) / 1e3 + self.drafting.seconds
        self.drafting.seconds = 0.0
        self._busy_until = max(self._busy_until, begin) + took
        flight = SimulatedFlight(plan, shape, begin, None, over=self._busy_until, num_prompt_rows=read)
        flight.found = [self._outcome(work, shape) for work in plan]  # as the device will find it
        return flight

    def _outcome(self, work: Work, shape: RoundShape) -> Outcome:
        answer = self._answers[work.request]
        if not work.emits:
            return Outcome(0, [], work.pending, [])
        judged = min(work.allowed, len(answer.draft))
        right = 0
        while right < judged and answer.draft[right] == RIGHT:
            right += 1
        answer.num_made += 1 + right
        follows = work.request.is_followed and not shape.rests
        at = answer.num_made
        drafted = [RIGHT if each else WRONG for each in answer.is_right[at : at + shape.depth]] if follows else []
        answer.draft = drafted
        return Outcome(judged, [RIGHT] * (1 + right), work.pending + right, drafted)

    def _land(self, flight: SimulatedFlight) -> list[Request]:
        self.now = max(self.now, flight.over)
        judged, outcomes, ended, taken = list[Judged](), [], [], 0
        for work, outcome in zip(flight.plan, flight.found, strict=True):
            request = work.request
            if not work.is_current:
                continue
            if work.is_round and request.draft and not flight.shape.rests:
                judged.append(judged_of(request, outcome))
            if work.emits:
                outcomes.append(outcome)
            before = request.num_outputs
            for token in outcome.tokens:
                request.append(token, self._max_len)
                if request.finished:
                    break
            taken += request.num_outputs - before
            request.draft = outcome.draft
            self.scheduler.update(work, outcome.kept, len(outcome.draft))
            if request.finished:
                ended.append(request)
                del self._answers[request]
        seconds, self._last = self.now - max(flight.launched, self._last), self.now  # as a Stopwatch has it
        self.rounds.append((flight.shape, seconds, taken))
        rests = flight.shape.rests or not (flight.shape.depth or self.drafting.remembers)
        self.drafting.policy.note(landed(flight, outcomes, judged, seconds, rests))
        return ended


@dataclass
class Traffic:
    """Clients that send their next request when the last one has ended, as in `outrider bench depth`."""

    clients: int
    rate: Rate
    num_requests: int
    prompt: int = 512
    answer: int = 128
    think: float = 0.02
    milliseconds: Milliseconds = milliseconds

    def run(self, policy: DepthPolicy, *, begin: int = 0, seed: int = 0) -> tuple[float, SimulatedEngine]:
        """Tokens a second while all clients are busy, but for the first `begin` requests."""
        engine = SimulatedEngine(policy, self.clients, self.rate, self.prompt + self.answer + 16, seed)
        engine.milliseconds = self.milliseconds
        clients = Clients(Load(self.num_requests, 0, self.clients, None, seed, self.think))
        params = SamplingParams(max_tokens=self.answer, temperature=0, ignore_eos=True)
        running = num_ended = num_sent = num_rounds = 0
        while num_ended < self.num_requests:
            for _, number in clients.take_due(engine.now):
                engine.add(Request(str(number), [RIGHT] * self.prompt, params, seed=number))
                running, num_sent = running + 1, num_sent + 1
            if num_sent == self.num_requests and not num_rounds:
                num_rounds = len(engine.rounds)
            if not running:
                engine.now = clients.next_due
                continue
            for _ in engine.step():
                running, num_ended = running - 1, num_ended + 1
                clients.send_next(engine.now)
        self.total = self.num_requests * self.answer / engine.now
        counted = engine.rounds[:num_rounds]
        return sum(each[2] for each in counted) / sum(each[1] for each in counted), engine
