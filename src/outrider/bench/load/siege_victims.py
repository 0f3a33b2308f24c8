"""Those who are served while a siege goes on: plain requests and health checks, one after the other, each over a
connection of its own, and how long each took. They are a process of their own: nothing of the attackers' slows them."""

from __future__ import annotations

import http.client
import json
import multiprocessing
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import NamedTuple

PAUSE = 0.05  # seconds between two requests of the same kind
TIMEOUT = 60.0
PLAIN = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2, "temperature": 0}


class Address(NamedTuple):
    host: str
    port: int
    api_key: str | None
    model: str | None
    has_chat: bool


class Measured(NamedTuple):
    """One request: when it began, how long it took, and what came of it (0: nothing)."""

    begin: float
    seconds: float
    status: int
    text: str


@dataclass
class Seen:
    """What the victims have seen, by kind: health, plain, chat."""

    found: dict[str, list[Measured]] = field(default_factory=dict)

    def worst(self, kind: str) -> float:
        return max((each.seconds for each in self.found.get(kind, [])), default=0.0)

    def failures(self, kind: str) -> list[Measured]:
        return [each for each in self.found.get(kind, []) if each.status != 200]


def request(address: Address, method: str, path: str, body: bytes | None = None, timeout: float = TIMEOUT) -> Measured:
    begin = time.monotonic()
    connection = http.client.HTTPConnection(address.host, address.port, timeout=timeout)
    headers = {"Content-Type": "application/json"}
    if address.api_key is not None:
        headers["Authorization"] = f"Bearer {address.api_key}"
    try:
        connection.request(method, path, body, headers)
        answer = connection.getresponse()
        text, status = answer.read().decode(errors="replace"), answer.status
    except (OSError, http.client.HTTPException) as error:
        text, status = repr(error), 0
    finally:
        connection.close()
    return Measured(begin, time.monotonic() - begin, status, text)


class Victims:
    """Clients with plain requests, who must be served all the time."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def seen(self) -> Seen:
        """What they have seen since the last time, once those who wait have been answered."""
        self._connection.send(None)
        if not self._connection.poll(2 * TIMEOUT):
            return Seen({"plain": [Measured(0, TIMEOUT, 0, "no answer")]})
        return Seen(self._connection.recv())


@contextmanager
def victims(address: Address) -> Iterator[Victims]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_main, args=(theirs, address), daemon=True)
    process.start()
    try:
        ours.recv()  # they have begun
        yield Victims(ours)
    finally:
        process.kill()
        process.join()


def _main(connection: Connection, address: Address) -> None:
    named = {} if address.model is None else {"model": address.model}
    kinds = {
        "health": ("GET", "/health/live", None),
        "plain": ("POST", "/v1/completions", json.dumps(PLAIN | named).encode()),
    }
    if address.has_chat:
        kinds["chat"] = ("POST", "/v1/chat/completions", json.dumps(CHAT | named).encode())
    found: dict[str, list[Measured]] = {kind: [] for kind in kinds}
    answered = threading.Condition()

    def ask(kind: str) -> None:
        while True:
            measured = request(address, *kinds[kind])
            with answered:
                found[kind].append(measured)
                answered.notify_all()
            time.sleep(PAUSE)

    for kind in kinds:
        threading.Thread(target=ask, args=(kind,), daemon=True).start()
    connection.send(None)
    while True:
        connection.recv()
        with answered:
            _wait_for_each(answered, found)
            connection.send(found)
            for measured in found.values():
                measured.clear()


def _wait_for_each(answered: threading.Condition, found: dict[str, list[Measured]]) -> None:
    """Until one more of every kind has been answered: whatever was under way is then known."""
    counts = {kind: len(measured) for kind, measured in found.items()}
    answered.wait_for(lambda: all(len(found[kind]) > count for kind, count in counts.items()))
