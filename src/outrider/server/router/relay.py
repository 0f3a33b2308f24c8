"""A client's request on its way through replicas: asked again elsewhere where one has gone, or cannot take it."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import orjson

from outrider.server.errors import ApiError
from outrider.server.log import log
from outrider.server.router.affinity import names_of
from outrider.server.router.fleet import Answer, Asked, Fleet, LostError
from outrider.server.router.replay import Replayed
from outrider.server.router.stream import DONE, Chunk, Resumable, events_of
from outrider.server.tally import Tally

MAX_LOST = 3  # replicas that a request may see end: it may be what ends them
BUSY = frozenset({429, 503})  # another one may have room
ENDING_SECONDS, PAUSE = 30.0, 0.5  # in which all that are left may end and begin again, asked so often
ENDED = frozenset({"engine_dead", "shutting_down"})  # errors in a stream that are its replica's end, not its own


@dataclass(frozen=True)
class Whole:
    """An answer that is complete."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes


class Relay:
    """One request: first it is `opened`; if that brings no whole answer, it streams `chunks`."""

    def __init__(self, fleet: Fleet, asked: Asked, figures: Figures) -> None:
        self._fleet, self._asked, self._figures = fleet, asked, figures
        body = _body_of(asked)
        owner = next((value.encode() for name, value in asked.headers if name == "authorization"), b"")
        self._names: Sequence[bytes] = names_of(body, owner) if body else ()
        self._stream = _stream_of(asked.path.partition("?")[0], body)
        self._avoided: set[str] = set()
        self._num_lost = 0
        self._answer: Answer | None = None

    async def opened(self) -> Whole | None:
        """The whole answer; None where a stream begins."""
        while True:
            try:
                answer = await self._ask()
                if self._stream is not None and answer.status == 200:
                    self._answer = answer
                    return None
                async with _closing(answer):
                    body = b"".join([chunk async for chunk in answer.chunks()])
                return Whole(answer.status, answer.headers, body)
            except LostError as error:
                self._count_lost(error)

    async def chunks(self) -> AsyncGenerator[Chunk, None]:
        """Of a stream, until it has ended. Raises ApiError."""
        stream = self._stream
        assert stream is not None
        while True:
            try:
                answer, self._answer = self._answer or await self._ask(), None
                if answer.status != 200:
                    raise await _error_of(answer)
                async with _closing(answer), aclosing(answer.chunks()) as chunks, aclosing(events_of(chunks)) as events:
                    async for event in events:
                        if event == DONE:
                            return
                        chunk = orjson.loads(event)
                        error = chunk if chunk.get("type") == "error" else chunk.get("error")
                        if error is not None and error["code"] in ENDED:
                            raise LostError(error["code"])
                        for each in stream.take(chunk) if error is None else [chunk]:
                            yield each
                        if error is not None or stream.is_last(chunk):
                            return
                raise LostError("the stream has no end")
            except LostError as error:
                self._count_lost(error)
                stream.begin_again()
                self._figures.resumed.add(1)

    def end(self) -> None:
        """Nobody reads any more, perhaps before the first chunk was asked for."""
        if self._answer is not None:
            self._closing = asyncio.ensure_future(self._answer.close())

    async def _ask(self) -> Answer:
        """An answer that is not of somebody too busy, unless all are."""
        asked = self._asked
        if self._stream is not None:
            asked = replace(asked, body=self._stream.body)
        busy: ApiError | None = None
        until = time.monotonic() + ENDING_SECONDS
        while True:
            try:
                answer = await self._fleet.ask(asked, self._names, self._avoided)
            except ApiError as error:
                raise busy or error from None
            if answer.status not in BUSY:
                return answer
            busy = await _error_of(answer)
            if len(self._avoided) < self._fleet.num_ready - 1:
                self._avoided.add(answer.replica)
            elif busy.code in ENDED and time.monotonic() < until:  # it will be started again
                self._avoided.clear()
                await asyncio.sleep(PAUSE)
            else:
                raise busy

    def _count_lost(self, error: LostError) -> None:
        self._num_lost += 1
        self._figures.lost.add(1)
        log("request_goes_on_elsewhere", logging.WARNING, reason=str(error)[:200], times=self._num_lost)
        if self._num_lost >= MAX_LOST:
            message = f"{MAX_LOST} replicas have ended while they worked at this request: it may be the reason"
            raise ApiError(502, message, "replica_lost") from error


class Figures:
    """What a router has seen."""

    def __init__(self) -> None:
        self.tally = Tally("router")
        self.requests = self.tally.count("outrider:router_requests", "Requests")
        self.lost = self.tally.count("outrider:router_lost", "Times that a replica ended under a request")
        self.resumed = self.tally.count("outrider:router_resumed", "Of those, streams that went on elsewhere")


class _closing:  # noqa: N801
    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    async def __aenter__(self) -> None:
        pass

    async def __aexit__(self, *_: object) -> None:
        await self._answer.close()


def _body_of(asked: Asked) -> dict[str, Any]:
    """Empty where it is no JSON object: whoever is asked will say what is wrong with it."""
    try:
        body = orjson.loads(asked.body)
    except orjson.JSONDecodeError:
        return {}
    return body if isinstance(body, dict) else {}


def _stream_of(path: str, body: dict[str, Any]) -> Resumable | Replayed | None:
    """How a stream goes on elsewhere; None where it is none."""
    seed = secrets.randbits(31)
    if body.get("stream") is not True:
        return None
    if path in ("/v1/chat/completions", "/v1/completions"):
        return Resumable(body, seed)
    return Replayed(body, seed) if path == "/v1/responses" else None


async def _error_of(answer: Answer) -> ApiError:
    """What a replica that does not answer says instead."""
    async with _closing(answer):
        body = b"".join([chunk async for chunk in answer.chunks()])
    try:
        error = orjson.loads(body)["error"]
        message, code = str(error["message"]), error.get("code")
    except (orjson.JSONDecodeError, KeyError, TypeError):
        message, code = "the replica did not answer", None
    later = next((value for name, value in answer.headers if name.lower() == "retry-after"), None)
    return ApiError(answer.status, message, code, retry_after=int(later) if later and later.isdigit() else None)
