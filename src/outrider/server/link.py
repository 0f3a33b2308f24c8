"""One end of the connection between the front and the engine. Sending never waits: what the other side has not taken
yet stays here, so a slow front cannot hold up a round, nor a long prompt the event loop."""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import Any

FLUSH_SECONDS = 5.0
CHUNK = 1 << 20  # bytes that are read at once
LENGTH = struct.Struct("!Q")  # comes before every message


class Link:
    def __init__(self, end: socket.socket) -> None:
        self._socket = end
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
            self._fill()
        return pickle.loads(found)

    def take(self) -> Iterator[Any]:
        """All messages that are here, without waiting for one of which only a part is; errors as of receive()."""
        with suppress(BlockingIOError):
            while True:
                while (found := self._next()) is not None:
                    yield pickle.loads(found)
                self._fill(socket.MSG_DONTWAIT)

    def _fill(self, flags: int = 0) -> None:
        read = self._socket.recv(CHUNK, flags)
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
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _write(self) -> None:
        while (message := self._outgoing.get()) is not None:
            try:
                self._socket.sendall(LENGTH.pack(len(message)))
                self._socket.sendall(message)
            except OSError:
                return
