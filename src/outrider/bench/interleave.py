"""Runs in turn: every side answers the same batches, one side after the other, so that all meet the same weather."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from outrider.bench.sides import Prompts, Side, Timing
from outrider.processes import frozen_heap
from outrider.sampling_params import Speculation

Progress = Callable[[str, int, int], None]  # what, done, total
NUM_WARM_UP_TOKENS = 8
PROBE_WIDTH = 8192
NUM_PLACES = 6


@dataclass(frozen=True)
class Spread:
    """The median, the extremes and all values of a number that was measured several times."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def low(self) -> float:
        return min(self.values)

    @property
    def high(self) -> float:
        return max(self.values)

    def to_dict(self) -> dict[str, Any]:
        numbers = {"median": self.median, "min": self.low, "max": self.high, "runs": list(self.values)}
        return {name: _rounded(value) for name, value in numbers.items()}


def _rounded(value: Any) -> Any:
    return [_rounded(item) for item in value] if isinstance(value, list) else round(value, 4)


@dataclass
class Record:
    """All runs of one side. A run is a list of timings, one for each batch."""

    name: str
    pass_bytes: int
    runs: list[list[Timing]] = field(default_factory=list)

    def spread(self, of_run: Callable[[Sequence[Timing]], float]) -> Spread:
        return Spread(tuple(of_run(run) for run in self.runs))

    @property
    def tokens_per_second(self) -> Spread:
        return self.spread(tokens_per_second)

    @property
    def first_token_ms(self) -> Spread:
        return self.spread(lambda run: 1e3 * statistics.fmean(timing.first_token for timing in run))

    @property
    def token_ms(self) -> Spread:
        """Between two tokens of one answer, after the first."""
        return self.spread(lambda run: 1e3 * _decode_seconds(run) / max(sum(len(t.tokens[0]) - 1 for t in run), 1))

    @property
    def step_ms(self) -> Spread:
        """Of one pass of the model after the first; for us with whatever the drafter does in between."""
        return self.spread(lambda run: 1e3 * _decode_seconds(run) / max(sum(t.steps - 1 for t in run), 1))

    @property
    def gigabytes_per_second(self) -> Spread:
        return Spread(tuple(self.pass_bytes / 1e6 / step if step else 0.0 for step in self.step_ms.values))

    @property
    def speculation(self) -> Speculation | None:
        found = [timing.speculation for timing in self.runs[-1] if timing.speculation is not None]
        return sum(found, Speculation()) if found else None

    @property
    def tokens(self) -> list[list[int]]:
        """The answers, which must not change from run to run."""
        return [answer for timing in self.runs[-1] for answer in timing.tokens]

    @property
    def is_steady(self) -> bool:
        return all([answer for timing in run for answer in timing.tokens] == self.tokens for run in self.runs)


def tokens_per_second(run: Sequence[Timing]) -> float:
    return sum(len(answer) for timing in run for answer in timing.tokens) / sum(timing.seconds for timing in run)


def _decode_seconds(run: Sequence[Timing]) -> float:
    return sum(timing.seconds - timing.first_token for timing in run)


@frozen_heap()
def interleave(
    sides: Sequence[Side], batches: Sequence[Prompts], max_tokens: int, num_runs: int, progress: Progress | None = None
) -> list[Record]:
    """Every side once to warm up, then `num_runs` rounds in which each side has a turn, never in the same order twice
    in a row."""
    records = [Record(side.name, side.pass_bytes) for side in sides]
    total = len(sides) * (num_runs + 1)
    done = 0

    def tell(name: str) -> None:
        if progress is not None:
            progress(name, done, total)

    for side in sides:
        tell(f"warming up {side.name}")
        for batch in batches:
            side.answer(batch, min(NUM_WARM_UP_TOKENS, max_tokens))
        done += 1
    for number in range(num_runs):
        for place in range(len(sides)):
            which = (number + place) % len(sides)
            tell(sides[which].name)
            sides[which].start_run()
            records[which].runs.append([sides[which].answer(batch, max_tokens) for batch in batches])
            done += 1
    tell("done")
    return records


def paired_ratio(record: Record, to: Record) -> Spread:
    """How many times as fast, run by run: two neighbours in time are the fairest pair."""
    pairs = zip(record.runs, to.runs, strict=True)
    return Spread(tuple(tokens_per_second(own) / tokens_per_second(other) for own, other in pairs))


def num_equal(record: Record, to: Record) -> int:
    """Answers that are the same, token for token."""
    return sum(own == other for own, other in zip(record.tokens, to.tokens, strict=True))


def memory_bandwidth(device: torch.device) -> float:
    """Gigabytes a second that this device moves at best: the roof under which decoding lives. On a GPU that of a copy,
    read and written."""
    if device.type == "cuda":
        return _copy_bandwidth(device)
    matrix, vector = torch.ones(PROBE_WIDTH, PROBE_WIDTH, device=device), torch.ones(PROBE_WIDTH, device=device)
    best = 0.0
    for _ in range(20):
        begin = time.perf_counter()
        float(torch.mv(matrix, vector)[0])  # asking for a number waits for the device
        best = max(best, matrix.nbytes / 1e9 / (time.perf_counter() - begin))
    return best


def _copy_bandwidth(device: torch.device) -> float:
    """The best of several places: where the two halves of a copy lie decides too, by a tenth."""
    buffers = torch.empty(NUM_PLACES, 2**30, dtype=torch.uint8, device=device)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    best = 0.0
    for place in [*range(1, NUM_PLACES)] * 3:
        begin.record()
        for _ in range(5):
            buffers[place].copy_(buffers[0])
        end.record()
        end.synchronize()
        best = max(best, 5 * 2 * buffers[0].nbytes / 1e6 / begin.elapsed_time(end))
    return best
