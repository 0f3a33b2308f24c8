"""A policy that serves a proof: the drafter drafts little, much, or rests, by turns, as no text would make it, and any
part of a draft is judged."""

from __future__ import annotations

import random
from collections.abc import Sequence

from outrider.engine.cache import NUM_MISSABLE
from outrider.engine.governor import depths_up_to
from outrider.engine.policy import Landed, RowSizes
from outrider.engine.request import Request

LONGEST = 8  # rounds of the same depth


class RandomDepth:
    """A DepthPolicy at random. The longest rests are longer than what a drafter may miss."""

    adaptive = True

    def __init__(
        self, lookahead: int, seed: int = 0, num_missable: int = NUM_MISSABLE, *, followed: float = 0.75
    ) -> None:
        self.depths = depths_up_to(lookahead)
        self._followed = followed  # share of the requests whose text the drafter follows
        self._longest_rest = num_missable + 4
        self._chance, self._left, self._now = random.Random(seed), 0, lookahead
        self.num_rests = 0

    @property
    def latest(self) -> int:
        return self._now

    def admit(self, slot: int) -> None: ...

    def wants(self, num_requests: int, num_unseen: int = 0, num_left: int = 0) -> bool:
        return self._chance.random() < self._followed

    def depth(self, requests: Sequence[Request], row_sizes: RowSizes | None = None) -> int:
        for request in requests:
            request.most_judged = self._chance.randint(0, self.depths[-1])
        return self._now

    def allot_beside(self, requests: Sequence[Request], depth: int, row_sizes: Sequence[int]) -> None: ...

    def note(self, landed: Landed) -> None:
        assert landed.seconds >= 0  # 0: not known
        self._left -= 1
        if self._left <= 0:
            self._now = self._chance.choice([0, *self.depths])
            self._left = self._chance.randrange(1, self._longest_rest if self._now == 0 else LONGEST)
            self.num_rests += self._now == 0
