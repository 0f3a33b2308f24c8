"""How many tokens are drafted, and judged of whom: what a policy must answer, and the simplest one. No output depends
on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from outrider.engine.request import Request
from outrider.types import Outcome

RowSizes = Callable[[int, int], Sequence[int]]  # numbers of rows that rounds of so many requests and a depth can have


@dataclass(frozen=True)
class Judged:
    """What became of a request's draft. Tokens that were not judged count where the text has shown what they were."""

    slot: int
    num_judged: int
    num_right: int  # its first tokens that stand
    num_seen: int  # its first tokens of which it is known; one more than stand at most


def judged_of(request: Request, outcome: Outcome) -> Judged:
    """What a round has shown of the draft that waited for it. Where all that was judged stands, the token that follows
    says whether the next one would have stood."""
    right = seen = max(len(outcome.tokens) - 1, 0)
    if right < outcome.num_judged:
        seen += 1
    elif outcome.tokens and right < len(request.draft):
        seen += 1
        right += request.draft[right] == outcome.tokens[right]
    return Judged(request.slot, outcome.num_judged, right, seen)


@dataclass(frozen=True)
class Landed:
    """A round that is over."""

    num_requests: int
    depth: int  # tokens that were drafted in it
    rests: bool  # the drafter had nothing to do
    num_rows: int  # of requests that decode
    num_other_rows: int  # of prompts, and those that fill up a recording
    num_tokens: int  # that it brought
    num_made: int  # tokens that were drafted, of all requests that could have had `depth` of them
    num_wanted: int  # how many that would have been: a text may suggest nothing
    seconds: float  # that it kept everybody waiting; 0: that is not known
    judged: list[Judged] = field(default_factory=list)


class DepthPolicy(Protocol):
    """Asked before every round, told after it."""

    adaptive: bool  # whether a round may draft less than it says, where others would wait for long

    @property
    def depths(self) -> tuple[int, ...]:
        """Every depth that depth() may give."""
        ...

    @property
    def latest(self) -> int:
        """What it has said last, trials aside."""
        ...

    def depth(self, requests: Sequence[Request], row_sizes: RowSizes | None = None) -> int:
        """How many tokens to draft in the next round. How many of those that wait are judged in it, at most, is written
        to each request (`most_judged`). `row_sizes`: numbers of rows that rounds can have; None: any."""
        ...

    def allot_beside(self, requests: Sequence[Request], depth: int, row_sizes: Sequence[int]) -> None:
        """After depth(): the next round reads prompts beside these requests. How many tokens of the drafts that wait
        are judged in it may be written to them again: `depth` each at most, and so many that those who decode have one
        of `row_sizes` rows together, or less."""
        ...

    def wants(self, num_requests: int, num_unseen: int = 0, num_left: int = 0) -> bool:
        """Whether drafts for one more request, so many with it, may ever be worth it: otherwise the drafter need not
        follow its text. `num_unseen`: rows of its prompt that would be read again for that, as they are in pages that
        the drafter has not seen; `num_left`: tokens that it may say."""
        ...

    def admit(self, slot: int) -> None:
        """Another request has this slot."""
        ...

    def note(self, landed: Landed) -> None:
        """A round is over."""
        ...


class FixedDepth:
    """A policy that drafts as many tokens as there can be, whatever they are worth."""

    adaptive = False

    def __init__(self, depth: int) -> None:
        self.latest = depth

    @property
    def depths(self) -> tuple[int, ...]:
        return tuple(sorted({0, self.latest}))  # none where a request wants none

    def depth(self, requests: Sequence[Request], row_sizes: RowSizes | None = None) -> int:
        for request in requests:
            request.most_judged = None
        return self.latest

    def allot_beside(self, requests: Sequence[Request], depth: int, row_sizes: Sequence[int]) -> None: ...

    def wants(self, num_requests: int, num_unseen: int = 0, num_left: int = 0) -> bool:
        return True

    def admit(self, slot: int) -> None: ...

    def note(self, landed: Landed) -> None: ...
