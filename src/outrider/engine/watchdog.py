"""Watches how many draft tokens are accepted, and acts where acceptance has died: first what is remembered of the
request is computed again, then it decodes plainly. What is said never changes, only how soon."""

from __future__ import annotations

import bisect
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outrider.config import EngineConfig, WatchdogConfig
from outrider.drafters.base import Drafter

CONTEXTS = (256, 1024, 4096, 16384, 65536)  # upper ends of the buckets of context length
MAX_NOTICES = 1000  # that nobody has taken
MAX_FAILED_REBUILDS = 3  # in a row: whatever ails the drafter at such lengths, it is not its memory
LONGEST_PAUSE = 16  # times the shortest
QUIET = 60.0  # seconds at least from one suspicion of a request to the next that is told, and of all together
INITIAL_ACCEPTED = 1.0  # accepted tokens a round: the average that everything begins with
# In terms of what counts as dead: what averages begin anew with after a rebuild (nothing accepted: dead again after 14
# rounds) and when a pause is over (after 4 rounds), and what it takes to count as alive again.
AFTER_REBUILD, ON_TRIAL, ALIVE = 2.5, 1.25, 3.0


def context_bucket(context_len: int) -> str:
    number = bisect.bisect_left(CONTEXTS, context_len)
    return f"<={CONTEXTS[number]}" if number < len(CONTEXTS) else f">{CONTEXTS[-1]}"


@dataclass(frozen=True)
class Notice:
    """Something that a log should hold."""

    event: str
    fields: dict[str, Any]
    is_alarm: bool = False


@dataclass
class Average:
    """Moving averages over the last rounds that had a draft."""

    window: int
    accepted: float = INITIAL_ACCEPTED  # tokens a round
    share: float = 0.0  # of what was drafted

    def add(self, num_drafts: int, num_accepted: int) -> None:
        self.accepted += (num_accepted - self.accepted) / self.window
        self.share += (num_accepted / num_drafts - self.share) / self.window


@dataclass
class Bucket:
    """All requests with contexts of similar length."""

    average: Average
    failed_rebuilds: int = 0  # in a row


@dataclass
class RequestHealth:
    """How drafting stands for one request."""

    average: Average | None = None
    plain_rounds: int = 0  # yet to come before drafts are tried again
    pause: int = 0  # how many there will be the next time; 0: it has never died
    needs_rebuild: bool = False  # what target and drafter remember of it is to be computed again
    rebuilt: bool = False
    on_trial: bool = False  # since a rebuild or a pause
    is_suspicious: bool = False

    @property
    def is_paused(self) -> bool:
        return self.plain_rounds > 0


@dataclass
class AcceptanceCounts:
    rebuilds: int = 0
    fallbacks: int = 0  # requests that went on plainly
    recoveries: int = 0


class Watchdog:
    """Told of every round by the engine. Of requests it keeps nothing: their `Standing` is theirs."""

    def __init__(
        self,
        settings: WatchdogConfig,
        *,
        acts: bool,
        rebuilds: bool,
        suspects: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self._acts, self._rebuilds, self._suspects, self._clock = acts, rebuilds, suspects, clock
        self.counts = AcceptanceCounts()
        self.average = Average(settings.engine_window)
        self.buckets: dict[str, Bucket] = {}
        self.is_dead = False  # acceptance of all requests together
        self.is_suspicious = False
        self._notices: deque[Notice] = deque(maxlen=MAX_NOTICES)
        self._suspected = {"request": -math.inf, "all": -math.inf}  # when that was told last

    @classmethod
    def of(cls, config: EngineConfig, drafter: Drafter | None) -> Watchdog | None:
        """A drafter that was forced is used however bad it is; one that reads tokens only has nothing to compute again;
        and acceptance that is made up is not suspicious."""
        if config.watchdog is None or drafter is None or config.speculative is None:
            return None
        how = config.speculative
        return cls(
            config.watchdog, acts=not how.force, rebuilds=not drafter.reads_tokens_only, suspects=not how.is_synthetic
        )

    def take_notices(self) -> list[Notice]:
        taken = list(self._notices)
        self._notices.clear()
        return taken

    def plain_round(self, standing: RequestHealth) -> None:
        """A request had no draft in this round."""
        if not standing.plain_rounds:
            return
        if standing.plain_rounds == 1:
            self._retry(standing, ON_TRIAL)
        standing.plain_rounds -= 1

    def drafted_round(self, standing: RequestHealth, name: str, context_len: int, made: tuple[int, int]) -> None:
        """A request had a draft: how many tokens were `made`, (drafted, accepted)."""
        context = context_bucket(context_len)
        bucket = self.buckets.setdefault(context, Bucket(Average(self.settings.engine_window)))
        standing.average = standing.average or Average(self.settings.window)
        for average in (standing.average, bucket.average, self.average):
            average.add(*made)
        self._judge_engine()
        self._suspect(standing, name, context)
        dead, accepted = self.settings.dead_acceptance, standing.average.accepted
        if standing.on_trial and accepted >= ALIVE * dead:
            self._recover(standing, bucket, _fields(name, context, standing))
        elif accepted < dead and self._acts:
            self._on_dead(standing, bucket, _fields(name, context, standing))

    # one request

    def _on_dead(self, standing: RequestHealth, bucket: Bucket, fields: dict[str, Any]) -> None:
        """A request's drafts are no longer accepted: it is rebuilt, or drafting pauses."""
        if standing.on_trial and standing.pause == 0:  # the rebuild has not helped
            bucket.failed_rebuilds += 1
        helpful = bucket.failed_rebuilds < MAX_FAILED_REBUILDS or self._lives(bucket.average)
        if self._rebuilds and not standing.rebuilt and helpful:
            standing.rebuilt = standing.needs_rebuild = True
            self.counts.rebuilds += 1
            self._retry(standing, AFTER_REBUILD)
            self._log("drafter_rebuild", fields)
            return
        if standing.pause == 0:
            self.counts.fallbacks += 1
            self._log("drafter_fallback", fields)
        standing.pause = min(max(2 * standing.pause, self.settings.pause), LONGEST_PAUSE * self.settings.pause)
        standing.plain_rounds = standing.pause

    def _retry(self, standing: RequestHealth, hope: float) -> None:
        assert standing.average is not None
        standing.on_trial = True
        standing.average.accepted = hope * self.settings.dead_acceptance

    def _recover(self, standing: RequestHealth, bucket: Bucket, fields: dict[str, Any]) -> None:
        if standing.pause == 0:  # it was the rebuild
            bucket.failed_rebuilds = 0
        standing.on_trial, standing.pause = False, 0
        self.counts.recoveries += 1
        self._log("drafter_recovered", fields)

    def _suspect(self, standing: RequestHealth, name: str, context: str) -> None:
        """Almost everything is accepted: the text is a loop, or whoever judges is broken."""
        assert standing.average is not None
        suspicious = standing.average.share >= self.settings.suspicious_share
        if suspicious and not standing.is_suspicious and not self.is_suspicious:
            self._tell_suspicion("request", _fields(name, context, standing))
        standing.is_suspicious = standing.is_suspicious or suspicious

    # all of them

    def _judge_engine(self) -> None:
        if not self.is_dead and self.average.accepted < self.settings.dead_acceptance:
            self.is_dead = True
            self._log("acceptance_dead", self._figures(), is_alarm=True)
        elif self.is_dead and self._lives(self.average):
            self.is_dead = False
            self._log("acceptance_alive", self._figures())
        suspicious = self.average.share >= self.settings.suspicious_share
        if suspicious and not self.is_suspicious:
            self._tell_suspicion("all", self._figures())
        self.is_suspicious = suspicious

    def _figures(self) -> dict[str, Any]:
        return {"accepted": round(self.average.accepted, 3), "share": round(self.average.share, 3)}

    def _lives(self, average: Average) -> bool:
        return average.accepted >= ALIVE * self.settings.dead_acceptance

    def _tell_suspicion(self, whose: str, fields: dict[str, Any]) -> None:
        """Now and then: there may be as many as there are requests."""
        if self._suspects and self._clock() >= self._suspected[whose] + QUIET:
            self._suspected[whose] = self._clock()
            self._log("acceptance_suspicious", fields, is_alarm=True)

    def _log(self, event: str, fields: dict[str, Any], *, is_alarm: bool = False) -> None:
        self._notices.append(Notice(event, fields, is_alarm))


def _fields(name: str, context: str, standing: RequestHealth) -> dict[str, Any]:
    assert standing.average is not None
    return {"id": name, "context": context, "accepted": round(standing.average.accepted, 3)}
