"""One end of the connection between the front and the engine. Sending never waits: what the other side has not taken
yet stays here, so a slow front cannot hold up a round, nor a long prompt the event loop."""

from __future__ import annotations

import os
import socket
import threading
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from typing import Any

FLUSH_SECONDS = 5.0


class Link:
    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._outgoing: SimpleQueue[Any] = SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="outrider-link", daemon=True)
        self._writer.start()

    def send(self, message: object) -> None:
        """The message as it is now. Where nobody is at the other end, nothing happens: whoever receives finds out."""
        self._outgoing.put(ForkingPickler.dumps(message))

    def receive(self) -> Any:
        """Waits for a message; EOFError or OSError where the other end has gone."""
        return self._connection.recv()

    @property
    def has_message(self) -> bool:
        """Also where the other end has gone: receive() does not wait."""
        return self._connection.poll()

    def fileno(self) -> int:
        return self._connection.fileno()

    def close(self) -> None:
        """Whoever receives at either end finds it closed; what was sent is delivered first, if the other end takes it.
        The file itself is closed when nobody holds it any more: a thread may be reading from it."""
        self._outgoing.put(None)
        self._writer.join(FLUSH_SECONDS)
        with socket.socket(fileno=os.dup(self._connection.fileno())) as end, suppress(OSError):
            end.shutdown(socket.SHUT_RDWR)

    def _write(self) -> None:
        while (message := self._outgoing.get()) is not None:
            try:
                self._connection.send_bytes(message)
            except OSError:
                return
