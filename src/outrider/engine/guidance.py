"""What grammars say about a round, written down on the host for the device; see Guidance. A thread beside the engine's
asks them: one that takes too long is left behind with it, and its request is failed alone."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from queue import SimpleQueue

import torch
from torch import Tensor

from outrider.engine.request import Work
from outrider.grammar.masks import Unfilled, fill_masks
from outrider.types import RoundShape

MAX_SECONDS = 1.0  # that everybody waits for the grammars of a round, if they compute all the time
PATIENCE = 3  # times as long at most: a machine may have stood still, or others may compute
TOO_SLOW = "its grammar takes too long to follow: make it simpler"


def guidance_of(plan: Sequence[Work], shape: RoundShape, num_judged: int) -> tuple[Tensor, Tensor] | None:
    """Head [B, 3 J] and bits [G, W] of a plan whose requests' drafts are known, None where no grammar has a say in it.
    `num_judged`: J."""
    guided = {seat: work for seat, work in enumerate(plan) if _is_guided(work)}
    fills_apart = False
    while guided:
        asked = _Asked(guided, shape, num_judged, fills_apart)
        if _beside.run(asked.run, MAX_SECONDS):
            return asked.said()
        if asked.seat is None:  # all were being filled in together: once more, one after the other
            fills_apart = True
        else:
            _fail(guided.pop(asked.seat))
    return None


def _is_guided(work: Work) -> bool:
    guide = work.request.guide
    if guide is None or not work.emits or not work.is_current:
        return False
    if guide.is_too_slow:
        _fail(work)
    return work.request.error is None


def _fail(work: Work) -> None:
    """Its grammar is not asked any more. The request ends with the token of this round, whatever that is."""
    assert work.request.guide is not None
    work.request.guide.is_too_slow = True
    work.request.error = TOO_SLOW


class _Asked:
    """The grammars of a round, asked one after the other."""

    def __init__(self, guided: dict[int, Work], shape: RoundShape, num_judged: int, fills_apart: bool) -> None:
        self._guided, self._shape, self._num_judged = dict(guided), shape, num_judged
        self._fills_apart = fills_apart
        self._head: Tensor | None = None
        self._bits: Tensor | None = None
        self._error: BaseException | None = None
        self.seat: int | None = None  # whose grammar is being asked

    def said(self) -> tuple[Tensor, Tensor] | None:
        if self._error is not None:
            raise self._error
        return None if self._head is None or self._bits is None else (self._head, self._bits)

    def run(self) -> None:
        try:
            bits: list[Tensor | Unfilled] = []
            for seat, work in self._guided.items():
                self.seat = seat
                guide = work.request.guide
                assert guide is not None
                with guide.timed():
                    bits += self._ask(work, len(bits))
                    if self._fills_apart:
                        bits = list(fill_masks(bits))
            self.seat = None
            self._bits = fill_masks(bits) if bits else None
        except BaseException as error:
            self._error = error

    def _ask(self, work: Work, num_before: int) -> list[Tensor | Unfilled]:
        guide, num_judged = work.request.guide, self._num_judged
        assert guide is not None
        assert self.seat is not None
        draft = work.request.draft[: work.allowed]
        masks = guide.masks(draft)
        if not masks:
            return []
        row = [0] * (3 * num_judged)
        for number, (place, _) in enumerate(masks, start=num_before + 1):
            row[place] = number
        if self._shape.depth:
            forced = guide.forced(1 + len(draft) + self._shape.depth)
            row[num_judged : num_judged + 1 + len(forced)] = [len(forced), *forced]
        if self._head is None:
            self._head = torch.zeros(self._shape.num_seats, 3 * num_judged, dtype=torch.int32)
        self._head[self.seat] = torch.tensor(row, dtype=torch.int32)
        return [bits for _, bits in masks]


class _Beside:
    """A thread that works while another waits for it, though not for ever: a thread that is late is given up, and
    another takes its place."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # engines of one process take turns
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, work: Callable[[], None], seconds: float) -> bool:
        """False where it was not done in time. Only seconds in which it computes count, up to a point."""
        done = threading.Lock()
        done.acquire()

        def run() -> None:
            work()
            done.release()

        with self._lock:
            if self._thread is None:
                self._work = SimpleQueue()
                self._thread = threading.Thread(target=_serve, args=(self._work,), name="outrider-masks", daemon=True)
                self._thread.start()
            begin = _seconds_computed(self._thread)
            self._work.put(run)
            for _ in range(PATIENCE):
                if done.acquire(timeout=seconds):
                    return True
                if _seconds_computed(self._thread) - begin >= seconds / 2:
                    break
            self._give_up()
            return False

    def _give_up(self) -> None:
        """Leaves a late thread behind: it ends when what it does is done, and until then others come first."""
        assert self._thread is not None
        self._work.put(None)
        with suppress(OSError, AttributeError):
            os.setpriority(os.PRIO_PROCESS, self._thread.native_id or 0, 19)
        self._thread = None


def _seconds_computed(thread: threading.Thread) -> float:
    """0 where nobody can tell."""
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident or 0))
    except (AttributeError, OSError):
        return 0.0


def _serve(queue: SimpleQueue[Callable[[], None] | None]) -> None:
    with torch.inference_mode():
        while (work := queue.get()) is not None:
            work()


_beside = _Beside()
