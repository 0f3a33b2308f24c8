"""HTTP for whoever loads a server with many streams at once: what comes is noted with its time, and looked into only
when the answer is complete. A client that reads as it goes is slower than the servers it measures."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

HEADER_END = b"\r\n\r\n"
TIMEOUT = 600.0  # seconds without a sign of the server, where nothing else is said


@dataclass
class Streamed:
    """An answer, as it came."""

    status: int = 0
    parts: list[tuple[float, bytes]] = field(default_factory=list)  # when, by time.perf_counter(), and what

    @property
    def body(self) -> bytes:
        return b"".join(data for _, data in self.parts)

    @property
    def chunks(self) -> list[dict[str, Any]]:
        """JSON objects of a stream, or the one of a whole answer."""
        text = self.body.decode()
        if not text.startswith("data: "):
            return [json.loads(text)]
        events = [part.removeprefix("data: ") for part in text.split("\n\n") if part]
        return [json.loads(event) for event in events if event != "[DONE]"]


class Body:
    """Takes HTTP's framing off a body, in whatever pieces it comes."""

    def __init__(self, headers: Mapping[bytes, bytes]) -> None:
        self._is_chunked = b"chunked" in headers.get(b"transfer-encoding", b"").lower()
        length = headers.get(b"content-length")
        self._num_left = int(length) if length is not None and not self._is_chunked else None
        self._rest = b""
        self.ends_with_connection = not self._is_chunked and length is None
        self.is_complete = self._num_left == 0

    def feed(self, data: bytes) -> bytes:
        """What the bytes held."""
        if not self._is_chunked:
            if self._num_left is not None:
                data = data[: self._num_left]
                self._num_left -= len(data)
                self.is_complete = not self._num_left
            return data
        data, found, place = self._rest + data, b"", 0
        while (line := data.find(b"\r\n", place)) >= 0:
            size = int(data[place:line].partition(b";")[0], 16)
            end = line + 2 + size
            if len(data) < end + 2:
                break
            found += data[line + 2 : end]
            place = end + 2
            if not size:
                self.is_complete = True
                break
        self._rest = data[place:]
        return found


class Connection(asyncio.Protocol):
    """A connection to a server, for one request at a time."""

    def __init__(self) -> None:
        self.last_sign = time.perf_counter()
        self.is_reusable = False
        self._transport: asyncio.Transport | None = None
        self._head = b""
        self._body: Body | None = None
        self._answer = Streamed()
        self._done: asyncio.Future[Streamed] = asyncio.get_running_loop().create_future()

    def send(self, message: bytes) -> asyncio.Future[Streamed]:
        assert self._transport is not None
        self._head, self._body, self._answer = b"", None, Streamed()
        self._done = asyncio.get_running_loop().create_future()
        self.is_reusable, self.last_sign = False, time.perf_counter()
        self._transport.write(message)
        return self._done

    @property
    def has_begun(self) -> bool:
        """Whether anything of the answer has come."""
        return bool(self._head) or self._body is not None

    def close(self) -> None:
        self.is_reusable = False
        if self._transport is not None:
            self._transport.close()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self.last_sign = now = time.perf_counter()
        if self._body is None:
            self._head, end, data = (self._head + data).partition(HEADER_END)
            if not end:
                return
            status, *lines = self._head.split(b"\r\n")
            fields = (line.partition(b":") for line in lines)
            headers = {name.strip().lower(): value.strip() for name, _, value in fields}
            self._body, self._answer.status = Body(headers), int(status.split(b" ", 2)[1])
            self.is_reusable = headers.get(b"connection", b"").lower() != b"close"
        held = self._body.feed(data)
        if held:
            self._answer.parts.append((now, held))
        if self._body.is_complete:
            self._finish()

    def connection_lost(self, error: Exception | None) -> None:
        self.is_reusable = False
        if self._body is not None and self._body.ends_with_connection and error is None:
            self._finish()
        elif not self._done.done():
            self._done.set_exception(error or ConnectionResetError("the server closed the connection"))
            self._done.exception()  # nobody may be waiting any more

    def _finish(self) -> None:
        if not self._done.done():
            self._done.set_result(self._answer)


class Streams:
    """Connections to one server, kept for the next request. `timeout`: seconds without a sign of the server."""

    def __init__(self, base_url: str, headers: Mapping[str, str], timeout: float) -> None:
        url = urlsplit(base_url)
        self._host, self._path = url.hostname or "", url.path.rstrip("/")
        self._secure = ssl.create_default_context() if url.scheme == "https" else None
        self._port = url.port or (443 if self._secure else 80)
        self._head = "".join(f"{name}: {value}\r\n" for name, value in {"Host": url.netloc, **headers}.items())
        self._timeout = timeout
        self._idle: list[Connection] = []

    async def __aenter__(self) -> Streams:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for connection in self._idle:
            connection.close()

    async def post(self, path: str, body: Any) -> Streamed:
        """The whole answer; TimeoutError, or an OSError where there is no connection or it broke."""
        content = json.dumps(body).encode()
        lines = f"POST {self._path}{path} HTTP/1.1\r\n{self._head}Content-Type: application/json\r\n"
        message = f"{lines}Content-Length: {len(content)}\r\n\r\n".encode() + content
        while True:
            connection, is_new = await self._connection()
            try:
                return await self._exchange(connection, message)
            except ConnectionError:
                if is_new or connection.has_begun:  # otherwise it was closed while nobody used it
                    raise

    async def _exchange(self, connection: Connection, message: bytes) -> Streamed:
        answer = connection.send(message)
        try:
            while not answer.done():
                left = connection.last_sign + self._timeout - time.perf_counter()
                if left <= 0:
                    raise TimeoutError
                await asyncio.wait([answer], timeout=left)
            return answer.result()
        finally:
            if answer.done() and connection.is_reusable:
                self._idle.append(connection)
            else:
                connection.close()

    async def _connection(self) -> tuple[Connection, bool]:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_reusable:
                return connection, False
        loop = asyncio.get_running_loop()
        opening = loop.create_connection(Connection, self._host, self._port, ssl=self._secure)
        _, connection = await asyncio.wait_for(opening, self._timeout)
        return connection, True


def post_all(base_url: str, path: str, bodies: Sequence[Any], concurrency: int) -> list[Streamed]:
    """Posts all bodies, `concurrency` of them at a time."""

    async def run() -> list[Streamed]:
        room = asyncio.Semaphore(concurrency)
        async with Streams(base_url, {}, TIMEOUT) as streams:

            async def one(body: Any) -> Streamed:
                async with room:
                    return await streams.post(path, body)

            return await asyncio.gather(*map(one, bodies))

    return asyncio.run(run())
