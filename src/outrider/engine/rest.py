"""A drafter at rest: rounds go on without it. What it misses of the text is kept, and shown to it later all at once, as
if it were one more part of the prompt: then its memory is what it would have been."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.drafters.base import Drafter
from outrider.engine.cache import Cache
from outrider.engine.request import Request
from outrider.engine.runner import Runner
from outrider.engine.scheduler import Work
from outrider.types import Verdict


def rests(drafter: Drafter, cache: Cache, plan: Sequence[Work], depth: int) -> bool:
    """Whether a drafter has nothing to do in a step: all requests decode, and want no drafts."""
    if depth or not all(work.is_round and work.request.prediction is None for work in plan):
        return False
    return not is_behind(drafter, cache, [work.request for work in plan], 0, max(work.num_rows for work in plan))


def is_behind(drafter: Drafter, cache: Cache, requests: Sequence[Request], depth: int, num_rows: int) -> bool:
    """Whether a drafter must see what it has missed before rounds of such a depth, with so many more rows of each."""
    if depth or drafter.from_text:
        return any(request.num_missed for request in requests)
    return any(request.num_missed + num_rows > cache.shape.num_missable for request in requests)


def catch_up(drafter: Drafter, cache: Cache, runner: Runner, requests: Sequence[Request]) -> None:
    """A drafter sees what it has missed of these requests."""
    behind = [request for request in requests if request.num_missed]
    if not behind:
        return
    plan = [Work(each, each.num_computed - each.num_missed, each.num_missed, 0, emits=False) for each in behind]
    step = runner.pack(plan, depth=0)
    hidden = cache.missed(step)
    nothing = torch.zeros_like(step.num_rows)
    verdict = Verdict(tokens=nothing[:, None], count=nothing, kept=step.num_rows)
    cache.keep_taps(step, hidden, verdict)
    drafter.propose(step, hidden, verdict)
    for request in behind:
        request.num_missed = 0
