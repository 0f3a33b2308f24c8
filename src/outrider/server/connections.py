"""HTTP connections that do not wait for ever: whoever opens one must soon say what for."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 20.0  # from the first byte (or from the connection) to the end of the headers


class PatientProtocol(H11Protocol):
    """Closes a connection whose headers do not come. uvicorn itself counts only the time between two requests."""

    _timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._wait()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:  # headers are complete, or the connection is at its end
            self._stop()
        elif self._timer is None and not self.transport.is_closing():  # the next request has begun
            self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._timer = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
