"""Which recurrent states are kept for reuse, and which are found. Pages of a text are of no use to a recurrent layer
without its state where they end, so of some pages it is kept: a snapshot, under the page's name. The device takes it as
a pass comes by, in the kernels, whatever else is in the pass, and a request that begins alike goes on from a copy.

There are few places, as a state is large. A text is worth one at the end of its prompt, one where another text is known
to have parted from it, and passing ones at intervals, which are the first to go once there is a later one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from outrider.engine.request import Request, Work
from outrider.engine.snapshot_pool import NUM_PASSING, Marks, SnapshotPool

LEAST_SHARE = 4  # a snapshot that saves less than this part of an interval is not worth its place


@dataclass(frozen=True)
class WantedSnapshots:
    """What the device is told: which state to keep where."""

    slot: int
    column: int  # of what the slot can want at a time
    end: int  # after so many tokens
    place: int


class Snapshots:
    """Which snapshots are taken, and which are found."""

    def __init__(self, num_places: int, page_size: int, interval: int) -> None:
        self.pool = SnapshotPool(num_places)
        self._page_size = page_size
        self._interval = -(-interval // page_size) * page_size
        self._least = max(self._interval // LEAST_SHARE, 1)  # tokens that one must save

    def find(self, request: Request, names: Sequence[bytes]) -> int:
        """How many of these pages, which hold the beginning of a request, it can go on from."""
        size, count = self._page_size, self.pool.deepest(names)
        while request.whole(0, count * size) != count * size:  # it ends inside an image
            count = self.pool.deepest(names[: count - 1])
        restored = self.pool.use(names[count - 1]) if count else 0
        prompt_end, branch = (len(request.tokens) - 1) // size * size, len(names) * size
        begin = count * size
        request.marks = Marks(
            restored,
            prompt_end=prompt_end if prompt_end - begin >= self._least else 0,
            branch=branch if branch - begin >= self._least and prompt_end - branch >= self._least else 0,
        )
        return count

    def plan(self, plan: Sequence[Work]) -> list[WantedSnapshots]:
        """What is new of what a round with this work shall take."""
        found: list[WantedSnapshots] = []
        for work in plan:
            begin, end = work.end - work.num_rows, work.end
            # most rounds come by nothing, and this is asked of every request in every round
            if begin < work.request.marks.prompt_end or begin // self._interval < end // self._interval:
                found += self._new(work.request, begin, end)
        return found

    def _new(self, request: Request, begin: int, end: int) -> Iterator[WantedSnapshots]:
        """Of rows from `begin` to `end`, at most. Rounds under way come no further than the first of them: whatever is
        wanted beyond has not been passed."""
        marks = request.marks
        for until, column in self._ends(marks, begin, end):
            if until in marks.wanted or not _is_settled(request, marks.told[column]):
                continue
            place = self.pool.reserve()
            if place is None:
                return
            marks.wanted[until], marks.told[column] = place, until
            yield WantedSnapshots(request.slot, column, until, place)

    def _ends(self, marks: Marks, begin: int, end: int) -> Iterator[tuple[int, int]]:
        """Where snapshots are worth it beyond `begin`, up to `end`, the most valuable first; and in which columns."""
        for column, lasting in enumerate((marks.prompt_end, marks.branch)):
            if begin < lasting <= end:
                yield lasting, column
        step = self._interval
        while end // step - begin // step > NUM_PASSING:
            step *= 2
        for number in range(begin // step + 1, end // step + 1):
            if not 0 <= marks.prompt_end - number * step < self._least:
                yield number * step, 2 + number % NUM_PASSING

    def settle(self, request: Request, num_named: int, names: Sequence[bytes]) -> None:
        """Target and drafter have come to the ends of more of a request's pages, which now have names: `num_named`
        had one before."""
        marks = request.marks
        if not marks.wanted:
            return
        for number, name in enumerate(names, start=num_named + 1):
            end = number * self._page_size
            place = marks.wanted.pop(end, None)
            if place is None:
                continue
            is_new = self.pool.keep(name, place)
            if marks.passing is not None:
                self.pool.demote(marks.passing)
            marks.passing = name if is_new and end not in (marks.prompt_end, marks.branch) else None

    def forget(self, names: Sequence[bytes]) -> None:
        for name in names:
            self.pool.forget(name)

    def drop(self, request: Request) -> None:
        """A request gives up its slot: what it still wanted will not be taken."""
        for place in request.marks.wanted.values():
            self.pool.release(place)
        request.marks = Marks()


def _is_settled(request: Request, end: int) -> bool:
    """Whether the device need no longer know that a snapshot is wanted there: target and drafter have seen the token,
    or will have in rounds under way."""
    if end not in request.marks.wanted:
        return True
    behind = request.num_followed < request.num_computed or any(work.rests for work in request.flying)
    if request.is_followed and behind:
        return False
    return end <= request.num_computed + sum(work.pending for work in request.flying)
