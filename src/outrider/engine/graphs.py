"""Rounds as CUDA graphs: each of their parts is recorded once for every size, then replayed with whoever is seated. A
recording is keyed by sizes and by what is asked of sampling, never by how rows are shared out among requests."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.engine.buffers import Buffers
from outrider.engine.options import Flags
from outrider.engine.request import Work
from outrider.engine.round import Round
from outrider.engine.runner import Runner
from outrider.engine.upload import upload_to
from outrider.types import Hidden, RoundShape

# numbers of requests that rounds are recorded for; those in between take the next larger one
NUM_SEATS = (1, 2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 36, 40, 44, 48, 52, 56, 60, 64,
             72, 80, 88, 96, 104, 112, 120, 128, 144, 160, 176, 192, 224, 256, 320, 384, 448, 512)  # fmt: skip
# rows of rounds in which prompts are read, and how many requests have room in each. On an H200 the linears of an 8B
# read 53,000 tokens a second at 1,024 and at 2,048 rows, 49,000 at 8,192: there is nothing to be had from more.
NUM_ROWS = (64, 128, 192, 256, 384, 512, 640, 768, 1024, 1536, 2048)
FEW_SEATS = (8, 16, 32, 64, 128, 256, 512)
# where requests are many, a round need not have room for everybody's whole draft: some, most, all
MANY_SEATS, NUM_PARTS, MULTIPLE = 16, 3, 8


MAX_UNUSED = 2**30  # bytes that first runs may leave to the next ones
PLAIN = Flags(filtered=False, adjusted=False)
KINDS = (PLAIN, Flags(filtered=True, adjusted=False), Flags(filtered=True, adjusted=True))  # all that is told apart


class Part(Enum):
    """Of a round; see round.py."""

    FORWARD = "forward"
    CHOOSE = "choose"
    DRAFT = "draft"


@dataclass(frozen=True)
class GraphKey:
    """What a part of a round is recorded for; anything else can change from replay to replay."""

    part: Part
    shape: RoundShape
    flags: Flags


class Keys(NamedTuple):
    """Of the parts of a round."""

    forward: GraphKey
    choose: GraphKey
    draft: GraphKey


@dataclass
class Recording:
    graph: torch.cuda.CUDAGraph
    outcomes: Tensor | None  # of a draft: [B, ...], see write_outcome()
    generation: int  # of the options' table


class Graphs:
    def __init__(self, runner: Runner, parts: Round, max_num_seats: int) -> None:
        self._runner, self._parts = runner, parts
        self._max_num_seats = max_num_seats
        lookahead, max_len = runner.cache.shape.lookahead, runner.cache.shape.max_len
        judged = max_num_seats * (1 + lookahead)
        rows = max(judged, NUM_ROWS[-1])
        largest = RoundShape(max_num_seats, rows, judged, lookahead, lookahead, rows, max_len)
        has_drafter = parts.drafting.drafter is not None
        self.buffers = Buffers(runner.cache, runner.vocab_size, largest, has_drafter=has_drafter)
        self._recordings: dict[GraphKey, Recording] = {}
        self._keys: dict[tuple[RoundShape, Flags], Keys] = {}
        self._latest: list[Recording] = []  # the parts of the last round
        self._pool: Any = None  # of memory; all recordings share it, as they never run at once
        self._stream: torch.cuda.Stream | None = None  # that recordings are made on
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
            misses=True,  # one recording for both
        )

    def _at_least(self, count: int, sizes: Sequence[int]) -> int:
        return next(size for size in self._sizes(sizes) if size >= count)

    def row_sizes(self, num_requests: int, depth: int) -> list[int]:
        """Numbers of rows that rounds are recorded for in which so many requests decode."""
        return rows_between(self._at_least(num_requests, NUM_SEATS), depth)

    def round(self, plan: Sequence[Work], shape: RoundShape) -> RecordedRound:
        """Such a round, to be done part by part. What was never recorded is recorded now, before it begins: that
        needs the places where its parts will meet."""
        flags = Flags.of([work.request for work in plan])
        keys = self.keys(shape, flags)
        masked = self.keys(shape, replace(flags, masked=True)) if any(work.request.guide for work in plan) else keys
        self._prepare(keys)
        self._prepare(masked)
        self.num_launched += 1
        self._latest = []
        return RecordedRound(self, plan, shape, (keys, masked))

    def seat(self, plan: Sequence[Work], shape: RoundShape) -> None:
        """Whoever takes part in the next round."""
        table = self._runner.seat_table(plan, shape)
        table[2].clamp_(max=shape.max_drafts)
        upload_to(self.buffers.seat_table(shape.num_seats), table)

    def replay(self, key: GraphKey) -> Recording:
        """Does a part of a round."""
        recording = self._recordings[key]
        recording.graph.replay()
        self._latest.append(recording)
        return recording

    @property
    def num_recordings(self) -> int:
        return len(self._recordings)

    def replay_ms(self, count: int) -> float | None:
        """Device time of the last round, replayed back to back."""
        if not self._latest:
            return None
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(count):
            for recording in self._latest:
                recording.graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / count

    def warm_up(self, shapes: Sequence[RoundShape], *, guided: bool) -> None:
        """Records rounds of these sizes beforehand, for all that may be asked of sampling, which also compiles their
        kernels; the largest first, so that the others find its memory. `guided`: there may be grammars."""
        kinds = [replace(kind, masked=masked) for kind in KINDS for masked in ((False, True) if guided else (False,))]
        for shape in sorted(shapes, key=lambda each: (each.num_rows, each.num_seats), reverse=True):
            for kind in kinds:
                self._prepare(self.keys(shape, kind))

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

    # what is recorded

    def keys(self, shape: RoundShape, flags: Flags) -> Keys:
        """The parts of such a round, and what each depends on."""
        found = self._keys.get((shape, flags))
        if found is None:
            most, passed = self.buffers.largest, replace(shape, depth=0, rests=False)
            judged = replace(passed, num_rows=most.num_rows, max_rows=most.max_rows)
            found = self._keys[shape, flags] = Keys(
                # the same whatever is asked of sampling, and whatever is drafted afterwards
                GraphKey(Part.FORWARD, passed, PLAIN),
                # looks at judged rows alone; where logits are adjusted, filters make no difference to the time
                GraphKey(Part.CHOOSE, judged, replace(flags, filtered=flags.filtered or flags.adjusted)),
                # tokens are sampled like the target's, but their logits are not adjusted
                GraphKey(Part.DRAFT, shape, replace(PLAIN, filtered=flags.filtered and shape.depth > 0)),
            )
        return found

    def _prepare(self, keys: Keys) -> None:
        """Records what is not recorded yet, or was recorded with tables that have been replaced since."""
        for key in keys:
            found, generation = self._recordings.get(key), self._runner.options.generation
            if found is None or (key.flags.adjusted and found.generation != generation):
                self._recordings[key] = self._record(key)

    def _run(self, key: GraphKey) -> Tensor | None:
        runner, buffers, shape = self._runner, self.buffers, key.shape
        seats, layout, passed = buffers.seats(shape.num_seats), buffers.layout(shape), buffers.passed(shape)
        sampling = runner.options.recorded(key.flags)
        if key.part is Part.FORWARD:
            self._parts.forward(runner.pack_seats(seats, shape, sampling, out=layout), passed)
            return None
        step = runner.step(layout, seats, shape, sampling)
        if key.flags.masked or shape.depth:  # where nothing is drafted, nothing forced can be
            step.guidance = buffers.guidance(shape.num_seats)
        if key.part is Part.CHOOSE:
            self._parts.choose(step, passed.logits, out=buffers.verdict(shape))
            return None
        return self._parts.draft(step, passed.hidden, buffers.verdict(shape))

    def _record(self, key: GraphKey) -> Recording:
        """First run with nobody seated, so that kernels are compiled and nothing is changed, then record."""
        begin = time.perf_counter()
        self._clear(key.shape)
        self._run(key)
        torch.cuda.synchronize(self._runner.device)
        compiled = time.perf_counter()
        graph = torch.cuda.CUDAGraph()
        with self._capturing(graph):
            outcomes = self._run(key)
        self._pool = self._pool or graph.pool()
        self.compile_seconds += compiled - begin
        self.record_seconds += time.perf_counter() - compiled
        return Recording(graph, outcomes, self._runner.options.generation)

    @contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """What is launched meanwhile is recorded. (torch.cuda.graph does the same, and gives unused memory back each
        time: for the thousand parts of a warm-up, that is most of the time.)"""
        device = self._runner.device
        unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        if unused > MAX_UNUSED:
            torch.cuda.empty_cache()
        self._stream = self._stream or torch.cuda.Stream(device)
        current = torch.cuda.current_stream(device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            pool = {} if self._pool is None else {"pool": self._pool}
            graph.capture_begin(**pool, capture_error_mode="thread_local")
            try:
                yield
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)

    def _clear(self, shape: RoundShape) -> None:
        """A round in which nobody is seated: no part of it changes anything."""
        runner, buffers, sampling = self._runner, self.buffers, self._runner.options.recorded(PLAIN)
        upload_to(buffers.seat_table(shape.num_seats), runner.seat_table([], shape))
        runner.pack_seats(buffers.seats(shape.num_seats), shape, sampling, out=buffers.layout(shape))
        buffers.guide(None)
        for tensor in vars(buffers.verdict(shape)).values():
            tensor.zero_()


class RecordedRound:
    """From recordings, part by part. `keys`: of the round where grammars say nothing, and where they do."""

    def __init__(self, graphs: Graphs, plan: Sequence[Work], shape: RoundShape, keys: tuple[Keys, Keys]) -> None:
        self._graphs, self._plan, self._shape, self._keys = graphs, plan, shape, keys

    @property
    def logits(self) -> Tensor:
        return self._graphs.buffers.logits(self._shape)

    @property
    def hidden(self) -> Hidden:
        return self._graphs.buffers.passed(self._shape).hidden

    def forward(self) -> None:
        self._graphs.seat(self._plan, self._shape)
        self._graphs.replay(self._keys[0].forward)

    def choose(self, said: tuple[Tensor, Tensor] | None) -> None:
        self._graphs.buffers.guide(said)
        self._graphs.replay(self._keys[said is not None].choose)

    def draft(self) -> Tensor:
        outcomes = self._graphs.replay(self._keys[0].draft).outcomes
        assert outcomes is not None
        return outcomes


def rows_between(num_seats: int, depth: int) -> list[int]:
    """Numbers of rows of rounds in which requests decode with drafts of such a depth: with room for all drafts, and, if
    requests are many, for parts of them."""
    parts = min(NUM_PARTS, 1 + depth) if num_seats >= MANY_SEATS and depth else 1
    rows = [num_seats + -(-num_seats * depth * part // parts) for part in range(1, parts)]
    return [*(-(-size // MULTIPLE) * MULTIPLE for size in rows), num_seats * (1 + depth)]
