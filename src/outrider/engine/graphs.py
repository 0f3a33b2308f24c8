"""Rounds as CUDA graphs: verify, sample, agree, commit and draft are recorded once for every number of seats, then
replayed. The host learns the outcome while the next round is under way. Knows no model and no method."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.engine.request import Request, Status
from outrider.engine.runner import Layout, Runner, Seats
from outrider.engine.sampler import is_filtered, is_greedy, is_penalised, sampling_of
from outrider.types import Sampling, Step

MAX_FLYING = 2  # rounds under way: one runs, the next is already queued
SEATS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)


@dataclass(frozen=True)
class Kind:
    """What a recording is made for; anything else can change from replay to replay."""

    num_seats: int
    num_drafts: int
    greedy: bool
    filtered: bool


@dataclass
class Recording:
    graph: torch.cuda.CUDAGraph
    seats: Seats
    table: Tensor
    logits: Tensor


@dataclass
class Flight:
    """A round under way."""

    requests: list[Request]
    lives: list[int]  # of each, how often it had been preempted: a request that starts over has no use for the outcome
    num_drafts: int
    table: Tensor  # pinned memory; good once `landed` has happened
    logits: Tensor
    landed: torch.cuda.Event

    @property
    def passengers(self) -> list[Request | None]:
        """The requests, None for those that have ended or started over since."""
        return [
            request if request.status is Status.RUNNING and request.num_preemptions == life else None
            for request, life in zip(self.requests, self.lives, strict=True)
        ]

    def rows(self) -> list[list[int]]:
        """Waits for the outcome."""
        self.landed.synchronize()
        return self.table.tolist()


class Graphs:
    """`run` does a round and gives the table of what the host must know [B, ...] and the logits [B * J, V]."""

    def __init__(
        self, runner: Runner, run: Callable[[Step], tuple[Tensor, Tensor]], max_num_seats: int, lookahead: int
    ) -> None:
        self._runner, self._run = runner, run
        self._lookahead = lookahead
        self._sizes = sorted({size for size in SEATS if size < max_num_seats} | {max_num_seats})
        self._nobody = runner.cache.shape.num_slots - 1
        self._recordings: dict[Kind, Recording] = {}
        self._pool: Any = None  # of memory; all recordings share it, as they never run at once
        self._seated: dict[Kind, tuple[tuple[str, int, int], ...]] = {}  # whose options the seats of a recording hold
        self._pinned: dict[tuple[int, ...], list[Tensor]] = {}  # by shape, free ones
        self.num_launched = 0

    def can_run(self, requests: Sequence[Request]) -> bool:
        """Whether these requests' options can be recorded: what the host must decide in every round cannot."""
        return len(requests) <= self._sizes[-1] and all(map(_is_recordable, requests))

    def launch(self, requests: list[Request]) -> Flight:
        allowed = [self._allowed(request) for request in requests]
        params = [request.params for request in requests]
        names = tuple((request.request_id, request.slot, most) for request, most in zip(requests, allowed, strict=True))
        kind = Kind(
            num_seats=next(size for size in self._sizes if size >= len(requests)),
            num_drafts=self._lookahead if any(allowed) else 0,
            greedy=all(map(is_greedy, params)),
            filtered=any(map(is_filtered, params)),
        )
        recording = self._recordings.get(kind)
        if recording is None:
            recording = self._recordings[kind] = self._record(kind)
        if self._seated.get(kind) != names:
            sampling = sampling_of(requests, self._runner.vocab_size, self._runner.device)
            self._seat(recording.seats, requests, allowed, sampling)
            self._seated[kind] = names
        recording.graph.replay()
        self.num_launched += 1
        free = self._pinned.setdefault(tuple(recording.table.shape), [])
        pinned = free.pop() if free else torch.empty(recording.table.shape, dtype=torch.long, pin_memory=True)
        pinned.copy_(recording.table, non_blocking=True)
        landed = torch.cuda.Event()
        landed.record()
        lives = [request.num_preemptions for request in requests]
        return Flight(requests, lives, kind.num_drafts, pinned, recording.logits, landed)

    def replay_ms(self, count: int) -> float | None:
        """Device time of the latest recording, replayed back to back."""
        if not self._recordings:
            return None
        graph = list(self._recordings.values())[-1].graph
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(count):
            graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / count

    def give_back(self, flight: Flight) -> None:
        self._pinned[tuple(flight.table.shape)].append(flight.table)

    def _allowed(self, request: Request) -> int:
        wanted = request.most_drafts()
        return self._lookahead if wanted is None else min(wanted, self._lookahead)

    def _seat(self, seats: Seats, requests: Sequence[Request], allowed: Sequence[int], sampling: Sampling) -> None:
        count, device = len(requests), seats.slots.device
        host = torch.tensor([[r.slot for r in requests], allowed], dtype=torch.long).to(device, non_blocking=True)
        seats.slots.fill_(self._nobody)
        seats.allowed.zero_()
        seats.slots[:count], seats.allowed[:count] = host[0], host[1]
        seats.taken.zero_()
        seats.taken[:count] = True
        for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
            vars(seats.sampling)[name][:count] = vars(sampling)[name]

    def _record(self, kind: Kind) -> Recording:
        """First run with nobody seated, so that kernels are compiled and nothing is changed, then record."""
        device = self._runner.device
        count = kind.num_seats
        seats = Seats(
            slots=torch.full((count,), self._nobody, dtype=torch.long, device=device),
            allowed=torch.zeros(count, dtype=torch.long, device=device),
            taken=torch.zeros(count, dtype=torch.bool, device=device),
            sampling=_plain_sampling(kind, self._runner.vocab_size, device),
            layout=Layout.of(count, kind.num_drafts, device),
        )
        stream = torch.cuda.Stream(device)
        stream.wait_stream(torch.cuda.current_stream(device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._round(seats, kind)
        torch.cuda.current_stream(device).wait_stream(stream)
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            table, logits = self._round(seats, kind)
        self._pool = self._pool or graph.pool()
        return Recording(graph, seats, table, logits)

    def _round(self, seats: Seats, kind: Kind) -> tuple[Tensor, Tensor]:
        return self._run(self._runner.pack_round(seats, kind.num_drafts, kind.num_drafts))


def _is_recordable(request: Request) -> bool:
    params = request.params
    free = params.logit_bias is None and params.allowed_token_ids is None and not request.bad_words
    alone = request.guide is None and request.prediction is None
    return free and alone and not is_penalised(params) and not params.min_tokens


def _plain_sampling(kind: Kind, vocab_size: int, device: torch.device) -> Sampling:
    """Options that can be recorded, for everybody the same at first."""
    count = kind.num_seats

    def column(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.full((count,), value, dtype=dtype, device=device)

    return Sampling(
        temperature=column(0.0 if kind.greedy else 1.0),
        top_k=column(vocab_size, torch.long),
        top_p=column(1.0),
        min_p=column(0.0),
        seed=column(0, torch.long),
        repetition=column(1.0),
        presence=column(0.0),
        frequency=column(0.0),
        prompt_len=column(0, torch.long),
        min_len=column(0, torch.long),
        end_ids=torch.full((count, 1), -1, dtype=torch.long, device=device),
        bias=None,
        bad_words=None,
        greedy=kind.greedy,
        filtered=kind.filtered,
        penalised=False,
        bounded=False,
    )
