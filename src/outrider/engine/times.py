"""What a round takes, learnt from all rounds: a mean for each depth and for batches of about the same size, and how it
grows with rows. Rounds that read prompts are timed apart: beside a prompt the device computes all the time, and a row
more takes so much longer; in other rounds it waits for weights, and rows are almost free. A line through both would say
that rounds without prompts take next to nothing."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field
from typing import NamedTuple

# batches of about the same size, up to each of them, are timed together
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
NEAR_SIZES = 2  # sizes so far away say what a row takes
WINDOW = 48  # rounds that a mean looks back on
FADED_ROUNDS = 4  # rounds that what is known counts as much as, when it is timed again
OUTLIER_FACTOR = 2.0  # a round that takes so many times as long as expected was disturbed
NOISE = 0.1  # of a round's time: what differs for no reason
LEAST = 16  # parts of a round's mean time that what is expected never falls below
REFIT_ROUNDS, REFIT_SHARE = 4, 0.25  # rounds after which slopes are fitted again; and of those that are known
ROWS_OF_A_ROUND = 64  # rows that cost as much as all else in a round: a first guess


def size_of(num_requests: int) -> int:
    """Which of SIZES it belongs to."""
    return bisect.bisect_left(SIZES, num_requests)


class Key(NamedTuple):
    """Rounds that have a slope in common."""

    size: int
    rests: bool  # the drafter is left out
    reads: bool  # somebody's prompt is read


@dataclass
class Moments:
    """Means of rows and seconds over the last rounds of one kind, and how they vary together."""

    count: float = 0.0
    rows: float = 0.0
    seconds: float = 0.0
    rows_rows: float = 0.0
    rows_seconds: float = 0.0

    def add(self, rows: float, seconds: float) -> None:
        keep = 1 - 1 / WINDOW
        self.count = self.count * keep + 1
        off_rows, off_seconds = rows - self.rows, seconds - self.seconds
        self.rows += off_rows / self.count
        self.seconds += off_seconds / self.count
        left = 1 - 1 / self.count  # as the means have moved
        self.rows_rows = self.rows_rows * keep + off_rows * off_rows * left
        self.rows_seconds = self.rows_seconds * keep + off_rows * off_seconds * left


@dataclass
class Kind:
    """Rounds with the same key: by depth, and seconds for one more row."""

    depths: dict[int, Moments] = field(default_factory=dict)
    slope: float = 0.0
    num_new: int = 0  # rounds since it was fitted

    def fit(self, prior: float | None) -> None:
        """Least squares over the rounds of all depths, each about its own mean, held to what is known otherwise."""
        known = self.depths.values()
        longest = max(known, key=lambda each: each.seconds)
        rows = ROWS_OF_A_ROUND + longest.rows
        most = longest.seconds / max(longest.rows, 1.0)  # or else there was nothing else in a round
        held = min(longest.seconds / rows if prior is None else prior, most)
        hold = (NOISE * rows) ** 2
        rows_rows = sum(each.rows_rows for each in known) + hold
        rows_seconds = sum(each.rows_seconds for each in known) + hold * held
        self.slope, self.num_new = max(rows_seconds / rows_rows, 0.0), 0

    def seconds(self, depth: int, rows: float) -> float:
        moments = self.depths[depth]
        return max(moments.seconds + self.slope * (rows - moments.rows), moments.seconds / LEAST)


@dataclass(frozen=True)
class Line:
    """Seconds of a round without drafts, and those of one more row of a draft, or of a prompt."""

    seconds: float
    row: float
    prompt: float


class Times:
    def __init__(self) -> None:
        self._kinds: dict[Key, Kind] = {}

    def add(self, size: int, depth: int, rows: tuple[int, int], seconds: float, *, rests: bool) -> None:
        """A round is over. `rows`: of requests that decode, and others."""
        kind = self._kinds.get((size, rests, rows[1] > 0))  # type: ignore[call-overload]
        if kind is None:
            kind = self._kinds[Key(size, rests, rows[1] > 0)] = Kind()
        moments = kind.depths.get(depth)
        if moments is None:
            moments = kind.depths[depth] = Moments()
        else:
            expected = kind.seconds(depth, sum(rows))
            if moments.count < FADED_ROUNDS and OUTLIER_FACTOR * seconds < expected:  # those before were disturbed
                moments = kind.depths[depth] = Moments()
            elif moments.count > 2:
                seconds = min(seconds, OUTLIER_FACTOR * max(expected, moments.seconds))
        moments.add(sum(rows), seconds)
        kind.num_new += 1
        if moments.count <= 1 or kind.num_new >= max(REFIT_ROUNDS, REFIT_SHARE * moments.count):
            kind.fit(self._prior(Key(size, rests, rows[1] > 0)))

    def knows(self, size: int, depth: int) -> bool:
        """Whether rounds that read no prompt were timed."""
        kind = self._kinds.get(Key(size, depth == 0, False))
        return kind is not None and depth in kind.depths

    def compares(self, size: int) -> bool:
        """Whether rounds that read no prompt were timed both with drafts and without."""
        return all(Key(size, rests, False) in self._kinds for rests in (True, False))

    def knows_reading(self, size: int) -> bool:
        """Whether rounds were timed that read prompts without the drafter."""
        return Key(size, True, True) in self._kinds

    def fade(self, size: int, depth: int) -> None:
        """What is known may be out of date."""
        if self.knows(size, depth):
            moments = self._kinds[Key(size, depth == 0, False)].depths[depth]
            moments.count = min(moments.count, float(FADED_ROUNDS))

    def line(self, size: int, depth: int, num_requests: int) -> Line | None:
        """Of rounds with such a depth. Where they were never timed, what others take says how much; None: nothing
        does."""
        key = Key(size, depth == 0, False)
        slope, prompt = self._slope(key), self.prompt_seconds(size, rests=depth == 0)
        if slope is None:
            return None
        if self.knows(size, depth):
            return Line(self._kinds[key].seconds(depth, num_requests), slope, prompt)
        ratio = self._ratio(size, depth)
        if ratio:
            if depth and self.knows(size, 0):
                return Line(self._kinds[Key(size, True, False)].seconds(0, num_requests) * ratio, slope, prompt)
            for other in self._kinds.get(Key(size, False, False), Kind()).depths:
                share = self._ratio(size, other)
                if other and share:
                    seconds = self._kinds[Key(size, False, False)].seconds(other, num_requests)
                    return Line(seconds * ratio / share, slope, prompt)
        reading = self._kinds.get(Key(size, depth == 0, True))  # a poor guess, but a trial will be worth it
        if reading is not None and depth in reading.depths:
            return Line(reading.seconds(depth, num_requests), slope, prompt)
        return None

    def prompt_seconds(self, size: int, *, rests: bool) -> float:
        """Of one more row of a prompt, that the drafter sees or not; 0 while nothing is known. Those that it does not
        see cannot be the dearer ones: where few rounds seem to say so, they were disturbed."""
        slopes = [self._slope(Key(size, each, True)) for each in ((True, False) if rests else (False,))]
        return min((each for each in slopes if each is not None), default=0.0)

    def _ratio(self, size: int, depth: int) -> float | None:
        """How many times as long as without drafts a round takes that makes so many, and judges none: with so many
        requests, or with the nearest number of them that is known."""
        if depth == 0:
            return 1.0
        sizes = sorted({each.size for each in self._kinds}, key=lambda each: abs(each - size))
        for near in sizes:
            if not self.knows(near, 0):
                continue
            plain, drafting = self._kinds[Key(near, True, False)], self._kinds.get(Key(near, False, False), Kind())
            rows = plain.depths[0].rows
            below, above = (0, 1.0), None
            for other in sorted(drafting.depths):
                if other == 0:
                    continue
                point = (other, drafting.seconds(other, rows) / plain.seconds(0, rows))
                if other <= depth:
                    below = point
                if other >= depth and above is None:
                    above = point
            if above is not None:
                (low, first), (high, last) = below, above
                return last if high == low else first + (last - first) * (depth - low) / (high - low)
        return None

    def _apart(self, key: Key) -> float | None:
        """Seconds of a row of a prompt, by what rounds take that read some and those that do not."""
        reading, calm = self._kinds.get(key), self._kinds.get(key._replace(reads=False))
        if reading is None or calm is None:
            return None
        for depth in sorted(reading.depths.keys() & calm.depths.keys(), key=lambda each: -reading.depths[each].count):
            more, less = reading.depths[depth], calm.depths[depth]
            if more.rows > less.rows:
                return max(more.seconds - less.seconds, 0.0) / (more.rows - less.rows)
        return None

    def _slope(self, key: Key) -> float | None:
        kind = self._kinds.get(key)
        return kind.slope if kind is not None else self._prior(key)

    def _prior(self, key: Key) -> float | None:
        """What such rounds take for a row with another number of requests, or other rounds with the same. Where prompts
        are read, and all of them may be of one length: how much longer that takes than not to read any."""
        apart = self._apart(key) if key.reads else None
        if apart is not None:
            return apart
        near = [
            (abs(each.size - key.size), each)
            for each in self._kinds
            if each[1:] == key[1:] and 0 < abs(each.size - key.size) <= NEAR_SIZES
        ]
        if near:
            return self._kinds[min(near)[1]].slope
        others = (key._replace(rests=not key.rests), key._replace(reads=not key.reads))
        return next((self._kinds[each].slope for each in others if each in self._kinds), None)
