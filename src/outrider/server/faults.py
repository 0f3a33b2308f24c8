"""One bad request fails alone. After a step that raised, finds who is to blame; everybody else starts over from the
tokens it has, which are the same tokens it would have had."""

from __future__ import annotations

from outrider.engine.engine import Engine
from outrider.engine.request import Request


def suspects_of(engine: Engine) -> list[Request]:
    """Who may have made a step fail: those who run, and the one who would have been admitted next."""
    return [*engine.scheduler.running, *list(engine.scheduler.waiting)[:1]]


def blame(engine: Engine) -> list[Request]:
    """The requests to fail; empty where each of them runs well alone. Nothing is left running."""
    suspects = suspects_of(engine)
    _send_back(engine)
    torn = [request for request in suspects if not _is_whole(request)]
    if torn:  # the host broke off in the middle of a request, so it was that one
        return torn
    return [request for request in suspects if not request.finished and not _runs_alone(engine, request)]


def discard(engine: Engine, request: Request) -> None:
    """Takes a request out of the engine, whatever state it is in."""
    scheduler = engine.scheduler
    try:
        engine.abort(request)
    except Exception:  # its text or its drafter may be what is broken; pages and slot are freed all the same
        request.finish_reason = request.finish_reason or "abort"
        if request in scheduler.waiting:
            scheduler.waiting.remove(request)
        if request in scheduler.running:
            scheduler.release(request)


def _send_back(engine: Engine) -> None:
    scheduler = engine.scheduler
    for request in reversed(list(scheduler.running)):  # the oldest comes first again
        if request.finished:
            scheduler.release(request)
        else:
            scheduler.preempt(request)


def _is_whole(request: Request) -> bool:
    """Whether everything that is kept for every token is there for every token."""
    lengths = {request.num_outputs, len(request.draft_positions), len(request.text_ends)}
    if request.params.logprobs is not None:
        lengths.add(len(request.logprobs))
    return len(lengths) == 1


def _runs_alone(engine: Engine, request: Request) -> bool:
    """Whether it gets its next token when nobody else is there."""
    scheduler = engine.scheduler
    others = list(scheduler.waiting)
    scheduler.waiting.clear()
    scheduler.waiting.append(request)
    before = request.num_outputs
    try:
        for _ in range(2 + len(request.tokens)):  # a prompt may come in chunks, at worst of one token
            if request.finished or request.num_outputs > before:
                break
            engine.step()
        return request.finished or request.num_outputs > before
    except Exception:
        return False
    finally:
        _send_back(engine)
        scheduler.waiting.clear()
        scheduler.waiting.extend(other for other in others if not other.finished)
