"""One engine for several threads. A step moves the requests of all threads, so one thread steps and the others wait
for the same step; nothing else touches the engine or its requests while a step is under way."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TypeVar

import torch

from outrider.engine.engine import Engine
from outrider.engine.request import Request

Value = TypeVar("Value")


class SharedEngine:
    """Lets several threads add requests to one engine, step it, and read what came out."""

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self._engine, self._device = engine, device
        # A plain lock, not a reentrant one: see abort().
        self._changed = threading.Condition(threading.Lock())
        self._is_stepping = False
        self._num_steps = 0
        self._num_visitors = 0  # threads that want between_steps(); no step begins before they had it
        self._unwanted: deque[Request] = deque()  # to be aborted before the next step
        self._is_closed = False

    @contextmanager
    def running(self, requests: Sequence[Request]) -> Iterator[None]:
        """Adds requests to the engine; at the end, those that have not finished are aborted."""
        added: list[Request] = []
        try:
            with self.between_steps():
                for request in requests:
                    self._engine.add(request)
                    added.append(request)
            yield
        finally:
            self.abort(added)

    def step(self) -> None:
        """One step of the engine, for the requests of all threads. Where another thread is stepping already, waits for
        the end of that step instead: it may not have moved the caller's requests."""
        with self._changed:
            seen = self._num_steps
            self._changed.wait_for(lambda: self._num_steps != seen or not (self._is_stepping or self._num_visitors))
            if self._num_steps != seen:
                return
            self.check_open()
            self._abort_unwanted()
            self._is_stepping = True
        try:
            with self._on_device():
                self._engine.step()
        finally:
            with self._changed:
                self._is_stepping = False
                self._num_steps += 1
                self._changed.notify_all()
                self._abort_unwanted()

    @contextmanager
    def between_steps(self) -> Iterator[None]:
        """No step is under way: requests hold still, and the engine may be changed. Be brief, and do not nest it."""
        with self._changed:
            self._num_visitors += 1
            try:
                self._changed.wait_for(lambda: not self._is_stepping)
                self.check_open()
                self._abort_unwanted()
                with self._on_device():
                    yield
            finally:
                self._num_visitors -= 1
                self._changed.notify_all()

    def read(self, look: Callable[[], Value]) -> Value:
        """What `look` finds while no step is under way."""
        with self.between_steps():
            return look()

    def abort(self, requests: Sequence[Request]) -> None:
        """Ends requests that have not finished: now, or where a step is under way, right after it.

        It never waits. The garbage collector may close a stream that nobody reads any more in the middle of a step, in
        the very thread that makes the step or holds the lock; to wait there would be for ever."""
        self._unwanted.extend(request for request in requests if not request.finished)
        if self._unwanted and self._changed.acquire(blocking=False):
            try:
                if not self._is_stepping:
                    self._abort_unwanted()
            finally:
                self._changed.release()

    def close(self, free: Callable[[], None]) -> None:
        """Ends all requests and calls `free`; threads that wait for a request get an error."""
        with self.between_steps():
            self._is_closed = True
            free()

    def _abort_unwanted(self) -> None:
        while self._unwanted and not self._is_closed:
            self._engine.abort(self._unwanted.popleft())

    def check_open(self) -> None:
        """A ValueError after close()."""
        if self._is_closed:
            raise ValueError("this LLM was closed; make a new one")

    def _on_device(self) -> AbstractContextManager[object]:
        """The current CUDA device is a setting of each thread, and a new thread has the first."""
        return torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
