"""The replicas behind a router: servers that are asked over HTTP, and looked after while nobody asks."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Protocol

import httpx

from outrider.server.errors import ApiError
from outrider.server.log import log
from outrider.server.router.affinity import Affinity

CHECK_SECONDS = 1.0
CONNECT_SECONDS = 5.0
MAX_FAILED = 3  # looks in a row that fail: what a replica was doing goes on elsewhere
_PASSED_ON = frozenset({"authorization", "content-type", "accept", "x-request-id"})
_PASSED_BACK = frozenset({"content-type", "retry-after", "cache-control", "www-authenticate", "x-accel-buffering"})


class LostError(Exception):
    """A replica has gone before its answer was complete."""


@dataclass(frozen=True)
class Asked:
    """A client's request, as it goes to a replica."""

    method: str
    path: str  # with its query
    headers: list[tuple[str, str]]
    body: bytes


class Answer(Protocol):
    """What a replica says; whoever has one closes it."""

    @property
    def replica(self) -> str: ...
    @property
    def status(self) -> int: ...
    @property
    def headers(self) -> list[tuple[str, str]]: ...
    def chunks(self) -> AsyncGenerator[bytes, None]:
        """The body as it comes. Raises LostError."""

    async def close(self) -> None: ...


class Fleet(Protocol):
    @property
    def num_ready(self) -> int: ...
    async def start(self) -> None: ...
    async def stop(self) -> None: ...
    async def ask(self, asked: Asked, names: Sequence[bytes], avoided: Collection[str]) -> Answer:
        """Of the best replica that is not avoided. Raises LostError where that one has gone, and ApiError where there
        is none and none has come in time."""


def passed_on(headers: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """What a replica needs to know of a client's headers. Who may ask from where, the router has checked."""
    return [(name, value) for name, value in headers if name.lower() in _PASSED_ON]


def passed_back(headers: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    return [(name, value) for name, value in headers if name.lower() in _PASSED_BACK]


def nobody() -> ApiError:
    return ApiError(503, "no replica is ready: try again later", "no_replica", retry_after=5)


@dataclass(eq=False)
class _Replica:
    url: str
    is_ready: bool = False
    num_failed: int = 0  # looks in a row
    answers: set[HttpAnswer] = field(default_factory=set)  # under way


@dataclass(eq=False)
class HttpAnswer:
    fleet: HttpFleet
    of: _Replica
    response: httpx.Response

    @property
    def replica(self) -> str:
        return self.of.url

    @property
    def status(self) -> int:
        return self.response.status_code

    @property
    def headers(self) -> list[tuple[str, str]]:
        return passed_back(self.response.headers.multi_items())

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        try:
            async for chunk in self.response.aiter_raw():
                yield chunk
        except (httpx.TransportError, httpx.StreamError) as error:
            self.fleet.lost(self.of, error)
            raise LostError(str(error)) from error

    async def close(self) -> None:
        if self in self.of.answers:
            self.of.answers.remove(self)
            self.fleet.affinity.ended(self.of.url)
            await self.response.aclose()


class HttpFleet:
    """`patience`: seconds that a request waits for a replica where none is ready; `interval`: from one look at a
    replica's health to the next."""

    def __init__(self, urls: Sequence[str], patience: float = 30.0, interval: float = CHECK_SECONDS) -> None:
        self.affinity = Affinity()
        self._replicas = [_Replica(url.rstrip("/")) for url in dict.fromkeys(urls)]
        self._patience, self._interval = patience, interval
        self._changed = asyncio.Condition()
        self._checks: list[asyncio.Task[None]] = []
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=256)
        timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)
        self._client = httpx.AsyncClient(limits=limits, timeout=timeout, trust_env=False)

    @property
    def num_ready(self) -> int:
        return sum(each.is_ready for each in self._replicas)

    async def start(self) -> None:
        await asyncio.gather(*map(self._look, self._replicas))
        self._checks = [asyncio.create_task(self._look_after(each)) for each in self._replicas]

    async def stop(self) -> None:
        for check in self._checks:
            check.cancel()
        await asyncio.gather(*self._checks, return_exceptions=True)
        await self._client.aclose()

    async def ask(self, asked: Asked, names: Sequence[bytes], avoided: Collection[str]) -> HttpAnswer:
        replica = await self._choose(names, avoided)
        self.affinity.sent(replica.url, names)
        request = self._client.build_request(
            asked.method, replica.url + asked.path, headers=asked.headers, content=asked.body
        )
        try:
            response = await self._client.send(request, stream=True)
        except httpx.TransportError as error:
            self.affinity.ended(replica.url)
            self.lost(replica, error)
            raise LostError(str(error)) from error
        except BaseException:
            self.affinity.ended(replica.url)
            raise
        answer = HttpAnswer(self, replica, response)
        replica.answers.add(answer)
        return answer

    async def _choose(self, names: Sequence[bytes], avoided: Collection[str]) -> _Replica:
        async with self._changed:
            with suppress(TimeoutError):
                async with asyncio.timeout(self._patience):
                    await self._changed.wait_for(lambda: bool(self._ready(avoided)))
        ready = self._ready(avoided)
        if not ready:
            raise nobody()
        return ready[self.affinity.ranked(names, ready)[0]]

    def _ready(self, avoided: Collection[str]) -> dict[str, _Replica]:
        return {each.url: each for each in self._replicas if each.is_ready and each.url not in avoided}

    # health

    def lost(self, replica: _Replica, error: Exception) -> None:
        """At the first error: until it is seen to be well again, nobody is sent there."""
        if replica.is_ready:
            log("replica_lost", logging.WARNING, replica=replica.url, reason=type(error).__name__)
            replica.is_ready = False
            self.affinity.forget(replica.url)

    async def _look_after(self, replica: _Replica) -> None:
        while True:
            await asyncio.sleep(self._interval)
            await self._look(replica)

    async def _look(self, replica: _Replica) -> None:
        try:
            answer = await self._client.get(f"{replica.url}/health/ready", timeout=CONNECT_SECONDS)
        except httpx.TransportError as error:
            replica.num_failed += 1
            refused = isinstance(error, httpx.ConnectError)
            if refused or replica.num_failed >= MAX_FAILED:
                self.lost(replica, error)
                for each in list(replica.answers):  # their readers learn of it
                    await each.response.aclose()
            return
        replica.num_failed = 0
        if answer.status_code != 200:
            replica.is_ready = False  # it ends, and finishes what it has
        elif not replica.is_ready:
            log("replica_ready", replica=replica.url)
            async with self._changed:
                replica.is_ready = True
                self._changed.notify_all()
