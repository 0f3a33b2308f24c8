"""What the device learns before a round: who was just given a slot, which pages are whose, which states to keep."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engine.cache import Cache
from outrider.engine.options import Options
from outrider.engine.request import Request
from outrider.engine.snapshots import WantedSnapshots


@dataclass(frozen=True)
class Placing:
    admitted: Sequence[tuple[Request, list[int]]]  # and the pages whose content each reuses
    places: Sequence[tuple[int, int, int]]  # (slot, place in its table, page)
    wanted: Sequence[WantedSnapshots]

    def put(self, cache: Cache, options: Options) -> None:
        for request, reused in self.admitted:
            cache.admit(request.slot, request.tokens, reused, request.images, request.marks.restored)
        if self.admitted:
            options.write([request for request, _ in self.admitted], cache.upload)
        cache.place_pages(self.places)
        cache.want(self.wanted)

    def __bool__(self) -> bool:
        return bool(self.admitted or self.places or self.wanted)
