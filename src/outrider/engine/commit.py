"""A request takes the tokens that a round brought, and the watchdog is told how its draft fared."""

from __future__ import annotations

from outrider.engine.request import Progress, Request, Work
from outrider.engine.watchdog import Watchdog
from outrider.types import Outcome


def commit(work: Work, outcome: Outcome, max_model_len: int, watchdog: Watchdog | None) -> Progress:
    """All of them, or as many as come before the request ends."""
    request, tokens, num_judged = work.request, outcome.tokens, outcome.num_judged
    is_round = work.is_round and request.num_outputs > 0
    taken = 0
    for taken, token in enumerate(tokens, start=1):
        request.append(token, max_model_len, taken if taken < len(tokens) else 0)
        if request.finished:
            break
    if not (is_round and taken):
        return Progress(request, taken)
    accepted = min(len(tokens) - 1, taken)
    request.count_round(num_judged, accepted, taken)
    if watchdog is not None:
        _tell(watchdog, request, num_judged + request.num_refused, accepted)
    if request.params.trace:
        request.trace.append({"draft": request.draft[:num_judged], "accepted": accepted})
    return Progress(request, taken, num_judged, accepted)


def _tell(watchdog: Watchdog, request: Request, num_judged: int, accepted: int) -> None:
    """Of a round. What a client predicts or a grammar forces says nothing about the drafter."""
    if not num_judged:
        watchdog.plain_round(request.standing)
    elif not (request.draft_is_predicted or request.draft_is_forced):
        watchdog.drafted_round(request.standing, request.request_id, len(request.tokens), (num_judged, accepted))
