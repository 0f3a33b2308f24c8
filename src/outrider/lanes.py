"""Work beside a loop that must not wait: threads for work of one kind, so that it cannot keep work of another kind
waiting, and a queue with an end."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

from outrider.overload import OverloadError

Result = TypeVar("Result")


class Lane:
    """`max_wait`: seconds after which what is still waiting is not begun any more."""

    def __init__(
        self, name: str, num_threads: int, max_waiting: int, *, max_wait: float = 20.0, niceness: int = 0
    ) -> None:
        self.name, self._most, self._max_wait = name, num_threads + max_waiting, max_wait
        self._count, self._lock = 0, threading.Lock()
        self._threads = ThreadPoolExecutor(num_threads, f"outrider-{name}", _yield_to_others, (niceness,))

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """OverloadError where too much is waiting already; the future may hold it too."""
        with self._lock:
            if self._count >= self._most:
                raise self._overload()
            self._count += 1
        begin = time.monotonic()

        def run() -> Result:
            if time.monotonic() - begin > self._max_wait:
                raise self._overload()
            return work()

        future = self._threads.submit(run)
        future.add_done_callback(self._done)
        return future

    def close(self) -> None:
        """What runs is not waited for."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _done(self, future: Future[Result]) -> None:
        with self._lock:
            self._count -= 1

    def _overload(self) -> OverloadError:
        return OverloadError(f"too much is asked for at once ({self.name}): try again later")


def _yield_to_others(niceness: int) -> None:
    """Linux has a niceness for every thread; those that it starts inherit it."""
    if niceness:
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
