"""How long each round kept everybody waiting. Policies learn from it, and from nothing else that has to do with time: a
test that says what rounds take makes all that they decide reproducible."""

from __future__ import annotations

import time
from collections.abc import Callable

from outrider.engine.flight import Flight


class Stopwatch:
    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.now = clock
        self._last = 0.0  # when the round before was over
        self._disturbed = 0.0  # until when something else took its time

    def disturb(self) -> None:
        """Until now, something was done that rounds have nothing to do with, such as recording one."""
        self._disturbed = self.now()

    def lap(self, flight: Flight, end: float) -> float:
        """Seconds of a round that is over since `end`. It has kept everybody waiting since its planning began, or since
        the one before was over. 0: nobody can tell, since it was disturbed."""
        begin, self._last = max(flight.launched, self._last), end
        return end - begin if begin >= self._disturbed else 0.0
