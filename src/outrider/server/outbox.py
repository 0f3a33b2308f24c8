"""What the engine's thread has for the event loop. Both share one interpreter, so the time that the loop spends on
sending is time that the engine does not have: it is measured, and kept to a share. The more streams there are, the
fewer and larger are the pieces that they get; first and last pieces never wait."""

from __future__ import annotations

import time
from collections.abc import Sequence

from outrider.server.job import Event, Job, Piece

SHARE = 0.3  # of the time that sending may take
RECENT = 8  # deliveries that the average cost looks back on


class Outbox:
    def __init__(self) -> None:
        self._events: list[tuple[Job, Event]] = []
        self._urgent: set[Job] = set()
        self._seconds = 0.0  # of the event loop's own time that a delivery takes
        self._last = 0.0  # when the last one was

    def add(self, job: Job, event: Event) -> None:
        self._events.append((job, event))
        if not job.begun or not isinstance(event, Piece) or event.final is not None:
            self._urgent.add(job)
            job.begun = True

    def deliver(self, now: float) -> None:
        """Everything, if it is time; otherwise only to those whose first or last piece is among it."""
        if not self._events:
            return
        if now - self._last >= self._seconds * (1 / SHARE - 1):
            due, self._events, self._last = self._events, [], now
        elif self._urgent:
            due = [each for each in self._events if each[0] in self._urgent]
            self._events = [each for each in self._events if each[0] not in self._urgent]
        else:
            return
        self._urgent.clear()
        self._send(due)

    def forget(self, job: Job) -> None:
        """It has ended before its time: what waited for it is not sent any more."""
        self._urgent.discard(job)
        self._events = [each for each in self._events if each[0] is not job]

    def _send(self, events: Sequence[tuple[Job, Event]]) -> None:
        """The event loop is woken once, not once for each."""
        for loop in {job.loop for job, _ in events}:
            mine = [(job, event) for job, event in events if job.loop is loop]
            try:
                loop.call_soon_threadsafe(self._put, mine)
            except RuntimeError:  # the loop has been closed: nobody is listening
                for job, _ in mine:
                    job.closed = True

    def _put(self, events: Sequence[tuple[Job, Event]]) -> None:
        """On the event loop. Those who wait for these events have their turn before what is scheduled after them."""
        begin = time.thread_time()
        for job, event in events:
            job.events.put_nowait(event)
        events[0][0].loop.call_soon(self._note, begin)

    def _note(self, begin: float) -> None:
        self._seconds += (time.thread_time() - begin - self._seconds) / RECENT
