"""Rounds as CUDA graphs: recorded once for every size, then replayed with whoever is seated. A recording is keyed by
sizes and by what is asked of sampling, never by how rows are shared out among requests."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outrider.engine.options import Flags
from outrider.engine.request import Work
from outrider.engine.runner import Runner
from outrider.types import RoundShape, Seats, Step

# numbers of requests that rounds are recorded for; those in between take the next larger one
NUM_SEATS = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 64,
             72, 80, 88, 96, 104, 112, 120, 128, 144, 160, 176, 192, 224, 256, 320, 384, 448, 512)  # fmt: skip
# rows of rounds in which prompts are read, and how many requests have room in each. On an H200 the linears of an 8B
# read 53,000 tokens a second at 1,024 and at 2,048 rows, 49,000 at 8,192: there is nothing to be had from more.
NUM_ROWS = (64, 128, 192, 256, 384, 512, 640, 768, 1024, 1536, 2048)
FEW_SEATS = (8, 16, 32, 64, 128, 256, 512)
# where requests are many, a round need not have room for everybody's whole draft: some, most, all
MANY_SEATS, NUM_PARTS, MULTIPLE = 16, 3, 8


@dataclass(frozen=True)
class GraphKey:
    """What a round is recorded for; anything else can change from replay to replay."""

    shape: RoundShape
    flags: Flags


@dataclass(frozen=True)
class Result:
    """What a round leaves on the device for the host."""

    outcomes: Tensor  # [B, ...] see kernels/round.py
    logits: Tensor  # [L, V]


@dataclass
class Recording:
    graph: torch.cuda.CUDAGraph
    seats: Tensor  # [4, B] see Seats
    result: Result
    generation: int  # of the options' table


class Graphs:
    """`run` does a round on the device."""

    def __init__(self, runner: Runner, run: Callable[[Step], Result], max_num_seats: int) -> None:
        self._runner, self._run = runner, run
        self._max_num_seats = max_num_seats
        self._recordings: dict[GraphKey, Recording] = {}
        self._pool: Any = None  # of memory; all recordings share it, as they never run at once
        self.num_launched = 0
        self.compile_seconds = self.record_seconds = 0.0  # spent on first runs, which compile kernels, and on recording

    def fitted(self, plan: Sequence[Work], shape: RoundShape) -> RoundShape | None:
        """The sizes that such a round is recorded for, None if it is too large. Of longer drafts than the round makes
        itself, only as much is judged."""
        decoding = all(work.is_round for work in plan)
        num_seats = self._at_least(len(plan), NUM_SEATS if decoding else FEW_SEATS)
        drafts = sum(min(work.allowed, shape.depth) for work in plan)
        wanted = max(sum(work.pending for work in plan) + drafts, 1)
        judged = num_seats * (1 + shape.depth)
        if decoding:
            rows = judged = next(size for size in rows_between(num_seats, shape.depth) if size >= wanted)
        else:
            larger = [size for size in NUM_ROWS if size >= wanted]
            if not larger:
                return None
            rows = larger[0]
            judged = min(judged, rows)
        return replace(
            shape,
            num_seats=num_seats,
            num_rows=rows,
            num_judged=judged,
            max_drafts=shape.depth,
            max_rows=1 + shape.depth if decoding else rows,
            max_len=self._runner.cache.shape.max_len,
        )

    def _at_least(self, count: int, sizes: Sequence[int]) -> int:
        return next(size for size in self._sizes(sizes) if size >= count)

    def row_sizes(self, num_requests: int, depth: int) -> list[int]:
        """Numbers of rows that rounds are recorded for in which so many requests decode."""
        return rows_between(self._at_least(num_requests, NUM_SEATS), depth)

    def launch(self, plan: Sequence[Work], shape: RoundShape) -> Result:
        """Replays a round, after recording it where it is the first of its size."""
        key = GraphKey(shape, Flags.of([work.request for work in plan]))
        recording = self._recordings.get(key)
        if recording is None or (key.flags.adjusted and recording.generation != self._runner.options.generation):
            recording = self._recordings[key] = self._record(key)
        table = self._runner.seat_table(plan, shape)
        table[2].clamp_(max=shape.max_drafts)
        recording.seats.copy_(self._runner.cache.upload(table))
        recording.graph.replay()
        self.num_launched += 1
        return recording.result

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

    def warm_up(self, shapes: Sequence[RoundShape]) -> None:
        """Records rounds of these sizes beforehand, which also compiles their kernels; the largest first, so that the
        others find its memory."""
        for shape in sorted(shapes, key=lambda each: (each.num_rows, each.num_seats), reverse=True):
            key = GraphKey(shape, Flags(filtered=False, adjusted=False))
            if key not in self._recordings:
                self._recordings[key] = self._record(key)

    def usual_shapes(self, depths: Sequence[int], max_rows: int, *, may_rest: bool) -> list[RoundShape]:
        """What fitted() says for rounds of so many rows, with such depths: everybody decodes, or prompts are read, the
        latter with no drafts and with as many as there can be. The others are recorded when they are first met."""
        max_len = self._runner.cache.shape.max_len
        shapes = []
        for depth in depths:
            for seats in self._sizes(NUM_SEATS):
                rests = may_rest and depth == 0
                shapes += [
                    RoundShape(seats, rows, rows, depth, depth, 1 + depth, max_len, rests)
                    for rows in rows_between(seats, depth)
                ]
            for seats in self._sizes(FEW_SEATS) if depth in (min(depths), max(depths)) else ():
                sizes = [size for size in NUM_ROWS if size <= max_rows and size >= seats]
                judged = seats * (1 + depth)
                both = (False, True) if may_rest and depth == 0 else (False,)  # prompts that the drafter sees, or not
                shapes += [
                    RoundShape(seats, size, min(judged, size), depth, depth, size, max_len, rests)
                    for size in sizes
                    for rests in both
                ]
        return shapes

    def _sizes(self, sizes: Sequence[int]) -> list[int]:
        return [size for size in sizes if size < self._max_num_seats] + [self._max_num_seats]

    def _record(self, key: GraphKey) -> Recording:
        """First run with nobody seated, so that kernels are compiled and nothing is changed, then record."""
        device, options = self._runner.device, self._runner.options
        begin = time.perf_counter()
        seats = self._empty_seats(key.shape)
        self._round(seats, key)
        torch.cuda.synchronize(device)
        compiled = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            result = self._round(seats, key)
        self._pool = self._pool or graph.pool()
        self.compile_seconds += compiled - begin
        self.record_seconds += time.perf_counter() - compiled
        return Recording(graph, seats, result, options.generation)

    def _empty_seats(self, shape: RoundShape) -> Tensor:
        return self._runner.seat_table([], shape).to(self._runner.device)

    def _round(self, seats: Tensor, key: GraphKey) -> Result:
        sampling = self._runner.options.recorded(key.flags)
        return self._run(self._runner.pack_seats(Seats.of(seats), key.shape, sampling))


def rows_between(num_seats: int, depth: int) -> list[int]:
    """Numbers of rows of rounds in which requests decode with drafts of such a depth: with room for all drafts, and, if
    requests are many, for parts of them."""
    parts = min(NUM_PARTS, 1 + depth) if num_seats >= MANY_SEATS and depth else 1
    rows = [num_seats + -(-num_seats * depth * part // parts) for part in range(1, parts)]
    return [*(-(-size // MULTIPLE) * MULTIPLE for size in rows), num_seats * (1 + depth)]
