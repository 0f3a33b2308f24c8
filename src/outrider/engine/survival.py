"""How likely each token of a draft is to be accepted: counted for every request, position by position, and begun from
what is true of all requests together."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

WINDOW = 32  # drafts of a request that its record looks back on
BATCH_WINDOW = 256  # drafts that the average of all looks back on
PRIOR = 3.0  # drafts of its own that the average counts as much as
HOPE = 0.7  # what a position counts as that was never seen
FADED = 4.0  # drafts that what is known counts as much as, when it may be out of date


class Survival:
    """Tables by slot: how often a token of a draft was looked at, all before it being right, and how often it was right
    too."""

    def __init__(self, num_slots: int, lookahead: int) -> None:
        self.lookahead = lookahead
        self._right = np.zeros((num_slots, lookahead))
        self._seen = np.zeros((num_slots, lookahead))
        self._all_right = np.full(lookahead, HOPE)
        self._all_seen = np.ones(lookahead)
        self._column = np.arange(lookahead)

    def begin(self, slot: int) -> None:
        """Another request has the slot."""
        self._right[slot] = self._seen[slot] = 0.0

    def add(self, slots: Sequence[int], right: Sequence[int], seen: Sequence[int]) -> None:
        """Of each request's draft: how many of its first tokens were right, and how many were looked at: no more than
        one more."""
        if not slots:
            return
        rows, stands = np.asarray(slots), self._column < np.asarray(right)[:, None]
        looked = self._column < np.asarray(seen)[:, None]
        for table, new in ((self._right, stands), (self._seen, looked)):
            table[rows] = np.where(looked, table[rows] * (1 - 1 / WINDOW) + new, table[rows])
        count = looked.sum(0)
        keep = (1 - 1 / BATCH_WINDOW) ** count
        self._all_right = self._all_right * keep + stands.sum(0)
        self._all_seen = self._all_seen * keep + count

    @property
    def average(self) -> np.ndarray:
        """Of all requests: the share of drafts whose first tokens up to each one stand, [K]."""
        return (self._all_right / self._all_seen).cumprod()

    def of(self, slots: Sequence[int]) -> np.ndarray:
        """The chance that each token of a draft is accepted, [B, K]; it falls from token to token."""
        rows = np.asarray(slots)
        share = self._all_right / self._all_seen
        return ((self._right[rows] + PRIOR * share) / (self._seen[rows] + PRIOR)).cumprod(axis=1)

    def fade(self) -> None:
        """What is known may be out of date: what comes next counts more."""
        scale = np.minimum(1.0, FADED / np.maximum(self._all_seen, 1e-9))
        self._all_right, self._all_seen = self._all_right * scale, self._all_seen * scale
        scale_own = np.minimum(1.0, FADED / np.maximum(self._seen, 1e-9))
        self._right, self._seen = self._right * scale_own, self._seen * scale_own
