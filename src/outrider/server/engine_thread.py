"""The engine in a thread of its own: jobs come in through a bounded queue, pieces of text go back to the event loop.
Only this thread touches the engine."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field

import torch

from outrider.engine.request import Request
from outrider.llm import LLM
from outrider.server.errors import (
    ApiError,
    bad_request,
    engine_has_ended,
    internal_error,
    past_deadline,
    shutting_down,
    too_busy,
)
from outrider.server.faults import blame, discard, suspects_of
from outrider.server.job import Accepted, Job, Piece
from outrider.server.log import log
from outrider.server.metrics import Metrics, Round
from outrider.server.outbox import Outbox

MAX_FAULTS = 3  # steps that may break with a request among others before it is failed with them
BROKEN_AFTER = 8  # steps in a row that break: the engine itself is broken


@dataclass(frozen=True)
class Limits:
    max_queue: int = 256  # sequences that may wait, beyond those that can run
    max_queued_tokens: int = 4_000_000  # of their prompts together
    deadline: float = 600.0  # seconds that a request may take, waiting included
    stall: float = 60.0  # seconds without progress after which decoding counts as dead


@dataclass(eq=False)
class _Sequence:
    """How much of a request has been sent and counted."""

    job: Job
    index: int
    request: Request
    num_tokens: int = 0
    text_len: int = 0
    rounds: int = 0
    traced: int = 0  # rounds whose draft has been sent
    drafted_at: list[int] = field(default_factory=list)
    accepted_at: list[int] = field(default_factory=list)
    furthest: int = 0  # most rows that it ever had in the cache
    started: bool = False
    last_token: float = 0.0
    num_faults: int = 0


class EngineThread:
    def __init__(self, llm: LLM, limits: Limits, metrics: Metrics) -> None:
        self.llm, self.limits, self.metrics = llm, limits, metrics
        self.capacity = llm.config.max_num_seqs + limits.max_queue
        self.num_steps = 0
        self.last_progress = time.monotonic()
        self.draining = False
        self._engine = llm.engine
        metrics.watch(llm.engine)
        self._wake = threading.Condition()
        self._new: deque[Job] = deque()
        self._taken: deque[Job] = deque()  # out of _new, and not yet given to the engine
        self._unwanted: deque[tuple[Job, ApiError]] = deque()
        self._num_sequences = 0  # in flight; guarded by _wake, as are the next two
        self._num_prompt_tokens = 0
        self._stopping = False
        self._death: ApiError | None = None  # what everybody is told once the thread has ended
        self._sequences: list[_Sequence] = []
        self._outbox = Outbox()
        self._job_seconds = 1.0  # of late
        self._faults_in_row = 0
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)

    # from any thread

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Job) -> None:
        """Raises ApiError where there is no room."""
        size, tokens = len(job.requests), job.num_prompt_tokens
        with self._wake:
            self.check_room(size, tokens)
            self._num_sequences += size
            self._num_prompt_tokens += tokens
            self._new.append(job)
            self._wake.notify()

    def check_room(self, num_sequences: int, num_tokens: int = 0) -> None:
        """Raises ApiError where there is none for so many more."""
        if self._death is not None:
            raise self._refused(self._death)
        if self.draining or self._stopping:
            raise self._refused(shutting_down())
        if num_sequences > self.capacity:
            raise bad_request(f"{num_sequences} sequences at once; this server takes at most {self.capacity}", "n")
        too_long = self._num_sequences and self._num_prompt_tokens + num_tokens > self.limits.max_queued_tokens
        if too_long or self._num_sequences + num_sequences > self.capacity:
            raise self._refused(too_busy("too many requests are waiting: try again later", self._retry_after()))

    def _refused(self, error: ApiError) -> ApiError:
        self.metrics.refused(error.code or "")
        return error

    def abort(self, job: Job, reason: ApiError | None = None) -> None:
        """Does nothing if the job has ended."""
        if not job.closed:
            with self._wake:
                self._unwanted.append((job, reason or ApiError(499, "the client went away", "client_closed")))
                self._wake.notify()

    def drain(self) -> None:
        """No new jobs; those that are here go on."""
        with self._wake:
            self.draining = True

    def stop(self, timeout: float = 10.0) -> None:
        """Ends everything now."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout)

    @property
    def num_sequences(self) -> int:
        return self._num_sequences

    @property
    def is_idle(self) -> bool:
        return self._num_sequences == 0

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self._death is None

    @property
    def is_dead(self) -> bool:
        """It has ended, and not because it was told to."""
        return self._death is not None

    @property
    def is_stalled(self) -> bool:
        return not self.is_idle and time.monotonic() - self.last_progress > self.limits.stall

    @property
    def is_acceptance_dead(self) -> bool:
        watchdog = self._engine.watchdog
        return watchdog is not None and watchdog.is_dead

    def _retry_after(self) -> int:
        turns = self._num_sequences / self.llm.config.max_num_seqs
        return int(min(max(self._job_seconds * turns, 1), 60))

    # the thread

    def _run(self) -> None:
        try:
            _make_current(self.llm.config.torch_device)
            self._loop()
        except BaseException as error:  # beyond repair: nobody is left waiting, and /health/live says so
            self._die(error)

    def _die(self, error: BaseException) -> None:
        """Everybody who waits is told, and so is everybody who comes later."""
        reason = engine_has_ended(error)
        with self._wake:
            self._death = reason
            waiting = [*(sequence.job for sequence in self._sequences), *self._taken, *self._new]
            self._num_sequences = self._num_prompt_tokens = 0
        for job in dict.fromkeys(waiting):
            if not job.closed:
                job.send(reason)
                job.closed = True

    def _loop(self) -> None:
        while True:
            with self._wake:
                while not (self._new or self._unwanted or self._sequences or self._stopping):
                    self._wake.wait()
                unwanted = list(self._unwanted)
                self._taken.extend(self._new)
                self._new.clear()
                self._unwanted.clear()
                stopping = self._stopping
            while self._taken:
                self._take(self._taken[0])
                self._taken.popleft()
            for job, reason in unwanted:
                self._end(job, reason)
            if stopping:
                for job in {sequence.job: None for sequence in self._sequences}:
                    self._end(job, shutting_down())
                return
            self._expire()
            if self._engine.has_work:
                self._step()

    def _take(self, job: Job) -> None:
        if not self._sequences:
            self.last_progress = time.monotonic()  # there was nothing to be done until now
        sequences = [_Sequence(job, index, request) for index, request in enumerate(job.requests)]
        self._sequences += sequences
        try:
            for request in job.requests:
                self._engine.add(request)
        except ValueError as error:
            self._end(job, bad_request(str(error), "max_tokens"))
        except Exception as error:
            self._end(job, internal_error(error))
        else:
            job.send(Accepted())

    def _expire(self) -> None:
        now = time.monotonic()
        for job in {sequence.job: None for sequence in self._sequences if sequence.job.deadline < now}:
            self._end(job, past_deadline())

    def _end(self, job: Job, reason: ApiError) -> None:
        """Before its time."""
        if job.closed:
            return
        for request in job.requests:
            if not request.finished:
                discard(self._engine, request)
        self._outbox.forget(job)
        job.send(reason)
        self._close(job, reason.code or "abort")

    def _close(self, job: Job, outcome: str) -> None:
        job.closed = True
        self._sequences = [sequence for sequence in self._sequences if sequence.job is not job]
        seconds = time.monotonic() - job.submitted
        self._job_seconds += 0.2 * (seconds - self._job_seconds)
        with self._wake:
            self._num_sequences -= len(job.requests)
            self._num_prompt_tokens -= job.num_prompt_tokens
        self.metrics.job_ended(job, outcome, seconds)
        _log_job(job, outcome, seconds)

    def _step(self) -> None:
        begin = time.monotonic()
        try:
            moved = [each for each in self._engine.step() if each.num_new]
            self._faults_in_row = 0
        except Exception as error:
            self._handle(error)
            moved = []
        self.num_steps += 1
        now = time.monotonic()
        self.metrics.stepped(self._engine, now - begin)
        self._log_notices()
        ended = [each for each in self._sequences if self._report(each, begin, now)]
        self._outbox.deliver(now)
        for sequence in ended:
            if sequence.request.error is not None:
                self._end(sequence.job, internal_error(RuntimeError(sequence.request.error)))
        for job in {sequence.job: None for sequence in ended if not sequence.job.closed}:
            if all(request.finished for request in job.requests):
                self._close(job, job.requests[0].finish_reason or "stop")
        if not moved and not ended:
            time.sleep(0)  # a prompt is being read: let the event loop have its turn

    def _log_notices(self) -> None:
        """What the watchdog has seen and done."""
        for notice in self._engine.watchdog.take_notices() if self._engine.watchdog is not None else ():
            log(notice.event, logging.WARNING if notice.is_alarm else logging.INFO, **notice.fields)

    def _report(self, sequence: _Sequence, begin: float, now: float) -> bool:
        """Sends and counts what the step between these times has brought; whether that was the end of it."""
        request, job = sequence.request, sequence.job
        if not sequence.started and (request.slot >= 0 or request.finished):
            sequence.started = True
            job.started = job.started if job.started is not None else begin
            self.metrics.started(begin - job.submitted)
        if request.num_computed > sequence.furthest:
            sequence.furthest = request.num_computed
            self.last_progress = now
        num_new = request.num_outputs - sequence.num_tokens
        if not num_new:
            return False
        self.last_progress = now
        if job.first_token is None:
            job.first_token = now
            self.metrics.first_token(now - job.submitted)
        elif sequence.last_token:
            self.metrics.tokens_came(now - sequence.last_token, num_new)
        sequence.last_token = now
        self._count(sequence, num_new)
        if (job.streams or request.finished) and request.error is None:
            self._outbox.add(job, _piece(sequence))
        sequence.num_tokens, sequence.traced = request.num_outputs, len(request.trace)
        sequence.text_len = len(request.text.text) if request.text is not None else 0
        return request.finished

    def _count(self, sequence: _Sequence, num_new: int) -> None:
        request = sequence.request
        self.metrics.generated(num_new)
        drafted_at, accepted_at = list(request.drafted_at), list(request.accepted_at)
        rounds = drafted_at[0] if drafted_at else 0  # those that had a draft
        if rounds > sequence.rounds:
            drafted = _growth(sequence.drafted_at, drafted_at)
            accepted = _growth(sequence.accepted_at, accepted_at)
            self.metrics.drafted(Round(rounds - sequence.rounds, drafted, accepted, len(request.tokens)))
        sequence.rounds, sequence.drafted_at, sequence.accepted_at = rounds, drafted_at, accepted_at

    # faults

    def _handle(self, error: Exception) -> None:
        """Those to blame are failed; the others go on. A fault that stays ends the engine."""
        self._faults_in_row += 1
        if self._faults_in_row >= BROKEN_AFTER:
            raise error
        reason = internal_error(error)
        suspects = set(suspects_of(self._engine))
        guilty = set(blame(self._engine))
        for sequence in [each for each in self._sequences if each.request in suspects]:
            sequence.num_faults += not guilty
            if sequence.request in guilty or sequence.num_faults >= MAX_FAULTS:
                sequence.request.error = reason.message
                self._end(sequence.job, reason)


def _make_current(device: torch.device) -> None:
    """Which device is current is every thread's own affair."""
    if device.type == "cuda":
        torch.cuda.set_device(torch.cuda.current_device() if device.index is None else device.index)


def _piece(sequence: _Sequence) -> Piece:
    request, begin = sequence.request, sequence.num_tokens
    text_begin = sequence.text_len
    if not sequence.job.streams:
        begin = text_begin = 0
    return Piece(
        index=sequence.index,
        text=request.text.text[text_begin:] if request.text is not None else "",
        token_ids=request.tokens[len(request.prompt) + begin :],
        logprobs=request.logprobs[begin:],
        draft_positions=request.draft_positions[begin:],
        text_ends=request.text_ends[begin:],
        draft=request.trace[-1]["draft"] if len(request.trace) > sequence.traced else [],
        final=request.output(sequence.index) if request.finished else None,
    )


def _growth(before: list[int], after: list[int]) -> list[int]:
    return [now - earlier for now, earlier in zip(after, before + [0] * (len(after) - len(before)), strict=True)]


def _log_job(job: Job, outcome: str, seconds: float) -> None:
    rounds = sum(request.rounds for request in job.requests)
    accepted = sum(sum(request.accepted_at) for request in job.requests)
    log(
        "request",
        id=job.job_id,
        outcome=outcome,
        prompt_tokens=job.num_prompt_tokens,
        cached_tokens=job.requests[0].num_cached,
        completion_tokens=sum(request.num_outputs for request in job.requests),
        ttft=round(job.first_token - job.submitted, 4) if job.first_token is not None else None,
        seconds=round(seconds, 4),
        rounds=rounds,
        drafted=sum(sum(request.drafted_at) for request in job.requests),
        accepted=accepted,
        accept_length=round(1 + accepted / rounds, 3) if rounds else None,
    )
