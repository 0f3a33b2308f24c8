"""Processes that serve, and those that other processes have started."""

from __future__ import annotations

import gc
import multiprocessing
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


def end_with_parent() -> None:
    """However the parent ends, and whatever is under way here: there is nobody left to work for."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="outrider-parent", daemon=True).start()


def freeze_heap() -> None:
    """What a server has made to begin with stays. Otherwise the collector of cyclic garbage looks through all of it
    now and then, while everybody waits: some hundred thousand objects, 70 ms with the smallest of models."""
    gc.collect()
    gc.freeze()


@contextmanager
def frozen_heap() -> Iterator[None]:
    """While something is timed: a run of two seconds is not to be judged by one look through the whole heap."""
    freeze_heap()
    try:
        yield
    finally:
        gc.unfreeze()
