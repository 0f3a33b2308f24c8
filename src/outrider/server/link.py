"""One end of the connection between the front and the engine. Sending never waits: what the other side has not taken
yet stays here, so a slow front cannot hold up a round, nor a long prompt the event loop."""

from __future__ import annotations

import os
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import Any

FLUSH_SECONDS = 5.0
WAIT_SECONDS = 3600.0  # at a time: whoever waits goes on waiting
CHUNK = 1 << 20  # bytes that are read at once
LENGTH = struct.Struct("!Q")  # comes before every message


class Link:
    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        end.settimeout(WAIT_SECONDS)  # its file never blocks, as some event loops see to: waiting is ours
        self._incoming = bytearray()
        self._outgoing: SimpleQueue[Any] = SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="outrider-link", daemon=True)
        self._writer.start()

    def send(self, message: object) -> None:
        """The message as it is now. Where nobody is at the other end, nothing happens: whoever receives finds out."""
        self._outgoing.put(ForkingPickler.dumps(message))

    def receive(self) -> Any:
        """Waits for a message; EOFError or OSError where the other end has gone."""
        while (found := self._next()) is None:
            with suppress(TimeoutError):
                self._fill(self._socket.recv(CHUNK))
        return ForkingPickler.loads(found)

    def take(self) -> Iterator[Any]:
        """All messages that are here, without waiting for one of which only a part is; errors as of receive()."""
        with suppress(BlockingIOError):
            while True:
                while (found := self._next()) is not None:
                    yield ForkingPickler.loads(found)
                self._fill(os.read(self._socket.fileno(), CHUNK))

    def _fill(self, read: bytes) -> None:
        if not read:
            raise EOFError("the other end has gone")
        self._incoming += read

    def _next(self) -> bytes | None:
        """A message that is here as a whole."""
        if len(self._incoming) < LENGTH.size:
            return None
        end = LENGTH.size + LENGTH.unpack_from(self._incoming)[0]
        if len(self._incoming) < end:
            return None
        found = bytes(self._incoming[LENGTH.size : end])
        del self._incoming[:end]
        return found

    def fileno(self) -> int:
        return self._socket.fileno()

    def close(self) -> None:
        """Whoever receives at either end finds it closed; what was sent is delivered first, if the other end takes it.
        The file itself is closed when nobody holds it any more: a thread may be reading from it."""
        self._outgoing.put(None)
        self._writer.join(FLUSH_SECONDS)
        self._end()

    def _write(self) -> None:
        """Where it fails, nobody may go on waiting for what was to be sent: both ends find the link closed."""
        try:
            with suppress(OSError):
                while (message := self._outgoing.get()) is not None:
                    self._write_all(LENGTH.pack(len(message)))
                    self._write_all(message)
        finally:
            self._end()

    def _end(self) -> None:
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _write_all(self, message: bytes) -> None:
        left = memoryview(message)
        while left:
            with suppress(TimeoutError):
                left = left[self._socket.send(left) :]
