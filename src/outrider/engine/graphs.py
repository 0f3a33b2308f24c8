"""Rounds as CUDA graphs: each of their parts is recorded once for every size, then replayed with whoever is seated. A
recording is keyed by sizes and by what is asked of sampling, never by how rows are shared out among requests."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from outrider.engine.buffers import Buffers
from outrider.engine.mailbox import Mailbox
from outrider.engine.options import Flags
from outrider.engine.request import Request, Work
from outrider.engine.round import Round
from outrider.engine.round_sizes import FEW_SEATS, MISSED_ROWS, NUM_ROWS, rows_between, seat_sizes
from outrider.engine.runner import Runner
from outrider.kernels.gpu.graph_upload import upload_graph
from outrider.kernels.mail import take_seats
from outrider.kernels.round import NUM_COUNTS
from outrider.types import Hidden, RoundShape

MAX_UNUSED = 2**30  # bytes that recordings may leave to the next ones
PLAIN = Flags(filtered=False, adjusted=False)
MASKED = Flags(filtered=False, adjusted=False, masked=True)  # filters look at every row, whoever asks for them
OPEN = Flags(filtered=True, adjusted=False, masked=True)
KINDS = (PLAIN, MASKED, OPEN, Flags(filtered=True, adjusted=True, masked=True))  # all that is told apart


class Part(Enum):
    """A part of a round that is recorded by itself; see round.py."""

    FORWARD = "forward"
    CHOOSE = "choose"
    DRAFT = "draft"
    CATCH_UP = "catch-up"  # of no round: a drafter sees what it has missed


BEGINNINGS = (Part.FORWARD, Part.CATCH_UP)  # parts that look up who is seated


@dataclass(frozen=True)
class GraphKey:
    """What a part of a round is recorded for; anything else can change from replay to replay."""

    part: Part
    shape: RoundShape
    flags: Flags


class Keys(NamedTuple):
    """The keys under which the three parts of a round are recorded."""

    forward: GraphKey
    choose: GraphKey
    draft: GraphKey | None  # None: nobody drafts, and the choice of tokens is the last part


@dataclass
class Recording:
    graph: torch.cuda.CUDAGraph
    outcomes: Tensor | None  # of the last part: [R, B, ...] on the host, see Mail
    generation: int  # of the options' table


class Graphs:
    def __init__(self, runner: Runner, parts: Round, max_num_seats: int) -> None:
        self._runner, self._parts = runner, parts
        self._max_num_seats = max_num_seats
        lookahead, max_len = runner.cache.shape.lookahead, runner.cache.shape.max_len
        judged = max_num_seats * (1 + lookahead)
        rows = max(judged, NUM_ROWS[-1])
        largest = RoundShape(max_num_seats, rows, judged, lookahead, lookahead, rows, max_len)
        self._lookahead, self._max_len = lookahead, max_len
        self._is_recurrent = bool(runner.cache.recurrent)
        self._has_drafter = parts.drafting.drafter is not None
        self.buffers = Buffers(runner.cache, runner.vocab_size, largest, keeps_last=parts.drafting.reads_last)
        self.mailbox = Mailbox(runner.device, max_num_seats, NUM_COUNTS + 1 + 2 * lookahead)
        runner.cache.places_late = True
        self._recordings: dict[GraphKey, Recording] = {}
        self._keys: dict[tuple[RoundShape, Flags], Keys] = {}
        self._begun: set[tuple[Part, Flags, int, bool]] = set()  # kinds of parts that have been run
        self._latest: list[Recording] = []  # the parts of the last round
        self._pool: Any = None  # of memory; all recordings share it, as they never run at once
        self._stream: torch.cuda.Stream | None = None  # that recordings are made on
        self.num_launched = 0
        self.num_made = 0  # recordings, those included that were made again
        self.record_seconds = dict.fromkeys(Part, 0.0)  # spent on recording, and on compiling kernels for it
        self._cleared: set[RoundShape] = set()  # of which everything that is made only once has been made
        self._unused = 0  # bytes that recordings hold on to, when what else was unused was given back last

    def fitted(self, plan: Sequence[Work], depth: int, *, rests: bool) -> RoundShape | None:
        """The sizes that such a round is recorded for, None if it is too large. No more drafts
        are judged than the round makes itself; beside prompts those are of one length, or there are none."""
        decoding = all(work.is_round for work in plan)
        depth = depth if decoding else min(depth, 1) * self.reading_depth
        num_seats = self._at_least(len(plan), seat_sizes(depth) if decoding else FEW_SEATS)
        wanted = max(sum(work.pending + min(work.allowed, depth) for work in plan), 1)
        if decoding:
            rows = next(size for size in rows_between(num_seats, depth) if size >= wanted)
            return self._decoding(num_seats, rows, depth, rests=rests)
        larger = [size for size in NUM_ROWS if size >= wanted]
        return self._reading(num_seats, larger[0], depth, rests=rests) if larger else None

    @property
    def reading_depth(self) -> int:
        """Tokens that are drafted beside prompts. Where there is a choice, few: their rows are as dear as those of the
        prompts, and newcomers are waiting for their first token."""
        depths = self._parts.drafting.policy.depths
        return max([depth for depth in depths if 0 < depth <= self._lookahead // 2] or depths)

    def _decoding(self, num_seats: int, rows: int, depth: int, *, rests: bool) -> RoundShape:
        """A round in which nobody reads a prompt. Of several depths only the draft differs: those of up to three tokens
        have the same passes, unless layers are recurrent, which keep a state for every token that may be judged."""
        wide = max(depth, 2) if depth and not self._is_recurrent else depth
        widest = min((1 << wide.bit_length()) - 1, max(self._lookahead, depth))
        return RoundShape(num_seats, rows, rows, widest, depth, 1 + widest, self._max_len, rests, judges_all=True)

    def _reading(self, num_seats: int, rows: int, depth: int, *, rests: bool) -> RoundShape:
        judged = min(num_seats * (1 + depth), rows)
        return RoundShape(num_seats, rows, judged, depth, depth, rows, self._max_len, rests)

    def _at_least(self, count: int, sizes: Sequence[int]) -> int:
        return next(size for size in self._sizes(sizes) if size >= count)

    def row_sizes(self, num_requests: int, depth: int) -> list[int]:
        """Numbers of rows that rounds are recorded for in which so many requests decode."""
        return rows_between(self._at_least(num_requests, seat_sizes(depth)), depth)

    def allot_beside(self, requests: Sequence[Request], num_prompt_rows: int) -> None:
        """The next round reads so many rows of prompts beside these requests. Of drafts that wait, fewer may be worth
        judging there, so that a smaller recording will do."""
        sizes = [size - num_prompt_rows for size in NUM_ROWS if size >= num_prompt_rows + len(requests)]
        if requests and sizes:
            self._parts.drafting.policy.allot_beside(requests, self.reading_depth, sizes)

    def round(self, plan: Sequence[Work], shape: RoundShape) -> RecordedRound:
        """Such a round, to be done part by part. What was never recorded is recorded now, before it begins: that
        needs the places where its parts will meet."""
        for work in plan:
            work.allowed = min(work.allowed, shape.depth)
        flags = Flags.of([work.request for work in plan])
        keys = self.keys(shape, flags)
        masked = self.keys(shape, replace(flags, masked=True)) if any(work.request.guide for work in plan) else keys
        self._prepare(keys)
        self._prepare(masked)
        self.num_launched += 1
        self._latest = []
        return RecordedRound(self, plan, shape, (keys, masked))

    def catch_up(self, plan: Sequence[Work]) -> None:
        """The drafter sees rows that it has missed."""
        while plan:
            ends = itertools.accumulate(work.num_rows for work in plan)
            count = max(sum(end <= MISSED_ROWS[-1] for end in ends), 1)
            part, plan = plan[:count], plan[count:]
            num_seats = self._at_least(count, FEW_SEATS)
            num_rows = max(sum(work.num_rows for work in part), num_seats)
            key = self._missed_key(num_seats, next((size for size in MISSED_ROWS if size >= num_rows), num_rows))
            self._prepare([key])
            place = self.seat(part, key.shape)
            self._recordings[key].graph.replay()
            self.mailbox.ended(place)

    def _missed_key(self, num_seats: int, num_rows: int) -> GraphKey:
        return GraphKey(Part.CATCH_UP, self._reading(num_seats, num_rows, 0, rests=False), PLAIN)

    def seat(self, plan: Sequence[Work], shape: RoundShape) -> int:
        """Says who takes part in the next round; returns its place in the mailbox."""
        cache, table = self._runner.cache, self._runner.seat_table(plan, shape)
        if cache.num_unplaced > self.mailbox.max_pages:
            cache.settle()
        return self.mailbox.tell(table, cache.unplaced())

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
        self.mailbox.repeat(count)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(count):
            for recording in self._latest:
                recording.graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / count

    def warm_up(self, shapes: Sequence[RoundShape]) -> None:
        """Records rounds of these sizes beforehand, for all that may be asked of sampling, which also compiles their
        kernels; the largest first, so that the others find its memory."""
        for shape in sorted(shapes, key=lambda each: (each.num_rows, each.num_seats), reverse=True):
            for kind in KINDS:
                self._prepare(self.keys(shape, kind))

    def warm_up_catching_up(self, num_missable: int) -> None:
        """The same for drafters that have rested. `num_missable`: rows of a request, at most."""
        for seats in self._sizes(FEW_SEATS):
            for number, rows in enumerate(MISSED_ROWS):
                if rows >= seats and (not number or MISSED_ROWS[number - 1] < seats * num_missable):
                    self._prepare([self._missed_key(seats, rows)])

    def usual_shapes(self, depths: Sequence[int], max_rows: int, *, may_rest: bool) -> list[RoundShape]:
        """Every shape that fitted() gives rounds of so many rows, with such depths."""
        shapes = []
        for depth in depths:
            for seats in self._sizes(seat_sizes(depth)):
                rests = may_rest and depth == 0
                shapes += [self._decoding(seats, rows, depth, rests=rests) for rows in rows_between(seats, depth)]
            for seats in self._sizes(FEW_SEATS) if depth in (0, self.reading_depth) else ():
                both = (False, True) if may_rest and depth == 0 else (False,)  # prompts that the drafter sees, or not
                shapes += [
                    self._reading(seats, size, depth, rests=rests)
                    for size in NUM_ROWS
                    if seats <= size <= max_rows
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
            judged = replace(passed, num_rows=most.num_rows, max_rows=most.max_rows, judges_all=False)
            found = self._keys[shape, flags] = Keys(
                # the same whatever is asked of sampling, and whatever is drafted afterwards
                GraphKey(Part.FORWARD, passed, PLAIN),
                # looks at judged rows alone
                GraphKey(Part.CHOOSE, judged, _kind(flags)),
                # tokens are sampled like the target's, but their logits are not adjusted
                GraphKey(Part.DRAFT, shape, replace(PLAIN, filtered=flags.filtered and shape.depth > 0))
                if self._has_drafter
                else None,
            )
        return found

    def _prepare(self, keys: Iterable[GraphKey | None]) -> None:
        """Records what is not recorded yet, or was recorded with tables that have been replaced since."""
        for key in filter(None, keys):
            found, generation = self._recordings.get(key), self._runner.options.generation
            if found is None or (key.flags.adjusted and found.generation != generation):
                begin = time.perf_counter()
                self._recordings[key] = self._record(key)
                self.record_seconds[key.part] += time.perf_counter() - begin
                self.num_made += 1

    def _run(self, key: GraphKey) -> Tensor | None:
        runner, buffers, shape = self._runner, self.buffers, key.shape
        seats, layout, passed = buffers.seats(shape.num_seats), buffers.layout(shape), buffers.passed(shape)
        sampling = runner.options.recorded(key.flags)
        if key.part in BEGINNINGS:
            take_seats(self.mailbox.mail, buffers.seat_table(shape.num_seats), runner.cache.page_table)
        if key.part is Part.CATCH_UP:
            self._parts.drafting.see_missed(runner.pack_seats(seats, shape, sampling, missed=True, out=layout))
            return None
        if key.part is Part.FORWARD:
            self._parts.forward(runner.pack_seats(seats, shape, sampling, out=layout), passed)
            return None
        step = runner.step(layout, seats, shape, sampling)
        if key.flags.masked or shape.depth:  # where nothing is drafted, nothing forced can be
            step.guidance = buffers.guidance(shape.num_seats)
        verdict = buffers.verdict(shape)
        if key.part is Part.CHOOSE:
            self._parts.choose(step, passed.logits, out=verdict)
            if self._has_drafter:
                return None
        return self._parts.draft(step, passed.hidden, verdict, mail=self.mailbox.mail)

    def _run_empty(self, key: GraphKey) -> Tensor | None:
        """Does a part of a round in which nobody is seated."""
        if key.part not in BEGINNINGS:
            return self._run(key)
        place = self.seat([], key.shape)
        self._run(key)
        self.mailbox.ended(place)
        return None

    def _record(self, key: GraphKey) -> Recording:
        """Of every kind of part one is run first, with nobody seated, so that nothing changes: what is made only once
        must not be made while that is recorded. The others are recorded as they are; kernels are compiled and loaded on
        the way."""
        kind = (key.part, key.flags, key.shape.depth, key.shape.rests)
        if kind not in self._begun or key.shape not in self._cleared:
            self._cleared.add(key.shape)
            self._clear(key.shape)
        if kind not in self._begun:
            self._begun.add(kind)
            self._run_empty(key)
        graph = torch.cuda.CUDAGraph()
        with self._capturing(graph):
            outcomes = self._run(key)
        self._pool = self._pool or graph.pool()
        upload_graph(graph)
        return Recording(graph, outcomes, self._runner.options.generation)

    @contextmanager
    def _capturing(self, graph: torch.cuda.CUDAGraph) -> Iterator[None]:
        """What is launched meanwhile is recorded. (torch.cuda.graph does the same, and gives unused memory back each
        time: for the thousand parts of a warm-up, that is most of the time.)"""
        device = self._runner.device
        if _unused_bytes(device) > self._unused + MAX_UNUSED:
            torch.cuda.empty_cache()
            self._unused = _unused_bytes(device)
        self._stream = self._stream or torch.cuda.Stream(device)
        current = torch.cuda.current_stream(device)
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            pool = {} if self._pool is None else {"pool": self._pool}
            graph.capture_begin(**pool, capture_error_mode="relaxed")  # kernels may be loaded meanwhile
            try:
                yield
            finally:
                graph.capture_end()
        current.wait_stream(self._stream)

    def _clear(self, shape: RoundShape) -> None:
        """A round in which nobody is seated: no part of it changes anything."""
        runner, buffers, sampling = self._runner, self.buffers, self._runner.options.recorded(PLAIN)
        place = self.seat([], shape)
        take_seats(self.mailbox.mail, buffers.seat_table(shape.num_seats), runner.cache.page_table)
        self.mailbox.ended(place)
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
        self._place = self._graphs.seat(self._plan, self._shape)
        self._graphs.replay(self._keys[0].forward)

    def writes_over_logits(self, said: tuple[Tensor, Tensor] | None) -> bool:
        return True

    def choose(self, said: tuple[Tensor, Tensor] | None) -> None:
        self._graphs.buffers.guide(said)
        self._last = self._graphs.replay(self._keys[said is not None].choose)

    def outcome(self) -> tuple[Tensor, torch.cuda.Event | None]:
        draft = self._keys[0].draft
        last = self._last if draft is None else self._graphs.replay(draft)
        assert last.outcomes is not None
        return last.outcomes[self._place], self._graphs.mailbox.ended(self._place)


def _unused_bytes(device: torch.device) -> int:
    """Of the memory that was asked for, for whatever comes next."""
    known = torch.cuda.memory_stats(device)
    return int(known["reserved_bytes.all.current"] - known["allocated_bytes.all.current"])


def _kind(flags: Flags) -> Flags:
    """What is recorded for such requests: whatever one of the KINDS can do beyond that costs next to nothing."""
    return next(kind for kind in KINDS if flags.within(kind))
