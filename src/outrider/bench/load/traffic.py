"""`outrider bench traffic`: tokens a second and latencies by the number of clients, or by request rate, plain and
speculative in turn at every level, so that a noisy machine favours neither side."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outrider.bench.interleave import Progress
from outrider.bench.load.serve_client import Asking
from outrider.bench.load.serve_load import Load, LoadOutcome
from outrider.bench.load.traffic_sides import TrafficSide
from outrider.bench.prompts import PromptText
from outrider.processes import frozen_heap

Note = Callable[[str], None]
MIN_REQUESTS, REQUESTS_OF_A_CLIENT, REQUESTS_AT_A_RATE = 16, 3, 64


@dataclass(frozen=True)
class Level:
    """A level of load: so many clients, or so many requests a second."""

    clients: int | None
    rate: float | None = None

    @property
    def value(self) -> float:
        return self.clients if self.clients is not None else self.rate or 0.0

    @property
    def name(self) -> str:
        if self.clients is not None:
            return f"{self.clients} client{'s' if self.clients != 1 else ''}"
        return f"{self.rate:g} requests/s"


@dataclass(frozen=True)
class TrafficPlan:
    """What is asked of every side, and how often."""

    levels: Sequence[Level]
    prompt_len: int
    answer_len: int
    think_seconds: float
    num_runs: int
    num_prompts: int | None = None  # at each level; None: by its size
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    num_turns: int = 1  # of a chat

    def num_requests(self, level: Level) -> int:
        """Whole chats."""
        if self.num_prompts is not None:
            wanted = self.num_prompts
        elif level.clients is None:
            wanted = REQUESTS_AT_A_RATE
        else:
            wanted = max(MIN_REQUESTS, REQUESTS_OF_A_CLIENT * level.clients)
        return -(-wanted // self.num_turns) * self.num_turns

    @property
    def longest(self) -> int:
        """Tokens of a chat at its end."""
        return self.num_turns * (self.prompt_len + self.answer_len)

    @property
    def most_requests(self) -> int:
        return max(self.num_requests(level) for level in self.levels)

    def load(self, level: Level, run: int) -> Load:
        """The load of a run: the same for both sides; every run has arrivals of its own."""
        think = self.think_seconds if level.clients is not None else 0.0
        number = self.num_requests(level)
        return Load(number, 0, level.clients, level.rate, self.seed + run, think, self.num_turns)

    def asking(self) -> Asking:
        return Asking("", False, self.answer_len, self.temperature, self.seed, ignore_eos=True, top_p=self.top_p)


@dataclass(frozen=True)
class LevelRuns:
    """All that was measured at one level: a list of runs for each side, in the order of the sides."""

    level: Level
    runs: list[list[LoadOutcome]]


@frozen_heap()
def measure_levels(
    sides: Sequence[TrafficSide],
    prompts: Sequence[PromptText],
    plan: TrafficPlan,
    note: Note,
    progress: Progress | None = None,
) -> list[LevelRuns]:
    """At every level: each side once with half as many requests, or as many as there are clients if those are more,
    which is not counted: a server runs for long, and what it learns in its first second is no matter. Then all runs, in
    which the sides take turns to be the first."""
    total, found = len(plan.levels) * (plan.num_runs + 1) * len(sides), []
    steps = itertools.count()

    def run(side: TrafficSide, load: Load, what: str) -> LoadOutcome:
        if progress is not None:
            progress(f"{what}: {side.name}", next(steps), total)
        outcome = side.run(prompts, load)
        failed = [answer.error for answer in outcome.answers if answer.error is not None]
        if failed:
            raise ValueError(f"{len(failed)} of {len(outcome.answers)} requests failed at {what} ({failed[0]})")
        return outcome

    for level in plan.levels:
        warm = replace(plan.load(level, plan.num_runs), request_rate=None)
        num_warm = max(warm.num_prompts // 2, level.clients or MIN_REQUESTS)
        num_warm = -(-num_warm // plan.num_turns) * plan.num_turns
        warm = replace(warm, num_prompts=min(warm.num_prompts, num_warm))
        for side in sides:
            run(side, warm, level.name)
        runs: list[list[LoadOutcome]] = [[] for _ in sides]
        for number in range(plan.num_runs):
            for place in range(len(sides)):
                which = (number + place) % len(sides)
                runs[which].append(run(sides[which], plan.load(level, number), level.name))
        found.append(LevelRuns(level, runs))
        note(_in_a_line(found[-1], sides))
    return found


def output_rate(outcome: LoadOutcome) -> float:
    """Output tokens a second, from the first request that is sent to the last token."""
    return sum(answer.num_tokens or 0 for answer in outcome.answers) / outcome.seconds


def _in_a_line(level: LevelRuns, sides: Sequence[TrafficSide]) -> str:
    rates = [sum(map(output_rate, runs)) / len(runs) for runs in level.runs]
    said = ", ".join(f"{side.name} {rate:.0f} tokens/s" for side, rate in zip(sides, rates, strict=True))
    return f"{level.level.name}: {said}"
