"""Places for snapshots of recurrent states: who has which, by the name of the page that ends where it was taken. The
least recently used is the first to go."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field

NUM_PASSING = 4  # snapshots at intervals, of one request in one round
NUM_WANTED = 2 + NUM_PASSING  # of one request at a time: also at its prompt's end, and where another text parted


class SnapshotPool:
    """Places 1..num_places - 1 (place 0 is the dump) by the names of the pages that end there."""

    def __init__(self, num_places: int) -> None:
        self.num_places = num_places
        self._free = list(range(num_places - 1, 0, -1))
        self._place_of: OrderedDict[bytes, int] = OrderedDict()  # the least recently used first

    @property
    def num_kept(self) -> int:
        return len(self._place_of)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def reserve(self) -> int | None:
        """A place for a new one, taken from the least recently used if need be; None: all are wanted by others."""
        if self._free:
            return self._free.pop()
        return self._place_of.popitem(last=False)[1] if self._place_of else None

    def release(self, place: int) -> None:
        self._free.append(place)

    def keep(self, name: bytes, place: int) -> bool:
        """What is in a reserved place now goes by this name. False where there is one already: the place is free."""
        is_new = self._place_of.setdefault(name, place) == place
        if not is_new:
            self.release(place)
        self._place_of.move_to_end(name)
        return is_new

    def deepest(self, names: Sequence[bytes]) -> int:
        """How many of these pages, one after the other, come to the last that has one."""
        return next((count for count in range(len(names), 0, -1) if names[count - 1] in self._place_of), 0)

    def use(self, name: bytes) -> int:
        self._place_of.move_to_end(name)
        return self._place_of[name]

    def demote(self, name: bytes) -> None:
        """Makes a snapshot the first to be given up."""
        if name in self._place_of:
            self._place_of.move_to_end(name, last=False)

    def forget(self, name: bytes) -> None:
        place = self._place_of.pop(name, None)
        if place is not None:
            self.release(place)

    def check(self, wanted: Sequence[int] = ()) -> None:
        """Raises if the books do not balance, given the places that requests wait for."""
        places = sorted([*self._free, *self._place_of.values(), *wanted])
        assert places == list(range(1, self.num_places)), places


@dataclass
class Marks:
    """Where a running request has snapshots taken."""

    restored: int = 0  # the place of the one it began from, 0: none
    prompt_end: int = 0  # the last page end of what is read before it speaks, 0: not worth it
    branch: int = 0  # where the pages of another text leave off, whose state was not kept, 0: nowhere
    wanted: dict[int, int] = field(default_factory=dict)  # by their end: the places of those that are not settled yet
    told: list[int] = field(default_factory=lambda: [0] * NUM_WANTED)  # by column: the end that the device knows
    passing: bytes | None = None  # the name of its last one at an interval
