"""The router as a web application: whatever a replica can be asked can be asked here."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from dataclasses import replace

from prometheus_client import CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from outrider.server.errors import ApiError, internal_error, shutting_down
from outrider.server.events import event_stream
from outrider.server.request_id import RequestIds
from outrider.server.router.fleet import Asked, Fleet, passed_on
from outrider.server.router.relay import Figures, Relay, Whole
from outrider.server.security import Access, Guard
from outrider.server.tally import CONTENT_TYPE

_CLOSED = ApiError(499, "the client went away", "client_closed")


class RouterApplication:
    """The ASGI app in front of a fleet. It is what a Server drains and stops, too."""

    def __init__(self, fleet: Fleet, access: Access, capacity: int = 1024, root_path: str = "") -> None:
        """`capacity`: requests under way at once, at most."""
        self._fleet, self._pace, self._root_path = fleet, access.pace, root_path
        self.capacity, self.num_sequences = capacity, 0
        self.figures = Figures()
        self._draining = False
        self._registry = CollectorRegistry()
        self._registry.register(self.figures.tally)
        app: ASGIApp = Guard(self._answer, replace(access, root_path=root_path), capacity)
        if access.origins:  # outside of the guard: a preflight request carries no key
            app = CORSMiddleware(
                app,
                sorted(access.origins),
                allow_methods=["*"],
                allow_headers=["*"],
                expose_headers=["X-Request-Id"],
            )
        self.asgi: ASGIApp = RequestIds(app)

    @property
    def engine(self) -> RouterApplication:
        return self

    @property
    def is_idle(self) -> bool:
        return self.num_sequences == 0

    @property
    def is_dead(self) -> bool:
        return False  # replicas may come back

    def drain(self) -> None:
        self._draining = True

    def stop(self) -> None:
        self._draining = True

    # requests

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._live(receive, send)
        request = Request(scope, receive)
        path = scope["path"].removeprefix(self._root_path)
        self.num_sequences += 1
        try:
            response = await self._response(request, path)
        except ApiError as error:
            response = JSONResponse(error.body, error.status, error.headers)
        except HTTPException as error:  # of the guard: too large, or too slow
            told = ApiError(error.status_code, str(error.detail))
            response = JSONResponse(told.body, told.status, told.headers | dict(error.headers or {}))
        except Exception as error:
            told = internal_error(error)
            response = JSONResponse(told.body, told.status)
        try:
            await response(scope, receive, send)
        finally:
            self.num_sequences -= 1

    async def _response(self, request: Request, path: str) -> Response:
        if not path.startswith("/"):  # behind a replica's address it could name another host
            raise ApiError(404, f"there is no {path!r}", "not_found")
        if path.startswith("/health"):
            return self._health(path)
        if path == "/metrics":
            return Response(generate_latest(self._registry), media_type=CONTENT_TYPE)
        if self._draining:
            raise shutting_down()
        self.figures.requests.add(1)
        body = await request.body()
        query = f"?{request.url.query}" if request.url.query else ""
        headers = [*request.headers.items(), ("x-request-id", request.scope["request_id"])]
        relay = Relay(self._fleet, Asked(request.method, path + query, passed_on(headers), body), self.figures)
        whole = await _unless_left(request, relay)
        if whole is not None:
            return Response(whole.body, whole.status, dict(whole.headers))
        return event_stream(relay.chunks(), self._pace, relay.end, named=path == "/v1/responses")

    def _health(self, path: str) -> Response:
        """Ready while a replica is; alive in any case."""
        num_ready = self._fleet.num_ready
        good = path == "/health/live" or (num_ready > 0 and not self._draining)
        status = "ready" if good else "shutting down" if self._draining else "no replica is ready"
        return JSONResponse({"status": status, "replicas": num_ready}, 200 if good else 503)

    async def _live(self, receive: Receive, send: Send) -> None:
        await receive()
        await self._fleet.start()
        await send({"type": "lifespan.startup.complete"})
        await receive()
        await self._fleet.stop()
        await send({"type": "lifespan.shutdown.complete"})


async def _unless_left(request: Request, relay: Relay) -> Whole | None:
    """What comes of the request, as long as its client waits for it."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    opening, watching = asyncio.create_task(relay.opened()), asyncio.create_task(watch())
    try:
        await asyncio.wait([opening, watching], return_when=asyncio.FIRST_COMPLETED)
        if not opening.done():
            opening.cancel()
            with suppress(asyncio.CancelledError):
                await opening
            raise _CLOSED
        return opening.result()
    finally:
        watching.cancel()
        opening.cancel()
