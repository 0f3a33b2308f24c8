"""What one client may send to keep a server from all others: small to send, large to answer. Each was a hole once."""

from __future__ import annotations

import base64
import json
import socket
import struct
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from outrider.bench.load.siege_victims import Address, request

NUM_IDLE = 600  # connections
NUM_DEAF = 6  # clients that never read
COMPLETIONS, CHAT, TOKENIZE = "/v1/completions", "/v1/chat/completions", "/tokenize"


@dataclass
class Siege:
    """Who is attacked, until when, and what came of it."""

    address: Address
    until: float
    answers: Counter[str] = field(default_factory=Counter)

    @property
    def is_over(self) -> bool:
        return time.monotonic() >= self.until

    def named(self, body: dict[str, Any]) -> dict[str, Any]:
        return body if self.address.model is None else {"model": self.address.model, **body}


@dataclass(frozen=True)
class Attack:
    name: str
    run: Callable[[Siege], None]


def _posts(path: str, num_clients: int, body_of: Callable[[int], dict[str, Any] | bytes]) -> Callable[[Siege], None]:
    """So many clients send one request after the other, no two alike where the body depends on its number."""

    def run(siege: Siege) -> None:
        numbers, lock = iter(range(10**9)), threading.Lock()

        def attack() -> None:
            while not siege.is_over:
                with lock:
                    number = next(numbers)
                made = body_of(number)
                body = made if isinstance(made, bytes) else json.dumps(siege.named(made)).encode()
                left = max(siege.until - time.monotonic(), 0.1)
                answer = request(siege.address, "POST", path, body, timeout=left)
                siege.answers[str(answer.status or "none in time")] += 1

        threads = [threading.Thread(target=attack, daemon=True) for _ in range(num_clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return run


def _completion(**fields: Any) -> Callable[[int], dict[str, Any]]:
    return lambda number: {"prompt": "Hi", "max_tokens": 64, "ignore_eos": True, "timeout": 60, **fields}


def _nested(number: int) -> dict[str, Any]:
    most = 16384 - number
    regex = f"((([a-z]{{0,{most}}}){{0,{most}}}){{0,{most}}}){{0,{most}}}"
    return _completion(guided_regex=regex)(number)


def _ambiguous(number: int) -> dict[str, Any]:
    """Within all bounds of size, and slow to follow."""
    kinds = (
        f"(([a-z]{{0,16}}){{0,16}}){{0,{16 + number}}}",
        f"(([a-z]?){{100}}){{{100 + number % 60}}}",
        f"([a-z]+[a-z]+[a-z]+[a-z]+[a-z]+){{1,{99 + number}}}y",
        f"[a-z]{{{40 + number}}}(([a-z]{{0,16}}){{0,16}}){{0,16}}",  # it begins harmlessly
    )
    return _completion(guided_regex=kinds[number % len(kinds)], max_tokens=512)(number)


def _counted(number: int) -> dict[str, Any]:
    properties = {f"p{number}_{each}": {"type": "integer"} for each in range(300)}
    return _completion(guided_json={"type": "object", "properties": properties, "maxProperties": 150})(number)


def _heavy_schema(number: int) -> dict[str, Any]:
    """Fifteen kilobytes that take a minute."""

    def counted(part: int) -> dict[str, Any]:
        properties = {f"p{number}_{part}_{each}": {"type": "integer"} for each in range(60)}
        return {"type": "object", "properties": properties, "maxProperties": 30}

    return _completion(guided_json={"type": "object", "properties": {f"o{part}": counted(part) for part in range(8)}})(
        number
    )


def _heavy_grammar(number: int) -> dict[str, Any]:
    """Nine kilobytes that take gigabytes."""
    rules = [f'r{each} ::= "' + f"{number}_{each}abcdef" * 25 + '"{0,16384}' for each in range(30)]
    root = "root ::= " + " | ".join(f"r{each}" for each in range(30))
    return _completion(guided_grammar="\n".join([root, *rules]))(number)


@cache
def _picture() -> str:
    """A one-bit PNG of 8192 x 8192 in a few kilobytes."""
    side = 8192

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 1, 0, 0, 0, 0)
    rows = zlib.compress(b"\0" * (1 + side // 8) * side, 9)
    made = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")
    return "data:image/png;base64," + base64.b64encode(made).decode()


def _pictures(number: int) -> dict[str, Any]:
    parts = [{"type": "image_url", "image_url": {"url": _picture()}}] * 16
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 2}


def _long_chat(number: int) -> dict[str, Any]:
    messages = [{"role": ("user", "assistant")[turn % 2], "content": f"{turn} " * 100} for turn in range(4001)]
    return {"messages": messages, "max_tokens": 2}


def _spaces(number: int) -> dict[str, Any]:
    parts = [{"type": "text", "text": " " * 2**22}] * 3
    return {"messages": [{"role": "user", "content": parts}], "max_tokens": 2}


def _numbers(number: int) -> bytes:
    return b'{"prompt": [' + b"5," * 10_000_000 + b'5], "max_tokens": 2}'


def _idle_connections(siege: Siege) -> None:
    """They say nothing, and are opened again when they are closed."""
    held: list[socket.socket] = []
    try:
        while not siege.is_over:
            with suppress(OSError):
                held.append(socket.create_connection((siege.address.host, siege.address.port), timeout=5))
                siege.answers["opened"] += 1
            if len(held) >= NUM_IDLE:
                time.sleep(0.02)
                held.pop(0).close()
    finally:
        for each in held:
            each.close()


def _deaf_readers(siege: Siege) -> None:
    """They ask for long answers with many log-probabilities, and never read them."""
    address, held = siege.address, []
    body = json.dumps(
        siege.named(_completion(max_tokens=1500, stream=True, logprobs=100, return_token_ids=True, n=2)(0))
    ).encode()
    key = f"Authorization: Bearer {address.api_key}\r\n" if address.api_key is not None else ""
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {address.host}:{address.port}\r\nContent-Type: application/json\r\n"
    try:
        for _ in range(NUM_DEAF):
            connection = socket.socket()
            held.append(connection)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.settimeout(5)
            with suppress(OSError):
                connection.connect((address.host, address.port))
                connection.sendall(f"{head}{key}Content-Length: {len(body)}\r\n\r\n".encode() + body)
                siege.answers["sent"] += 1
        while not siege.is_over:
            time.sleep(0.05)
    finally:
        for connection in held:
            connection.close()


def _leavers(siege: Siege) -> None:
    """They leave their streams at every moment."""
    address, number = siege.address, 0
    body = json.dumps(siege.named(_completion(max_tokens=400, stream=True)(0))).encode()
    key = f"Authorization: Bearer {address.api_key}\r\n" if address.api_key is not None else ""
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: {address.host}:{address.port}\r\nContent-Type: application/json\r\n"
    while not siege.is_over:
        number += 1
        with suppress(OSError), socket.create_connection((address.host, address.port), timeout=5) as connection:
            connection.sendall(f"{head}{key}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            time.sleep(number % 10 * 0.01)
            siege.answers["left"] += 1


LONG_TEXT = "Hello there, my old friend. " * 149_000  # 4 M characters

ATTACKS = (
    Attack("regex, nested repetition", _posts(COMPLETIONS, 4, _nested)),
    Attack("regex, slow to follow", _posts(COMPLETIONS, 8, _ambiguous)),
    Attack("schema, counted properties", _posts(COMPLETIONS, 8, _counted)),
    Attack("schema, slow to compile", _posts(COMPLETIONS, 8, _heavy_schema)),
    Attack("grammar, large in memory", _posts(COMPLETIONS, 8, _heavy_grammar)),
    Attack("images, large when decoded", _posts(CHAT, 4, _pictures)),
    Attack("text of 4 M characters", _posts(COMPLETIONS, 4, _completion(prompt=LONG_TEXT))),
    Attack("chat of 12 M spaces", _posts(CHAT, 2, _spaces)),
    Attack("4 M characters to tokenize", _posts(TOKENIZE, 4, lambda number: {"prompt": LONG_TEXT})),
    Attack("chats of 4001 messages", _posts(CHAT, 8, _long_chat)),
    Attack(
        "allowed ids, a million alike",
        _posts(COMPLETIONS, 2, _completion(allowed_token_ids=[5] * 2**20, n=64, max_tokens=2)),
    ),
    Attack("body of ten million numbers", _posts(COMPLETIONS, 2, _numbers)),
    Attack(
        "echo with log-probabilities",
        _posts(COMPLETIONS, 2, _completion(prompt=[5] * 500, echo=True, logprobs=100, n=5, max_tokens=1)),
    ),
    Attack("idle connections", _idle_connections),
    Attack("readers who never read", _deaf_readers),
    Attack("streams that are left", _leavers),
)
