"""The front's side of the engine: who may submit, what comes back to whom, and whether the engine lives. Everything
here happens on the event loop."""

from __future__ import annotations

import asyncio
import itertools
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from prometheus_client import CollectorRegistry, generate_latest

from outrider.sampling_params import SamplingParams
from outrider.server.errors import ApiError, bad_request, engine_has_ended, shutting_down, too_busy
from outrider.server.job import Job
from outrider.server.link import Link
from outrider.server.protocol import (
    Abort,
    Accepted,
    AskMetrics,
    Brought,
    Died,
    JobRefused,
    MetricsText,
    Opened,
    Piece,
    Stop,
    Submit,
)
from outrider.server.tally import Tally

METRICS_SECONDS = 5.0  # that the engine has to say its figures


@dataclass(frozen=True)
class QueueLimits:
    max_queue: int = 256  # sequences that may wait, beyond those that can run
    max_queued_tokens: int = 4_000_000  # of their prompts together
    deadline: float = 600.0  # seconds that a request may take, waiting included
    stall: float = 60.0  # seconds without progress after which decoding counts as dead


class ReadyPrompt(NamedTuple):
    """A prompt that is ready for the engine."""

    ids: list[int]  # its tokens; with images, those of its text
    prompt: list[int] | Mapping[str, Any]  # what the engine gets: with images, it makes the tokens itself
    params: SamplingParams


class EngineClient:
    """`why_ended` says what became of an engine that has gone without a word."""

    def __init__(
        self, link: Link, model: Opened, model_name: str, limits: QueueLimits, why_ended: Callable[[], str]
    ) -> None:
        self.model, self.limits = model, limits
        self.capacity = model.max_num_seqs + limits.max_queue
        self.num_sequences = self._num_prompt_tokens = 0  # in flight
        self.num_steps = 0
        self.is_acceptance_dead = False
        self.draining = False
        self._link, self._why_ended = link, why_ended
        self._jobs: dict[int, Job] = {}
        self._numbers = itertools.count()
        self._asked: dict[int, asyncio.Future[bytes]] = {}  # for metrics
        self._last_progress = time.monotonic()
        self._job_seconds = 1.0  # of late
        self._stopping = False
        self._death: ApiError | None = None  # what everybody is told once the engine has ended
        self._registry, tally = CollectorRegistry(), Tally(model_name)
        self._registry.register(tally)
        self._refusals = tally.count("outrider:requests_refused", "Requests there was no room for", "reason")

    # life

    def start(self) -> None:
        """Begins to read from the engine, on the event loop that it will live on."""
        asyncio.get_running_loop().add_reader(self._link.fileno(), self._read)

    def drain(self) -> None:
        """Takes no new jobs; those that are here go on."""
        self.draining = True

    def stop(self) -> None:
        """Ends everything now."""
        if self._stopping:
            return
        self._stopping = True
        self._link.send(Stop())
        self._end_all(shutting_down())

    @property
    def is_idle(self) -> bool:
        return self.num_sequences == 0

    @property
    def is_alive(self) -> bool:
        return self._death is None and not self._stopping

    @property
    def is_dead(self) -> bool:
        """Whether the engine has ended, and not because it was told to."""
        return self._death is not None

    @property
    def is_stalled(self) -> bool:
        return not self.is_idle and time.monotonic() - self._last_progress > self.limits.stall

    # jobs

    def submit(
        self,
        asked: Sequence[ReadyPrompt],
        deadline: float,
        submitted: float,
        *,
        streams: bool,
        job_id: str | None = None,
        begun: Sequence[list[int]] = (),
    ) -> Job:
        """Raises ApiError where there is no room. Times are those of time.monotonic(). `job_id`: what its sender calls
        it; others may call theirs the same. `begun`: tokens that each sequence has already."""
        job = Job(
            number=next(self._numbers),
            job_id=job_id or secrets.token_hex(12),
            prompts=[each.ids for each in asked],
            n=asked[0].params.n,
            deadline=deadline,
            submitted=submitted,
            begun=list(begun),
        )
        self.check_room(job.num_sequences, job.num_prompt_tokens)
        now = time.monotonic()
        prompts, params = [each.prompt for each in asked], [each.params for each in asked]
        message = Submit(job.number, job.job_id, prompts, params, streams, now - submitted, deadline - now, job.begun)
        try:
            self._link.send(message)
        except RecursionError:
            raise bad_request("the request is nested too deeply") from None
        if self.is_idle:
            self._last_progress = now  # there was nothing to be done until now
        self._jobs[job.number] = job
        self._reserve(job)
        return job

    def check_room(self, num_sequences: int, num_tokens: int = 0) -> None:
        """Raises ApiError where there is none for so many more."""
        if self._death is not None:
            raise self._refused(self._death)
        if self.draining or self._stopping:
            raise self._refused(shutting_down())
        if num_sequences > self.capacity:
            raise bad_request(f"{num_sequences} sequences at once; this server takes at most {self.capacity}", "n")
        too_long = self.num_sequences and self._num_prompt_tokens + num_tokens > self.limits.max_queued_tokens
        if too_long or self.num_sequences + num_sequences > self.capacity:
            raise self._refused(too_busy("too many requests are waiting: try again later", self._retry_after()))

    def abort(self, job: Job, reason: ApiError | None = None) -> None:
        """Does nothing if the job has ended."""
        if not job.closed:
            self._link.send(Abort(job.number, reason or ApiError(499, "the client went away", "client_closed")))

    def _reserve(self, job: Job) -> None:
        """Room for it, as much as is known to be needed."""
        self.num_sequences += job.num_sequences
        self._num_prompt_tokens += job.num_prompt_tokens

    def _release(self, job: Job) -> None:
        self.num_sequences -= job.num_sequences
        self._num_prompt_tokens -= job.num_prompt_tokens

    def _refused(self, error: ApiError) -> ApiError:
        self._refusals.add_to(error.code or "", 1)
        return error

    def _retry_after(self) -> int:
        turns = self.num_sequences / self.model.max_num_seqs
        return int(min(max(self._job_seconds * turns, 1), 60))

    # figures

    async def metrics(self) -> bytes:
        """The engine's figures, if it is there to say them, and our own."""
        return await self._engine_metrics() + generate_latest(self._registry)

    async def _engine_metrics(self) -> bytes:
        if not self.is_alive:
            return b""
        number = next(self._numbers)
        answer = self._asked[number] = asyncio.get_running_loop().create_future()
        self._link.send(AskMetrics(number))
        try:
            return await asyncio.wait_for(answer, METRICS_SECONDS)
        except TimeoutError:
            return b""
        finally:
            self._asked.pop(number, None)

    # what the engine says

    def _read(self) -> None:
        """Reads all messages that are there: what has queued up for a stream is then sent together."""
        try:
            for message in self._link.take():
                self._handle(message)
        except (EOFError, OSError):
            self._stop_reading()
            if not self._stopping and not self.is_dead:
                self._die(engine_has_ended(RuntimeError(self._why_ended())))
        except Exception as error:  # what it says makes no sense, and whoever waits for an answer would wait for ever
            self._stop_reading()
            self._die(engine_has_ended(error))

    def _stop_reading(self) -> None:
        asyncio.get_running_loop().remove_reader(self._link.fileno())

    def _handle(self, message: Any) -> None:
        if isinstance(message, Brought):
            self._last_progress = time.monotonic()
            self.num_steps, self.is_acceptance_dead = message.num_steps, message.is_acceptance_dead
            for fields in message.pieces:
                job = self._jobs.get(fields[0])
                if job is not None:
                    job.events.put_nowait(Piece.unpacked(fields))
            for number in message.closed:
                self._close(number)
        elif isinstance(message, Accepted):
            self._accept(message)
        elif isinstance(message, JobRefused):
            self._close(message.job, message.error)
        elif isinstance(message, MetricsText):
            asked = self._asked.get(message.number)
            if asked is not None and not asked.done():
                asked.set_result(message.text)
        else:
            assert isinstance(message, Died), message
            self._die(message.error)

    def _accept(self, message: Accepted) -> None:
        job = self._jobs.get(message.job)
        if job is None:
            return
        if message.prompts is not None:  # with images, they are longer than their text
            self._release(job)
            job.prompts = message.prompts
            self._reserve(job)
        job.events.put_nowait(message)

    def _close(self, number: int, error: ApiError | None = None) -> None:
        job = self._jobs.pop(number, None)
        if job is None:
            return
        if error is not None:
            job.events.put_nowait(error)
        job.closed = True
        self._release(job)
        self._job_seconds += 0.2 * (time.monotonic() - job.submitted - self._job_seconds)

    def _die(self, reason: ApiError) -> None:
        """Everybody who waits is told, and so is everybody who comes later."""
        if self._death is None:
            self._death = reason
            self._end_all(reason)

    def _end_all(self, reason: ApiError) -> None:
        for number in list(self._jobs):
            self._close(number, reason)
        for asked in self._asked.values():
            if not asked.done():
                asked.set_result(b"")
