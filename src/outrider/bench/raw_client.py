"""A client that costs next to nothing: many HTTP requests at once from one thread, answers kept as bytes.
Whoever measures a server on its own machine must not take the server's CPU time."""

from __future__ import annotations

import json
import selectors
import socket
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

TIMEOUT = 600.0


@dataclass(eq=False)
class RawAnswer:
    """What came back for one request."""

    number: int
    begin: float
    first: float = 0.0  # seconds until the first bytes after the header
    seconds: float = 0.0
    received: list[bytes] = field(default_factory=list)

    @property
    def status(self) -> int:
        return int(b"".join(self.received[:64]).split(b" ", 2)[1]) if self.received else 0

    @property
    def body(self) -> bytes:
        head, _, rest = b"".join(self.received).partition(b"\r\n\r\n")
        return _unchunked(rest) if b"transfer-encoding: chunked" in head.lower() else rest

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """JSON objects of a stream, or the one of a whole answer."""
        text = self.body.decode()
        if not text.startswith("data: "):
            return [json.loads(text)]
        events = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
        return [json.loads(event) for event in events if event != "[DONE]"]


def ask_all(address: tuple[str, int], path: str, bodies: Sequence[Any], concurrency: int) -> list[RawAnswer]:
    """Posts all bodies, `concurrency` of them at a time, each over a connection of its own."""
    waiting = deque(enumerate(_message(address, path, body) for body in bodies))
    answers: list[RawAnswer] = []
    with selectors.DefaultSelector() as selector:
        while waiting or selector.get_map():
            while waiting and len(selector.get_map()) < concurrency:
                number, message = waiting.popleft()
                connection = socket.create_connection(address, TIMEOUT)
                connection.sendall(message)
                connection.setblocking(False)
                selector.register(connection, selectors.EVENT_READ, RawAnswer(number, time.perf_counter()))
            ready = selector.select(TIMEOUT)
            if not ready:
                raise ValueError(f"the server at {address[0]}:{address[1]} has been silent for {TIMEOUT:.0f} s")
            for key, _ in ready:
                if _receive(key.fileobj, key.data):  # type: ignore[arg-type]
                    selector.unregister(key.fileobj)
                    key.fileobj.close()  # type: ignore[union-attr]
                    answers.append(key.data)
    return sorted(answers, key=lambda answer: answer.number)


def _message(address: tuple[str, int], path: str, body: Any) -> bytes:
    content = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: {address[0]}:{address[1]}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + content


def _receive(connection: socket.socket, answer: RawAnswer) -> bool:
    """Whether that was all."""
    data = connection.recv(1 << 16)
    now = time.perf_counter() - answer.begin
    if data:
        answer.first = answer.first or now
        answer.received.append(data)
        return False
    answer.seconds = now
    return True


def _unchunked(data: bytes) -> bytes:
    parts, place = [], 0
    while (end := data.find(b"\r\n", place)) >= 0:
        size = int(data[place:end], 16)
        if size == 0:
            break
        parts.append(data[end + 2 : end + 2 + size])
        place = end + 4 + size
    return b"".join(parts)
