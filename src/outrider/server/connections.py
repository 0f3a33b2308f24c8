"""HTTP connections that do not wait for ever: whoever opens one must soon say what for, and whoever asked must read the
answer. Where there are too many, those that ask for nothing go first."""

from __future__ import annotations

import asyncio
import itertools
import resource
import socket
from contextlib import suppress
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEADER_SECONDS = 20.0  # from the first byte (or from the connection) to the end of the headers
READ_SECONDS = 10.0  # in which a client must have read something of an answer that waits for it
READ_BYTES = 2**16  # so much at least
SPARE = 64  # connections beyond those that are allowed, where none is idle: for health, and to tell the others
OWN_FILES = 256  # that the server has open beside connections


def connection_limit(wanted: int) -> int:
    """How many connections are taken: as many as are wanted, or as the system lets us have."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    return max(min(wanted, soft - OWN_FILES - SPARE), 16)


class PatientProtocol(H11Protocol):
    """uvicorn itself counts only the time between two requests."""

    max_connections = 2**16
    _timer: asyncio.TimerHandle | None = None  # for headers
    _read_timer: asyncio.TimerHandle | None = None
    _num_unread = 0  # bytes that wait for the client to read
    _idle_since = 0  # a number of _turns: the loop's own time may be the same for all that came at once
    _turns = itertools.count()

    @classmethod
    def with_room_for(cls, max_connections: int) -> type[PatientProtocol]:
        return type(cls.__name__, (cls,), {"max_connections": max_connections})

    @property
    def is_idle(self) -> bool:
        """Whether no request is under way."""
        return self.cycle is None or self.cycle.response_complete

    # who may stay

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._idle_since = next(self._turns)
        _give_up_on_silence(transport)
        self._wait()
        if len(self.connections) > self.max_connections:
            self._make_room()

    def _make_room(self) -> None:
        others = [each for each in self.connections if isinstance(each, PatientProtocol) and each is not self]
        idle = [each for each in others if each.is_idle and not each.transport.is_closing()]
        if idle:
            min(idle, key=lambda each: each._idle_since).transport.abort()
        elif len(self.connections) > self.max_connections + SPARE:
            self.transport.abort()

    # who says what for

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:  # headers are complete, or the connection is at its end
            self._stop()
        elif self._timer is None and not self.transport.is_closing():  # the next request has begun
            self._wait()

    def on_response_complete(self) -> None:
        self._idle_since = next(self._turns)
        super().on_response_complete()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop()
        self._stop_reading_timer()
        super().connection_lost(exc)

    def _wait(self) -> None:
        self._timer = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # who reads

    def pause_writing(self) -> None:
        super().pause_writing()
        self._await_reader()

    def resume_writing(self) -> None:
        self._stop_reading_timer()
        super().resume_writing()

    def _await_reader(self) -> None:
        self._num_unread = self.transport.get_write_buffer_size()
        self._read_timer = self.loop.call_later(READ_SECONDS, self._check_reader)

    def _check_reader(self) -> None:
        """Nothing more is written while so much is unread, so it can only have become less."""
        if self.transport.get_write_buffer_size() > self._num_unread - READ_BYTES:
            self.transport.abort()
        else:
            self._await_reader()

    def _stop_reading_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None


def _give_up_on_silence(transport: Any) -> None:
    """The system too gives up what nobody takes, also after we have closed our end."""
    connected = transport.get_extra_info("socket")
    with suppress(OSError, AttributeError):
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(2000 * READ_SECONDS))
