"""What somebody's grammar has taken of everybody's time: seconds that a thread has computed. Those of the collector of
cyclic garbage are nobody's: in a process with many objects it takes half a second at any moment."""

from __future__ import annotations

import gc
import threading
import time


class _Collected(threading.local):
    begin = seconds = 0.0


_collected = _Collected()


def _note(phase: str, info: dict[str, int]) -> None:
    if phase == "start":
        _collected.begin = time.thread_time()
    else:
        _collected.seconds += time.thread_time() - _collected.begin


gc.callbacks.append(_note)


def seconds_computed() -> float:
    """By this thread, since some moment."""
    return time.thread_time() - _collected.seconds
