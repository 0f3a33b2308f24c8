"""Ranks as threads of one process: all that ranks do but start, at the price of a thread. What carries their tensors is
a meeting of threads instead of sockets."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import torch
from torch import Tensor

from outrider.config import EngineConfig, config_to_json
from outrider.engine.channel import Channel
from outrider.engine.team import RankLostError, Team
from outrider.kernels.collective import Ranks
from outrider.worker import follow

SECONDS = 20.0  # that ranks wait for each other
Value = TypeVar("Value")


Letter = tuple[int, Tensor]  # the number of what all do together, or 0; and what it says


class Meeting:
    """Where ranks lay down their tensors and pick up each other's."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._barrier = threading.Barrier(size, timeout=SECONDS)
        self._laid: dict[int, Tensor] = {}
        self._letters: defaultdict[tuple[str, int, int], SimpleQueue[Letter]] = defaultdict(SimpleQueue)

    def meet(self, rank: int, laid: Tensor, pick_up: Callable[[dict[int, Tensor]], None]) -> None:
        self._laid[rank] = laid
        self._barrier.wait()
        pick_up(self._laid)
        self._barrier.wait()

    def post(self, kind: str, rank: int, other: int, letter: Letter) -> None:
        """Nobody waits until it is received."""
        self._letters[kind, rank, other].put(letter)

    def receive(self, kind: str, rank: int, other: int) -> Letter:
        deadline = time.monotonic() + SECONDS
        while not self._barrier.broken and time.monotonic() < deadline:
            with suppress(Empty):
                return self._letters[kind, rank, other].get(timeout=0.1)
        raise threading.BrokenBarrierError

    def break_up(self) -> None:
        self._barrier.abort()


class ThreadGroup:
    """A process group's place, for one rank."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank
        self._number = 0  # of what all do together: in the same order

    def _allgather_base(self, output: Tensor, values: Tensor) -> ThreadGroup:
        self._number += 1

        def pick_up(laid: dict[int, Tensor]) -> None:
            assert len({each.shape for each in laid.values()}) == 1, "ranks speak of different things"
            output.copy_(torch.cat([laid[rank] for rank in sorted(laid)]))

        self._meeting.meet(self._rank, values, pick_up)
        return self

    def broadcast(self, tensor: Tensor, root: int) -> ThreadGroup:
        self._number += 1
        if self._rank == root:
            for rank in set(range(self._meeting.size)) - {root}:
                self._meeting.post("all", root, rank, (self._number, tensor.clone()))
            return self
        number, said = self._meeting.receive("all", root, self._rank)
        assert (number, said.shape) == (self._number, tensor.shape), "ranks speak of different things"
        tensor.copy_(said)
        return self

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> ThreadGroup:
        self._meeting.post("one", self._rank, rank, (0, tensors[0].clone()))
        return self

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> ThreadGroup:
        _, said = self._meeting.receive("one", rank, self._rank)
        assert said.shape == tensors[0].shape, "ranks speak of different things"
        tensors[0].copy_(said)
        return self

    def wait(self) -> None:
        """All has happened already."""

    def is_completed(self) -> bool:
        return True


def thread_teams(size: int, num_stages: int = 1) -> tuple[list[Team], list[Meeting]]:
    """The ranks of each of the stages come one after the other."""
    meetings, in_stage, teams = [Meeting(size), Meeting(size), Meeting(size)], size // num_stages, []
    stages = [Meeting(in_stage) for _ in range(num_stages)]
    for rank in range(size):
        world, control, back = (Ranks(rank, size, ThreadGroup(meeting, rank)) for meeting in meetings)
        place, stage = rank % in_stage, stages[rank // in_stage]
        own = Ranks(place, in_stage, ThreadGroup(stage, place)) if in_stage > 1 else None
        teams.append(Team(world, Channel(control), world if num_stages == 1 else own, num_stages, back))
    return teams, [*meetings, *stages]


def on_ranks(size: int, work: Callable[[Ranks], Value]) -> list[Value]:
    """What every rank finds."""
    return on_teams(size, 1, lambda team: work(team.world))


def on_teams(size: int, num_stages: int, work: Callable[[Team], Value]) -> list[Value]:
    found: dict[int, Value] = {}
    errors: list[BaseException] = []
    teams, meetings = thread_teams(size, num_stages)

    def run(team: Team) -> None:
        try:
            found[team.world.rank] = work(team)
        except BaseException as error:
            errors.append(error)
            for meeting in meetings:
                meeting.break_up()

    threads = [threading.Thread(target=run, args=(team,)) for team in teams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for error in errors:
        if not isinstance(error, threading.BrokenBarrierError):
            raise error
    return [found[rank] for rank in range(size)]


class ThreadWorkers:
    """Stands for Workers: followers are threads."""

    def __init__(self, config: EngineConfig) -> None:
        self.size = config.num_ranks
        self._teams, self._meetings = self._meet(config)
        self.team = self._teams[0]
        self._threads: list[threading.Thread] = []
        self.errors: list[BaseException] = []

    def _meet(self, config: EngineConfig) -> tuple[list[Team], list[Meeting]]:
        return thread_teams(config.num_ranks, config.pipeline_parallel_size)

    def open(self, config: EngineConfig) -> None:
        self._threads = [threading.Thread(target=self._follow, args=(team, config)) for team in self._teams[1:]]
        for thread in self._threads:
            thread.start()

    def _follow(self, team: Team, config: EngineConfig) -> None:
        try:
            follow(team, config_to_json(config), "cpu")
        except BaseException as error:
            self.errors.append(error)
            for meeting in self._meetings:
                meeting.break_up()

    @contextmanager
    def watched(self, *harmless: type[BaseException]) -> Iterator[None]:
        try:
            yield
        except harmless:
            raise
        except threading.BrokenBarrierError:
            raise RankLostError(f"a rank did not come: {self.errors}") from None
        except BaseException:
            for meeting in self._meetings:
                meeting.break_up()
            raise

    def on_lost(self, hear: Any) -> None:
        """Threads are not lost."""

    def end(self) -> None:
        for thread in self._threads:
            thread.join(SECONDS)
            assert not thread.is_alive(), "a rank has not ended"
