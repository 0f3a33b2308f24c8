"""Time as the tests have it: what a round takes is said, not measured, so that whatever is decided by it is the same on
every machine. Drafts that are often right pay, others do not."""

from __future__ import annotations

from outrider.engine.flight import Flight
from outrider.engine.stopwatch import Stopwatch
from outrider.types import RoundShape

PASS, ROW = 1.0, 0.04  # seconds of the target's pass, and of each row in it
DRAFTING, DRAFT_TOKEN = 0.1, 0.05  # of a drafter that is not at rest, and of each token that it drafts


def seconds_of(shape: RoundShape) -> float:
    drafting = 0.0 if shape.rests else DRAFTING + DRAFT_TOKEN * shape.depth
    return PASS + ROW * shape.num_rows + drafting


class MadeUpTime(Stopwatch):
    total = 0.0

    def lap(self, flight: Flight, end: float) -> float:
        seconds = seconds_of(flight.shape)
        self.total += seconds
        return seconds
