"""Answers that stream as server-sent events, and are closed in order when their reader leaves."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from typing import Any

import orjson
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from outrider.server.errors import ApiError, internal_error
from outrider.server.pacing import paced

HEADERS = {"Cache-Control": "no-cache", "X-Accel-Buffering": "no"}


def event_stream(
    chunks: AsyncGenerator[dict[str, Any], None], pace: float, on_end: Callable[[], None], *, named: bool = False
) -> EventStream:
    """The chunks of an answer as events. `pace`: seconds between frames of one size, 0: as they come.
    `on_end` is called in any case, also where the reader left before the first chunk was made.
    `named`: each has a type, which is the event's name, and no mark comes after the last."""
    events = _named_events(chunks) if named else _events(chunks)
    return EventStream(paced(events, pace) if pace else events, on_end)


class EventStream(StreamingResponse):
    """A response whose generator is closed as soon as the response has ended, however it ended.

    A reader that leaves while a chunk is being sent leaves the generator where it is. The garbage collector would hand
    it to the event loop together with those it reads from, to be closed in any order: the inner ones first, which is
    an error for the outer ones."""

    def __init__(self, events: AsyncGenerator[bytes, None], on_end: Callable[[], None]) -> None:
        super().__init__(events, media_type="text/event-stream", headers=HEADERS)
        self._events, self._on_end = events, on_end

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with aclosing(self._events):
                await super().__call__(scope, receive, send)
        finally:
            self._on_end()


async def _events(chunks: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(chunks):
        try:
            async for chunk in chunks:
                yield _event(chunk)
        except ApiError as error:  # the status line is gone: the error comes as an event
            yield _event(error.body)
        except Exception as error:
            yield _event(internal_error(error).body)
        yield b"data: [DONE]\n\n"


async def _named_events(chunks: AsyncGenerator[dict[str, Any], None]) -> AsyncGenerator[bytes, None]:
    async with aclosing(chunks):
        async for chunk in chunks:
            yield b"event: %b\n%b" % (chunk["type"].encode(), _event(chunk))


def _event(content: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % orjson.dumps(content)
