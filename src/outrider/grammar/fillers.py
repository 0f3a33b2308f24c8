"""Threads that fill in masks, and stay. xgrammar has its own for a batch of masks, but starts half as many as the
machine has processors for every batch, and ends them with it."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Sequence
from queue import SimpleQueue
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

if TYPE_CHECKING:
    import xgrammar

MAX_THREADS = 8  # that fill at a time, on half of the processors at most


class _Share(NamedTuple):
    """Masks that one thread fills in."""

    matchers: list[xgrammar.GrammarMatcher]
    bits: Tensor
    rows: list[int]
    done: SimpleQueue[BaseException | None]  # is told, also of what went wrong


class Fillers:
    """Belong to one thread, which fills in a share itself, and end with it: where a grammar takes too long and that
    thread is given up, so are they."""

    def __init__(self, num_threads: int) -> None:
        """`num_threads`: the one that asks included."""
        self._own = _one_thread()
        self._queues: list[SimpleQueue[_Share | None]] = [SimpleQueue() for _ in range(num_threads - 1)]
        for queue in self._queues:
            threading.Thread(target=_serve, args=(queue,), name="outrider-filler", daemon=True).start()
        weakref.finalize(self, _end, self._queues)

    def fill(self, matchers: list[xgrammar.GrammarMatcher], bits: Tensor, rows: list[int]) -> None:
        """Row rows[i] of bits [G, W] becomes what matchers[i] allows. Neighbours, often drafts of one request and as
        dear as each other, go to different threads."""
        count = min(1 + len(self._queues), len(matchers))
        done: SimpleQueue[BaseException | None] = SimpleQueue()
        for number, queue in enumerate(self._queues[: count - 1], start=1):
            queue.put(_Share(matchers[number::count], bits, rows[number::count], done))
        self._own.batch_fill_next_token_bitmask(matchers[::count], bits, rows[::count])
        for error in [done.get() for _ in range(count - 1)]:
            if error is not None:
                raise error


def num_fillers() -> int:
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MAX_THREADS, processors // 2))


def fillers() -> Fillers:
    """Those of the thread that asks."""
    found: Fillers | None = getattr(_local, "fillers", None)
    if found is None:
        found = _local.fillers = Fillers(num_fillers())
    return found


def _one_thread() -> xgrammar.BatchGrammarMatcher:
    """What fills in many masks in one call, on the thread that calls; others can go on meanwhile."""
    import xgrammar

    return xgrammar.BatchGrammarMatcher(max_threads=1)


def _serve(queue: SimpleQueue[_Share | None]) -> None:
    own = _one_thread()
    while (share := queue.get()) is not None:
        try:
            own.batch_fill_next_token_bitmask(share.matchers, share.bits, share.rows)
            share.done.put(None)
        except BaseException as error:
            share.done.put(error)
        del share  # its matchers are not needed any more


def _end(queues: Sequence[SimpleQueue[_Share | None]]) -> None:
    for queue in queues:
        queue.put(None)


_local = threading.local()
