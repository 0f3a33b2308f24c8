"""What the device learns before a round: who was just given a slot, which pages are whose, which states to keep."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engine.cache import Cache
from outrider.engine.options import Options
from outrider.engine.request import Request
from outrider.engine.scheduler import Plan
from outrider.engine.snapshots import WantedSnapshots


@dataclass(frozen=True)
class Placing:
    admitted: Sequence[tuple[Request, list[int]]]  # and the pages whose content each reuses
    places: Sequence[tuple[int, int, int]]  # (slot, place in its table, page)
    wanted: Sequence[WantedSnapshots]

    @classmethod
    def of(cls, plan: Plan, page_size: int) -> Placing:
        """What a plan's requests have that the device does not know of; it counts as known from now on."""
        admitted = []
        for request in plan.admitted:
            reused = request.pages[: request.num_computed // page_size]
            admitted.append((request, reused))
            request.num_placed = len(reused)
            request.first_admitted = request.first_admitted or time.monotonic()
        places = []
        for request in (work.request for work in plan.work):
            for place in range(request.num_placed, len(request.pages)):
                places.append((request.slot, place, request.pages[place]))
            request.num_placed = len(request.pages)
        return cls(admitted, places, plan.wanted)

    def put(self, cache: Cache, options: Options) -> None:
        for request, reused in self.admitted:
            cache.admit(request.slot, request.tokens, reused, request.images, request.marks.restored)
        if self.admitted:
            options.write([request for request, _ in self.admitted], cache.upload)
        cache.place_pages(self.places)
        cache.want(self.wanted)

    def __bool__(self) -> bool:
        return bool(self.admitted or self.places or self.wanted)
