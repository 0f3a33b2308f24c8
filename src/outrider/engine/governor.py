"""How many tokens to draft, down to none. What rounds take is timed, what they bring is counted, and the depth with the
most tokens a second is taken. No output depends on it: only how soon it comes."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field

# batches of about the same size, up to each of them, are timed together
SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
WINDOW = 48  # rounds that averages look back on
FIRST = 8  # rounds at a new size before another depth is tried
TRIAL = 5  # rounds of a trial; the first ones may still pay for the change
STRAY = 0.25  # of a round of it: one that has another depth
MARGIN = 1.03  # a depth must be so much better than the one that is in use
REVIEW = 4  # rounds between decisions
PRICE = 0.01  # share of the time that trials may cost of which nothing new is expected
FADED = 4  # rounds that what is known counts as much as, when it is tried again
SAMPLE = 16  # requests of which the drafter follows one while drafts do not pay
OUTLIER = 2.0  # a round that takes so many times as long was disturbed


@dataclass
class Average:
    """Of the last rounds."""

    value: float = 0.0
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        self.value += (value - self.value) / min(self.count, WINDOW)

    def fade(self) -> None:
        """It may be out of date."""
        self.count = min(self.count, FADED)


@dataclass
class Size:
    """What is known of batches of about the same size."""

    depth: int  # in use
    seconds: dict[int, Average] = field(default_factory=dict)  # a round takes, by depth
    trial: int | None = None  # the depth that is tried now
    num_left: float = 0.0  # rounds of the trial
    num_rounds: int = 0  # since the last trial
    num_trials: int = 0


class Governor:
    def __init__(self, lookahead: int) -> None:
        self.depths = depths_up_to(lookahead)
        self._tokens = {depth: Average() for depth in self.depths}  # that a round brings a request, by depth
        self._sizes: dict[int, Size] = {}
        self._latest: Size | None = None
        self._num_unwanted = 0  # requests that came while drafts did not pay
        self._before = (0, 0, 0.0)  # of the round before: requests, depth, when it ended

    def depth(self, num_requests: int) -> int:
        """How many tokens to draft for each of so many requests."""
        size = self._size(num_requests)
        return size.depth if size.trial is None else size.trial

    def wants(self, num_requests: int) -> bool:
        """Where drafts have been found not to pay, only of one request in several is the text followed, so that it can
        be found out should they pay again."""
        size = self._size(num_requests)
        if size.depth or any(depth not in size.seconds for depth in (self.depths[0], self.depths[-1])):
            return True
        self._num_unwanted += 1
        return self._num_unwanted % SAMPLE == 0

    @property
    def latest(self) -> int:
        """The depth in use for batches as large as the last one."""
        return self._latest.depth if self._latest is not None else self.depths[-1]

    def note(self, accepted: Sequence[int], depth: int, begin: float, end: float) -> None:
        """A round is over: how many drafts of each request were accepted, how many new ones were made at most, and when
        it began and ended, in seconds. Rounds may overlap."""
        if not accepted:
            return
        before, self._before = self._before, (len(accepted), depth, end)
        size = self._size(len(accepted))
        if before[:2] == self._before[:2] and depth in self._tokens:  # else it has judged more drafts, or fewer
            self._learn(size, depth, accepted, end - max(begin, before[2]))
        if size.trial is None:
            size.num_rounds += 1
            if size.num_rounds % REVIEW == 0:
                self._choose(size)
                self._try(size)
        else:
            # Rounds under way have the depth of before; but requests may also want no more, whatever is tried.
            size.num_left -= 1 if depth == size.trial else STRAY
            if size.num_left <= 0:
                size.trial, size.num_rounds = None, 0
                self._choose(size)

    def pause(self, end: float) -> None:
        """A round of another kind is over: the next one has not begun before."""
        self._before = (0, 0, end)

    def _learn(self, size: Size, depth: int, accepted: Sequence[int], seconds: float) -> None:
        for fewer in self.depths:
            if fewer <= depth:  # with fewer drafts as many would have been accepted, as far as they reach
                self._tokens[fewer].add(1 + sum(min(count, fewer) for count in accepted) / len(accepted))
        average = size.seconds.setdefault(depth, Average())
        if average.count > 2:
            seconds = min(seconds, OUTLIER * average.value)
        average.add(seconds)

    def _size(self, num_requests: int) -> Size:
        number = bisect.bisect_left(SIZES, num_requests)
        size = self._sizes.get(number)
        if size is None:  # whatever was best for the batches before is a good start
            size = self._sizes[number] = Size(self.latest)
        self._latest = size
        return size

    def _choose(self, size: Size) -> None:
        """Of the depths that were timed."""
        rates = {depth: self._tokens[depth].value / average.value for depth, average in size.seconds.items()}
        if not rates:
            return
        best = max(rates, key=lambda depth: rates[depth])
        if size.depth not in rates or rates[best] > MARGIN * rates[size.depth]:
            size.depth = best

    def _seconds(self, size: Size) -> dict[int, float]:
        """What a round takes, by depth. Between none and all, where it was never timed, it is taken to grow evenly."""
        first, last = (size.seconds[depth].value for depth in (self.depths[0], self.depths[-1]))
        guess = {depth: first + (last - first) * depth / self.depths[-1] for depth in self.depths}
        return guess | {depth: average.value for depth, average in size.seconds.items()}

    def _try(self, size: Size) -> None:
        """Begins a trial, if one is due."""
        if size.num_rounds < FIRST or size.depth not in size.seconds:
            return
        ends = [depth for depth in (self.depths[0], self.depths[-1]) if depth not in size.seconds]
        if ends:
            self._begin(size, ends[0])
            return
        seconds = self._seconds(size)
        rates = {depth: self._tokens[depth].value / seconds[depth] for depth in self.depths}
        best = max(rates, key=lambda depth: rates[depth])
        if rates[best] > MARGIN * rates[size.depth]:  # it looks better, and was never timed
            self._begin(size, best)
            return
        others = [depth for depth in reversed(self.depths) if depth != size.depth]
        other = others[size.num_trials % len(others)]
        loss = TRIAL * seconds[other] * max(1 - rates[other] / rates[size.depth], 0.0)
        if loss <= PRICE * size.num_rounds * seconds[size.depth]:  # what is known may be out of date
            self._begin(size, other)

    def _begin(self, size: Size, depth: int) -> None:
        size.trial, size.num_left = depth, TRIAL
        size.num_trials += 1
        size.seconds.get(depth, Average()).fade()
        for deeper in self.depths:
            if deeper > size.depth:
                self._tokens[deeper].fade()


def depths_up_to(lookahead: int) -> tuple[int, ...]:
    """None, then as many as there can be, half as many, ..., one."""
    found = {0, lookahead}
    while lookahead > 1:
        lookahead //= 2
        found.add(lookahead)
    return tuple(sorted(found))
