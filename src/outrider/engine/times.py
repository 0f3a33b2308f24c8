"""What a round takes, learnt from rounds of every kind: a mean for each depth and for batches of about the same size,
and how it grows with the rows of drafts and of prompts. So rounds that read prompts teach as much as others."""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

# batches of about the same size, up to each of them, are timed together
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
NEAR_SIZES = 2  # sizes so far away say what a row takes
WINDOW = 48  # rounds that a mean looks back on
FADED_ROUNDS = 4  # rounds that what is known counts as much as, when it is timed again
OUTLIER_FACTOR = 2.0  # a round that takes so many times as long as expected was disturbed
NOISE = 0.1  # of a round's time: what differs for no reason
LEAST = 16  # parts of a round's mean time that what is expected never falls below
REFIT_ROUNDS = 4  # rounds after which slopes are fitted again
ROWS_OF_A_ROUND = 64  # rows that cost as much as all else in a round: a first guess


def size_of(num_requests: int) -> int:
    """Which of SIZES it belongs to."""
    return bisect.bisect_left(SIZES, num_requests)


@dataclass
class Moments:
    """Means of (rows, prompt rows, seconds) over the last rounds of one kind, and how they vary together."""

    count: float = 0.0
    rows: float = 0.0
    prompt: float = 0.0
    seconds: float = 0.0
    rows_rows: float = 0.0
    rows_prompt: float = 0.0
    prompt_prompt: float = 0.0
    rows_seconds: float = 0.0
    prompt_seconds: float = 0.0

    def add(self, rows: float, prompt: float, seconds: float) -> None:
        keep = 1 - 1 / WINDOW
        self.count = self.count * keep + 1
        off_rows, off_prompt, off_seconds = rows - self.rows, prompt - self.prompt, seconds - self.seconds
        self.rows += off_rows / self.count
        self.prompt += off_prompt / self.count
        self.seconds += off_seconds / self.count
        left = 1 - 1 / self.count  # as the means have moved
        self.rows_rows = self.rows_rows * keep + off_rows * off_rows * left
        self.rows_prompt = self.rows_prompt * keep + off_rows * off_prompt * left
        self.prompt_prompt = self.prompt_prompt * keep + off_prompt * off_prompt * left
        self.rows_seconds = self.rows_seconds * keep + off_rows * off_seconds * left
        self.prompt_seconds = self.prompt_seconds * keep + off_prompt * off_seconds * left


@dataclass
class Slopes:
    """Seconds for one more row."""

    rows: float
    prompt: float


@dataclass
class Kind:
    """Rounds of batches of about the same size in which the drafter works, or in which it rests: by depth."""

    depths: dict[int, Moments] = field(default_factory=dict)

    def slopes(self, prior: Slopes | None) -> Slopes:
        """Least squares over the rounds of all depths, each about its own mean, held to what is known otherwise."""
        known = self.depths.values()
        longest = max(known, key=lambda each: each.seconds)
        rows = ROWS_OF_A_ROUND + longest.rows + longest.prompt
        most = longest.seconds / max(longest.rows + longest.prompt, 1.0)  # or else there was nothing else in a round
        if prior is None:
            prior = Slopes(longest.seconds / rows, longest.seconds / rows)
        prior = Slopes(min(prior.rows, most), min(prior.prompt, most))
        hold = (NOISE * rows) ** 2
        rows_rows = sum(each.rows_rows for each in known) + hold
        prompt_prompt = sum(each.prompt_prompt for each in known) + hold
        both = sum(each.rows_prompt for each in known)
        rows_seconds = sum(each.rows_seconds for each in known) + hold * prior.rows
        prompt_seconds = sum(each.prompt_seconds for each in known) + hold * prior.prompt
        area = rows_rows * prompt_prompt - both * both  # above 0: both are held
        return Slopes(
            max((rows_seconds * prompt_prompt - prompt_seconds * both) / area, 0.0),
            max((prompt_seconds * rows_rows - rows_seconds * both) / area, 0.0),
        )


@dataclass(frozen=True)
class Line:
    """Seconds of a round without drafts, and those of one more row of a draft, or of a prompt."""

    seconds: float
    row: float
    prompt: float


class Times:
    def __init__(self) -> None:
        self._kinds: dict[tuple[int, bool], Kind] = {}  # by size, and whether the drafter is left out
        self._slopes: dict[tuple[int, bool], Slopes] = {}
        self._new: dict[tuple[int, bool], int] = {}  # rounds since slopes were fitted

    def add(self, size: int, depth: int, rows: tuple[int, int], seconds: float, *, rests: bool) -> None:
        """A round is over. `rows`: of requests that decode, and others."""
        key = (size, rests)
        kind = self._kinds.setdefault(key, Kind())
        moments = kind.depths.setdefault(depth, Moments())
        if moments.count > 0:
            expected = self._expected(key, moments, *rows)
            if moments.count < FADED_ROUNDS and OUTLIER_FACTOR * seconds < expected:  # those before were disturbed
                moments = kind.depths[depth] = Moments()
            elif moments.count > 2:
                seconds = min(seconds, OUTLIER_FACTOR * max(expected, moments.seconds))
        moments.add(*rows, seconds)
        self._new[key] = self._new.get(key, 0) + 1
        if key not in self._slopes or self._new[key] >= REFIT_ROUNDS:
            self._slopes[key], self._new[key] = kind.slopes(self._prior(key)), 0

    def knows(self, size: int, depth: int) -> bool:
        kind = self._kinds.get((size, depth == 0))
        return kind is not None and depth in kind.depths

    def fade(self, size: int, depth: int) -> None:
        """What is known may be out of date."""
        if self.knows(size, depth):
            moments = self._kinds[size, depth == 0].depths[depth]
            moments.count = min(moments.count, float(FADED_ROUNDS))

    def line(self, size: int, depth: int, num_requests: int) -> Line | None:
        """Of rounds with such a depth. Where they were never timed, what others take says how much; None: nothing
        does."""
        key = (size, depth == 0)
        slopes = self._slopes.get(key) or self._prior(key)
        if slopes is None:
            return None
        prompt = self.prompt_seconds(size, rests=depth == 0)
        if self.knows(size, depth):
            seconds = self._expected(key, self._kinds[key].depths[depth], num_requests, 0)
            return Line(seconds, slopes.rows, prompt)
        ratio = self._ratio(size, depth)
        if ratio is None or not ratio:
            return None
        if depth and self.knows(size, 0):
            plain = self.line(size, 0, num_requests)
            return None if plain is None else Line(plain.seconds * ratio, slopes.rows, prompt)
        for other, moments in self._kinds.get((size, False), Kind()).depths.items():
            share = self._ratio(size, other)
            if other and share:
                seconds = self._expected((size, False), moments, num_requests, 0)
                return Line(seconds * ratio / share, slopes.rows, prompt)
        return None

    def prompt_seconds(self, size: int, *, rests: bool) -> float:
        """Of one more row of a prompt, that the drafter sees or not; 0 while nothing is known. Those that it does not
        see cannot be the dearer ones: where few rounds seem to say so, they were disturbed."""
        kinds = (True, False) if rests else (False,)
        slopes = [self._slopes.get((size, each)) or self._prior((size, each)) for each in kinds]
        return min((each.prompt for each in slopes if each is not None), default=0.0)

    def _ratio(self, size: int, depth: int) -> float | None:
        """How many times as long as without drafts a round takes that makes so many, and judges none: with so many
        requests, or with the nearest number of them that is known."""
        if depth == 0:
            return 1.0
        sizes = sorted({each for each, rests in self._kinds if rests}, key=lambda each: abs(each - size))
        for near in sizes:
            if not self.knows(near, 0):
                continue
            plain = self._kinds[near, True].depths[0]
            alone = self._expected((near, True), plain, plain.rows, 0)
            below, above = (0, 1.0), None
            for other, moments in sorted(self._kinds.get((near, False), Kind()).depths.items()):
                if other == 0:
                    continue
                point = (other, self._expected((near, False), moments, plain.rows, 0) / alone)
                if other <= depth:
                    below = point
                if other >= depth and above is None:
                    above = point
            if above is not None:
                (low, first), (high, last) = below, above
                return last if high == low else first + (last - first) * (depth - low) / (high - low)
        return None

    def _expected(self, key: tuple[int, bool], moments: Moments, rows: float, prompt: float) -> float:
        slopes = self._slopes[key]
        seconds = moments.seconds + slopes.rows * (rows - moments.rows) + slopes.prompt * (prompt - moments.prompt)
        return max(seconds, moments.seconds / LEAST)

    def _prior(self, key: tuple[int, bool]) -> Slopes | None:
        """What such rounds take for a row with another number of requests, or other rounds with the same."""
        size, rests = key
        near = [(abs(other - size), other) for other, kind in self._slopes if kind == rests and other != size]
        near = [each for each in near if each[0] <= NEAR_SIZES]
        return self._slopes[min(near)[1], rests] if near else self._slopes.get((size, not rests))
