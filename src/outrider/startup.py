"""Before the engine is there: importing torch takes seconds, in which Ctrl-C must end the process quietly."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


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
