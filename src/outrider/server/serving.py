"""uvicorn with a graceful end: the first signal drains, the second ends everything now."""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol

import uvicorn
from starlette.types import ASGIApp

from outrider.server.connections import PatientProtocol, connection_limit
from outrider.server.log import log

MAX_HEADERS = 64 * 2**10
SPARE_CONNECTIONS = 256  # beyond one for each sequence that may wait or run
FLUSH_SECONDS = 5  # for answers that are on their way to a slow client


class Served(Protocol):
    """Whom a server asks how much there is to do, and tells to end."""

    capacity: int
    num_sequences: int

    @property
    def is_idle(self) -> bool: ...
    @property
    def is_dead(self) -> bool: ...
    def drain(self) -> None: ...
    def stop(self) -> None: ...


class ServedApplication(Protocol):
    asgi: ASGIApp

    @property
    def engine(self) -> Served: ...


class Server(uvicorn.Server):
    """After the first SIGTERM or SIGINT running requests finish, for `drain` seconds at most; new ones are refused.
    With `exit_on_death` it also ends when the engine has, so that whoever supervises the process starts it again."""

    def __init__(
        self,
        application: ServedApplication,
        host: str,
        port: int,
        drain: float = 30.0,
        *,
        exit_on_death: bool = True,
        on_listening: Callable[[], None] = lambda: None,
        **settings: Any,
    ) -> None:
        """`settings` of uvicorn's, as ssl_certfile."""
        config = uvicorn.Config(
            application.asgi,
            host=host,
            port=port,
            http=PatientProtocol.with_room_for(connection_limit(application.engine.capacity + SPARE_CONNECTIONS)),
            ws="none",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,
            h11_max_incomplete_event_size=MAX_HEADERS,
            timeout_graceful_shutdown=FLUSH_SECONDS,
            **settings,
        )
        super().__init__(config)
        self._engine = application.engine
        self._drain = drain
        self._exit_on_death, self._on_listening = exit_on_death, on_listening
        self._num_signals = 0
        self._drain_until: float | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets=sockets)
        if self.started:
            self._on_listening()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Only notes it: a lock might be held by whatever was interrupted. on_tick does the rest."""
        self._num_signals += 1

    async def on_tick(self, counter: int) -> bool:
        if self._num_signals and self._drain_until is None:
            log("draining", requests=self._engine.num_sequences)
            self._engine.drain()
            self._drain_until = time.monotonic() + self._drain
        if self._engine.is_dead and self._exit_on_death:
            log("exiting", logging.ERROR, reason="the engine has ended")
            return True
        if self._num_signals > 1:
            self.force_exit = True
            self._engine.stop()
            return True
        if self._drain_until is not None and (self._engine.is_idle or time.monotonic() > self._drain_until):
            self._engine.stop()
            return True
        return await super().on_tick(counter)
