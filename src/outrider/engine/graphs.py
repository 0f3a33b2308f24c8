"""Rounds as CUDA graphs: verify, sample, agree, commit and draft are recorded once for every number of seats, then
replayed. The host learns the outcome while the next round is under way. Knows no model and no method."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.engine.request import Outcome, Request, Status
from outrider.engine.runner import Runner
from outrider.engine.sampler import adjusts, is_filtered, is_greedy, sampling_of
from outrider.engine.seats import NUM_SEATS, Kind, Seats, fits
from outrider.types import Step

MAX_FLYING = 2  # rounds under way: one runs, the next is already queued

# who goes on decoding while so many rounds are under way, with how many drafts each; nobody: none
Steady = Callable[[int], tuple[list[Request], int]]


@dataclass
class Recording:
    graph: torch.cuda.CUDAGraph
    seats: Seats
    table: Tensor
    logits: Tensor

    def new_copy(self) -> Tensor:
        """For the host."""
        return torch.empty(self.table.shape, dtype=self.table.dtype, pin_memory=self.table.is_cuda)


@dataclass
class Flight:
    """A round under way."""

    requests: list[Request]
    num_drafts: int
    took_off: float  # when, in seconds
    table: Tensor  # pinned memory; good once `landed` has happened
    logits: Tensor
    landed: torch.cuda.Event

    @property
    def passengers(self) -> list[Request | None]:
        """The requests, None for those that have ended or wait to start over: nobody starts while a round is under
        way."""
        return [request if request.status is Status.RUNNING else None for request in self.requests]

    def wait(self) -> float:
        """Until it has landed; says when that was."""
        self.landed.synchronize()
        return time.perf_counter()

    def outcomes(self) -> Iterator[tuple[Request, int, Outcome, Tensor]]:
        """Once it has landed. Of each request that is still there: how many drafts were judged, what the round brought,
        and the logits [J, V] of the judged rows."""
        judged = 1 + self.num_drafts
        logits = self.logits.view(-1, judged, self.logits.shape[-1])
        for number, (request, row) in enumerate(zip(self.passengers, self.table.tolist(), strict=False)):
            if request is not None:
                num_valid, num_drafts, count, kept = row[:4]
                outcome = Outcome(row[4 : 4 + count], kept, row[4 + judged :][:num_drafts])
                yield request, num_valid, outcome, logits[number]


class Graphs:
    """`run` does a round and gives the table of what the host must know [B, ...] and the logits [B * J, V]."""

    def __init__(self, runner: Runner, run: Callable[[Step], tuple[Tensor, Tensor]], max_num_seats: int) -> None:
        self._runner, self._run = runner, run
        self._sizes = sorted({size for size in NUM_SEATS if size < max_num_seats} | {max_num_seats})
        self._nobody = runner.cache.shape.num_slots - 1
        self._recordings: dict[Kind, Recording] = {}
        self._pool: Any = None  # of memory; all recordings share it, as they never run at once
        self._seated: dict[Kind, tuple[tuple[str, int, int], ...]] = {}  # whose options the seats of a recording hold
        self._pinned: dict[tuple[int, ...], list[Tensor]] = {}  # by shape, free ones
        self._flying: deque[Flight] = deque()
        self.num_launched = 0

    def fly(self, steady: Steady, prepare: Callable[[list[Request]], None]) -> Flight | None:
        """The next round that lands, None if there is none. Before, rounds are queued on the device as long as the same
        requests go on decoding: outcomes are not waited for."""
        while len(self._flying) < MAX_FLYING:
            requests, depth = steady(len(self._flying))
            if not requests or not self._can_run(requests):
                break
            if self._flying and (depth == 0) != (self._flying[-1].num_drafts == 0):
                break  # between, a drafter that has rested is shown what it has missed
            if self._flying and any(request.params.logprobs is not None for request in requests):
                break  # the logits of a round last until the next begins
            prepare(requests)
            self._flying.append(self._launch(requests, depth))
        while self._flying:
            flight = self._flying.popleft()
            self._pinned[tuple(flight.table.shape)].append(flight.table)  # it is read before the next one takes off
            if any(flight.passengers):
                return flight
        return None

    def _can_run(self, requests: Sequence[Request]) -> bool:
        """Whether these requests' options can be recorded: what the host must decide in every round cannot."""
        return len(requests) <= self._sizes[-1] and all(map(fits, requests))

    def _launch(self, requests: list[Request], depth: int) -> Flight:
        allowed = [self._allowed(request, depth) for request in requests]
        params = [request.params for request in requests]
        names = tuple((request.request_id, request.slot, most) for request, most in zip(requests, allowed, strict=True))
        kind = Kind(
            num_seats=next(size for size in self._sizes if size >= len(requests)),
            num_drafts=depth,
            greedy=all(map(is_greedy, params)),
            filtered=any(map(is_filtered, params)),
            adjusted=any(map(adjusts, requests)),
        )
        recording = self._recordings.get(kind)
        if recording is None:
            recording = self._recordings[kind] = self._record(kind)
        if self._seated.get(kind) != names:
            sampling = sampling_of(requests, self._runner.vocab_size, self._runner.device)
            recording.seats.fill([request.slot for request in requests], allowed, sampling)
            self._seated[kind] = names
        recording.graph.replay()
        self.num_launched += 1
        free = self._pinned.setdefault(tuple(recording.table.shape), [])
        pinned = free.pop() if free else recording.new_copy()
        pinned.copy_(recording.table, non_blocking=True)
        landed = torch.cuda.Event()
        landed.record()
        return Flight(requests, depth, time.perf_counter(), pinned, recording.logits, landed)

    @property
    def num_recordings(self) -> int:
        return len(self._recordings)

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

    def _allowed(self, request: Request, depth: int) -> int:
        wanted = request.most_drafts()
        return depth if wanted is None else min(wanted, depth)

    def _record(self, kind: Kind) -> Recording:
        """First run with nobody seated, so that kernels are compiled and nothing is changed, then record."""
        device = self._runner.device
        seats = Seats.of(kind, self._nobody, self._runner.vocab_size, device)
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

    def warm_up(self, depths: Collection[int]) -> None:
        """Records the usual kinds beforehand, with so many drafts, which also compiles their kernels."""
        for size in reversed(self._sizes):  # the largest first: the others find its memory
            for greedy, depth in itertools.product((True, False), sorted(depths, reverse=True)):
                kind = Kind(size, depth, greedy=greedy, filtered=False, adjusted=False)
                if kind not in self._recordings:
                    self._recordings[kind] = self._record(kind)

    def _round(self, seats: Seats, kind: Kind) -> tuple[Tensor, Tensor]:
        return self._run(self._runner.pack_round(seats, kind.num_drafts, kind.num_drafts))
