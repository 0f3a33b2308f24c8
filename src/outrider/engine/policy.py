"""How many tokens are drafted: what a policy must answer, and the simplest one. No output depends on it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class DepthPolicy(Protocol):
    """Asked before every round, told after every round in which all requests decode."""

    @property
    def depths(self) -> tuple[int, ...]:
        """All that depth() may say."""
        ...

    @property
    def latest(self) -> int:
        """What it has said last, trials aside."""
        ...

    def depth(self, num_requests: int) -> int:
        """How many tokens to draft for each of so many requests."""
        ...

    def wants(self, num_requests: int) -> bool:
        """Whether drafts for one more request, beside so many, may ever be worth it: otherwise the drafter need not
        follow its text."""
        ...

    def note(self, accepted: Sequence[int], depth: int, begin: float, end: float) -> None:
        """A round is over: how many drafts of each request were accepted, how many new ones were made at most, and when
        it began and ended, in seconds. Rounds may overlap."""
        ...

    def pause(self, end: float) -> None:
        """A round of another kind is over: the next one has not begun before."""
        ...


class FixedDepth:
    """As many tokens as there can be, whatever they are worth."""

    def __init__(self, depth: int) -> None:
        self.latest = depth

    @property
    def depths(self) -> tuple[int, ...]:
        return tuple(sorted({0, self.latest}))  # none where a request wants none

    def depth(self, num_requests: int) -> int:
        return self.latest

    def wants(self, num_requests: int) -> bool:
        return True

    def note(self, accepted: Sequence[int], depth: int, begin: float, end: float) -> None: ...

    def pause(self, end: float) -> None: ...
