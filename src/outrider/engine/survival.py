"""How likely each token of a draft is to be accepted: counted for every request, position by position, and begun from
what is true of all requests together. The drafter's own probability would say more of the draft at hand, but little of
the next one (docs/diary.md: correlations of 0.5 and 0.13), and on a GPU the host shares out rows before it can have
read it: whoever uses it must do so on the device."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from outrider.engine.policy import Judged

WINDOW = 48  # drafts of a request that its record looks back on
BATCH_WINDOW = 256  # drafts that the average of all looks back on
CHECK_INTERVAL = 4  # rounds of which one is compared with what was expected
EXPECTED_DECAY = 1 - 1 / 32  # of the tokens that were expected, from one of them to the next
INITIAL_CHECKS = 8  # before the first one, in which as many tokens came as were expected
PRIOR_DRAFTS = 3.0  # drafts of its own that the average counts as much as
INITIAL_ACCEPTANCE = 0.7  # what a position counts as that was never seen
FADED_DRAFTS = 1.5  # drafts that what is known counts as much as, when it may be out of date
RECORD = 32  # requests that have ended which are remembered, or as many as can run if those are more
FEW_DRAFTS = 4  # drafts of a request that say something of it


class Survival:
    """Tables by slot: how often a token of a draft was looked at, all before it being right, and how often it was right
    too."""

    def __init__(self, num_slots: int, lookahead: int) -> None:
        self.lookahead = lookahead
        self._tables = np.zeros((num_slots, 2, lookahead))
        self._right, self._seen = self._tables[:, 0], self._tables[:, 1]
        self._all = np.ones((2, lookahead))  # of all requests together
        self._all_right, self._all_seen = self._all
        self._all_right *= INITIAL_ACCEPTANCE
        self._keep = (1 - 1 / BATCH_WINDOW) ** np.arange(num_slots + 1)  # after so many drafts
        self._column = np.arange(lookahead)
        self._expected = self._accepted = 0.0  # tokens of the last rounds that were checked
        self._num_added = 0
        self._record = max(RECORD, num_slots)
        self._latest = np.zeros(num_slots, dtype=np.int64)  # when something was added for each slot
        self._ended: list[tuple[int, np.ndarray]] = []  # the same, and the tables, of requests whose slot others have

    def begin(self, slot: int) -> None:
        """Another request has the slot."""
        if self._seen[slot, 0] >= FEW_DRAFTS:
            self._ended = [*self._ended[1 - self._record :], (int(self._latest[slot]), self._tables[slot].copy())]
        self._right[slot] = self._seen[slot] = 0.0

    def add(self, judged: Sequence[Judged]) -> None:
        """What became of drafts."""
        if not judged:
            return
        told = np.array([(each.slot, each.num_judged, each.num_right, each.num_seen) for each in judged])
        rows, new = told[:, 0], self._column < told[:, 2:, None]  # [B, 2, K]: which stand, and which were looked at
        self._num_added += 1
        if self._num_added % CHECK_INTERVAL == 0:
            was_judged = self._column < told[:, 1:2]
            expected = float((self.of(rows) * was_judged).sum())
            if not self._expected:
                self._expected = self._accepted = INITIAL_CHECKS * expected
            self._expected = self._expected * EXPECTED_DECAY + expected
            self._accepted = self._accepted * EXPECTED_DECAY + float((new[:, 0] & was_judged).sum())
        known = self._tables[rows]
        self._tables[rows] = np.where(new[:, 1:], known * (1 - 1 / WINDOW) + new, known)
        self._latest[rows] = self._num_added
        count = new.sum(0)
        self._all *= self._keep[count[1]]
        self._all += count

    @property
    def trust(self) -> float:
        """How many of the tokens that were expected have come: whoever picks the best of many is a little deceived."""
        return min(max(self._accepted / self._expected, 0.5), 1.2) if self._expected else 1.0

    def of(self, rows: np.ndarray, hope: float = 0.0) -> np.ndarray:
        """The chance that each token of a draft is accepted, by slot, [B, K]; it falls from token to token. `hope`:
        standard errors that are added to what was counted."""
        return self._chances(self._right[rows], self._seen[rows], hope)

    def knows(self, rows: np.ndarray) -> np.ndarray:
        """Of which slots drafts have said something, [B]."""
        return self._seen[rows, 0] >= FEW_DRAFTS

    def usual(self, rows: np.ndarray, hope: float = 0.0) -> np.ndarray:
        """The same of requests as they come, [N, K]: of those that ended last, and of those in these slots. Where
        drafts of some stand and those of others do not, none of them is like the average of all."""
        left = self._seen[:, 0] >= FEW_DRAFTS
        left[rows] = False
        ended = self._ended + [(int(self._latest[slot]), self._tables[slot]) for slot in np.flatnonzero(left)]
        ended.sort(key=lambda each: each[0])
        known = [table for _, table in ended[-self._record :]] + list(self._tables[rows[self.knows(rows)]])
        right, seen = np.array(known or [np.zeros((2, self.lookahead))]).swapaxes(0, 1)
        return self._chances(right, seen, hope / math.sqrt(len(seen)))  # of many, the mean is known well

    def _chances(self, right: np.ndarray, seen: np.ndarray, hope: float) -> np.ndarray:
        share, count = self._all_right / self._all_seen, seen + PRIOR_DRAFTS
        each = (right + PRIOR_DRAFTS * share) / count
        if hope:
            each = np.minimum(each + hope * np.sqrt(each * (1 - each) / count), 1.0)
        return each.cumprod(axis=1)

    def fade(self) -> None:
        """What is known may be out of date: what comes next counts more."""
        self._all *= np.minimum(1.0, FADED_DRAFTS / np.maximum(self._all_seen, 1e-9))
        self._tables *= np.minimum(1.0, FADED_DRAFTS / np.maximum(self._seen, 1e-9))[:, None]
        self._ended = []
