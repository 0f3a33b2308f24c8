"""Before the engine is there: importing torch takes seconds, in which Ctrl-C must end the process quietly. And what the
parts of opening an engine take."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

CHECKING = "checking the drafter"  # what progress calls it


@contextmanager
def importing() -> Iterator[None]:
    """Around slow imports: an interrupt has its default action there and ends the process at once. Nothing has begun
    that would need tidying up, and an exception in the middle of an import may be taken for a broken package."""
    if threading.current_thread() is not threading.main_thread():  # signals are the main thread's
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@dataclass
class StartupTimes:
    """Seconds that the parts of opening an engine took: models (built, with the tokenizer), weights, cache, check-up of
    the drafter, warm-up."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        begin = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.perf_counter() - begin
