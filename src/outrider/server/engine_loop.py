"""The engine's side of the server: jobs come in as messages, and what steps bring goes out as messages. One thread runs
the loop, and only it touches the engine (`request_preparation.py` says what is done beside it)."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch

from outrider.engine.request import Progress, Request
from outrider.engine.team import RankLostError
from outrider.llm import LLM
from outrider.server.errors import (
    ApiError,
    bad_request,
    engine_has_ended,
    internal_error,
    past_deadline,
    shutting_down,
)
from outrider.server.faults import blame, discard, suspects_of
from outrider.server.link import Link
from outrider.server.log import log
from outrider.server.metrics import Metrics
from outrider.server.protocol import (
    Abort,
    Accepted,
    AskMetrics,
    Brought,
    Died,
    JobRefused,
    MetricsText,
    Opened,
    Stop,
    Submit,
)
from outrider.server.request_preparation import Prepared, RequestPreparation
from outrider.server.task import Task, TaskSequence

if TYPE_CHECKING:
    from outrider.training.online import OnlineLearner

MAX_FAULTS = 3  # steps that may break with a request among others before it is failed with them
BROKEN_AFTER = 8  # steps in a row that break: the engine itself is broken
BEAT = 0.25  # seconds after which the front hears that requests get on, though nobody has a token yet


_Message = Submit | Prepared | Abort | Stop | BaseException


def opened(llm: LLM) -> Opened:
    return Opened(
        origin=str(llm.config.model),
        max_model_len=llm.max_model_len,
        vocab_size=llm.target.vocab_size,
        max_num_seqs=llm.config.max_num_seqs,
        num_speculative_tokens=llm.engine.lookahead,
        memory={**vars(llm.budget), "num_tokens": llm.budget.num_tokens},
        memory_rows=llm.budget.rows(),
    )


class EngineLoop:
    def __init__(self, llm: LLM, link: Link, model_name: str, learner: OnlineLearner | None = None) -> None:
        self._llm, self._link, self._learner = llm, link, learner
        self._engine = llm.engine
        self._metrics = Metrics(model_name)
        self._metrics.watch(llm.engine)
        self._wake = threading.Condition()
        self._inbox: deque[_Message] = deque()  # guarded by _wake
        self._tasks: dict[int, Task] = {}
        self._preparation = RequestPreparation(llm, model_name, self._tasks.__contains__, self._put)
        self._sequences: dict[Request, TaskSequence] = {}
        self._num_steps = 0
        self._last_sent = 0.0
        self._was_acceptance_dead = False
        self._faults_in_row = 0
        self._stopping = False

    def run(self) -> bool:
        """Until it is told to stop, or nobody is left to tell it; false where it had to end before."""
        receiver = threading.Thread(target=self._receive, name="outrider-receive", daemon=True)
        receiver.start()
        if self._engine.workers is not None:
            self._engine.workers.on_lost(self._put)
        try:
            _make_current(self._llm.config.torch_device)
            self._loop()
        except BaseException as error:  # beyond repair: the front tells everybody
            self._link.send(Died(engine_has_ended(error)))
            return False
        finally:
            self._preparation.close()
        return True

    def _receive(self) -> None:
        try:
            while True:
                message = self._link.receive()
                if isinstance(message, AskMetrics):  # also while a step takes long
                    self._link.send(MetricsText(message.number, self._metrics.text()))
                else:
                    self._put(message)
        except (EOFError, OSError):
            self._put(Stop())
        except BaseException as error:  # or everybody would wait for ever
            self._put(error)

    def _put(self, message: _Message) -> None:
        with self._wake:
            self._inbox.append(message)
            self._wake.notify()

    def _loop(self) -> None:
        while not self._stopping:
            if not self._sequences and self._learner is not None:
                while not self._inbox and self._learner.work():  # a step at a time, while nobody wants anything
                    pass
            with self._wake:
                if not (self._inbox or self._sequences):
                    self._wake.wait(BEAT if self._tasks else None)  # those that are prepared have a deadline too
                messages = list(self._inbox)
                self._inbox.clear()
            for message in messages:
                self._handle_safely(message)
            self._expire()
            if self._sequences and not self._stopping:
                self._step()

    def _handle_safely(self, message: _Message) -> None:
        """What goes wrong with one job is that job's affair, unless it goes on and on."""
        try:
            self._handle(message)
        except Exception as error:
            job = _job_of(message)
            self._faults_in_row += 1
            if job is None or self._faults_in_row >= BROKEN_AFTER:
                raise
            task, reason = self._tasks.get(job), internal_error(error)
            if task is not None:
                self._end(task, reason)
            else:
                self._link.send(JobRefused(job, reason))

    def _handle(self, message: _Message) -> None:
        if isinstance(message, Submit):
            self._tasks[message.job] = Task.of(message)
            prepared = self._preparation.start(message)
            if prepared is not None:
                self._take(message, prepared.made)
        elif isinstance(message, Prepared):
            self._take(message.asked, message.made)
        elif isinstance(message, Abort):
            task = self._tasks.get(message.job)
            if task is not None:
                self._end(task, message.error)
        elif isinstance(message, BaseException):
            raise message
        else:
            self._stopping = True
            for task in list(self._tasks.values()):
                self._end(task, shutting_down())

    # jobs come and go

    def _take(self, asked: Submit, made: list[Request] | ApiError) -> None:
        task = self._tasks.get(asked.job)
        if task is None:  # it was ended meanwhile
            return
        if isinstance(made, ApiError):  # it never was one of the engine's
            del self._tasks[asked.job]
            self._link.send(JobRefused(asked.job, made))
            return
        task.take(made)
        self._sequences |= {request: TaskSequence(task, index, request) for index, request in enumerate(made)}
        try:
            for request in made:
                if not request.finished:
                    self._engine.add(request)
        except ValueError as error:
            self._end(task, bad_request(str(error), "max_tokens"))
        except Exception as error:
            self._end(task, internal_error(error))
        else:
            is_new = any(isinstance(prompt, Mapping) for prompt in asked.prompts)
            self._link.send(Accepted(task.job, [each.prompt for each in made[:: task.n]] if is_new else None))
            self._tell([Progress(request) for request in made if request.finished], time.monotonic())

    def _expire(self) -> None:
        now = time.monotonic()
        for task in [task for task in self._tasks.values() if task.deadline < now]:
            self._end(task, past_deadline())

    def _end(self, task: Task, reason: ApiError) -> None:
        """Before its time."""
        for request in task.requests:
            if not request.finished:
                discard(self._engine, request)
        self._close(task, reason.code or "abort")
        self._link.send(JobRefused(task.job, reason))

    def _close(self, task: Task, outcome: str) -> None:
        del self._tasks[task.job]
        for request in task.requests:
            self._sequences.pop(request, None)
        seconds = time.monotonic() - task.submitted
        self._metrics.task_ended(task, outcome, seconds)
        task.log_end(outcome, seconds)

    # steps

    def _step(self) -> None:
        begin = time.monotonic()
        try:
            brought = self._engine.step()
            self._faults_in_row = 0
        except RankLostError:
            raise  # nobody is to blame, and nothing can go on
        except Exception as error:
            self._blame(error)
            brought = self._untold()
        self._num_steps += 1
        now = time.monotonic()
        self._metrics.stepped(self._engine, now - begin)
        self._log_notices()
        self._tell(brought, now)

    def _tell(self, brought: list[Progress], now: float) -> None:
        """Everybody hears what a step has brought, in one message."""
        pieces, ended = [], []
        for progress in brought:
            sequence = self._sequences.get(progress.request)
            if sequence is None:  # it was ended meanwhile
                continue
            self._count(sequence, progress, now)
            request = progress.request
            if not (progress.num_new or request.finished):
                continue
            if (sequence.task.streams or request.finished) and request.error is None:
                pieces.append(sequence.piece().packed())
            sequence.note_told()
            if request.finished:
                ended.append(sequence)
        failed = {each.task: each.request for each in ended if each.request.error is not None}
        done = [task for task in dict.fromkeys(each.task for each in ended) if task.finished and task not in failed]
        for task in done:
            self._close(task, task.requests[0].finish_reason or "stop")
        is_dead = self._engine.watchdog is not None and self._engine.watchdog.is_dead
        is_due = bool(brought) and (now - self._last_sent >= BEAT or is_dead != self._was_acceptance_dead)
        if pieces or done or is_due:
            self._link.send(Brought(self._num_steps, is_dead, pieces, [task.job for task in done]))
            self._last_sent, self._was_acceptance_dead = now, is_dead
        for task, request in failed.items():
            self._end(task, _failure(request))

    def _count(self, sequence: TaskSequence, progress: Progress, now: float) -> None:
        request, task = sequence.request, sequence.task
        if not sequence.started and request.first_admitted is not None:
            sequence.started = True
            task.started = task.started if task.started is not None else request.first_admitted
            self._metrics.started(request.first_admitted - task.submitted)
        if not progress.num_new:
            return
        if task.first_token is None:
            task.first_token = now
            self._metrics.first_token(now - task.submitted)
        elif sequence.last_token is not None:
            self._metrics.tokens_came(now - sequence.last_token, progress.num_new)
        sequence.last_token = now
        self._metrics.generated(progress.num_new)
        if progress.num_drafted:
            self._metrics.drafted(progress)

    def _log_notices(self) -> None:
        """What the watchdog has seen and done."""
        for notice in self._engine.watchdog.take_notices() if self._engine.watchdog is not None else ():
            log(notice.event, logging.WARNING if notice.is_alarm else logging.INFO, **notice.fields)

    # faults

    def _blame(self, error: Exception) -> None:
        """Those to blame are failed; the others go on. A fault that stays ends the engine."""
        self._faults_in_row += 1
        if self._faults_in_row >= BROKEN_AFTER:
            raise error
        reason = internal_error(error)
        suspects = set(suspects_of(self._engine))
        guilty = set(blame(self._engine))
        for sequence in [each for each in self._sequences.values() if each.request in suspects]:
            sequence.num_faults += not guilty
            if sequence.request in guilty or sequence.num_faults >= MAX_FAULTS:
                sequence.request.error = reason.message
                if sequence.task.job in self._tasks:
                    self._end(sequence.task, reason)

    def _untold(self) -> list[Progress]:
        """What was committed in a step that broke, and while those to blame were looked for."""
        found = [Progress(each.request, each.num_new) for each in self._sequences.values()]
        return [each for each in found if each.num_new]


def _job_of(message: _Message) -> int | None:
    if isinstance(message, Prepared):
        return message.asked.job
    return message.job if isinstance(message, Submit | Abort) else None


def _failure(request: Request) -> ApiError:
    assert request.error is not None
    if request.guide is not None and request.guide.is_too_slow:
        return bad_request(request.error)
    return internal_error(RuntimeError(request.error))


def _make_current(device: torch.device) -> None:
    """Which device is current is every thread's own affair."""
    if device.type == "cuda":
        torch.cuda.set_device(torch.cuda.current_device() if device.index is None else device.index)
