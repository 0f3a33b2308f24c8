"""Streams whose reader leaves: everything is closed in order, at once, and the engine no longer works for them."""

import asyncio
import gc
import json
import logging
import socket
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from running import Running

from outrider.server.events import event_stream


class Stage:
    """An answer without end, made of generators within generators as those of the server are; notes what is closed."""

    def __init__(self) -> None:
        self.closed: list[str] = []

    async def pieces(self) -> AsyncGenerator[int, None]:
        try:
            for number in range(10**9):
                await asyncio.sleep(0)
                yield number
        finally:
            self.closed.append("pieces")

    @asynccontextmanager
    async def aborting(self) -> AsyncGenerator[None, None]:
        try:
            yield
        finally:
            self.closed.append("aborting")

    async def chunks(self) -> AsyncGenerator[dict[str, Any], None]:
        async with self.aborting(), aclosing(self.pieces()) as pieces:
            async for piece in pieces:
                yield {"piece": piece}


async def leave(stage: Stage, pace: float, num_read: int) -> None:
    """A reader who takes so many messages, then no more, and leaves while one is being sent."""
    left = asyncio.Event()
    messages: list[Any] = []

    async def send(message: Any) -> None:
        if len(messages) == num_read:
            left.set()
            await asyncio.Event().wait()  # the connection takes nothing more
        messages.append(message)

    async def receive() -> dict[str, str]:
        await left.wait()
        return {"type": "http.disconnect"}

    response = event_stream(stage.chunks(), pace, lambda: stage.closed.append("end"))
    scope = {"type": "http", "asgi": {"version": "3.0", "spec_version": "2.3"}}
    await asyncio.wait_for(response(scope, receive, send), 30)


@pytest.mark.parametrize("pace", [0.0, 0.005])
@pytest.mark.parametrize("num_read", [1, 2, 5])
def test_a_reader_who_leaves_closes_all_of_it(pace: float, num_read: int) -> None:
    async def main() -> tuple[list[str], list[dict[str, Any]]]:
        faults: list[dict[str, Any]] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: faults.append(context))
        stage = Stage()
        await leave(stage, pace, num_read)
        closed = list(stage.closed)  # before the garbage collector has seen anything
        gc.collect()
        await asyncio.sleep(0)
        return closed, faults

    assert asyncio.run(main()) == (["pieces", "aborting", "end"], [])


def test_a_reader_who_leaves_before_the_first_chunk() -> None:
    """The generators were never started, so they have nothing to close; the end is told all the same."""

    async def main() -> list[str]:
        stage = Stage()
        await leave(stage, 0, 0)
        return stage.closed

    assert asyncio.run(main()) == ["end"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_readers_who_stop_reading_and_go(path: str, running: Running, caplog: pytest.LogCaptureFixture) -> None:
    asked = {"prompt": "Once"} if path == "/v1/completions" else {"messages": [{"role": "user", "content": "Once"}]}
    body = json.dumps(asked | {"stream": True, "max_tokens": 400, "ignore_eos": True, "n": 4, "logprobs": 1})
    body = body.replace('"logprobs": 1', '"logprobs": true, "top_logprobs": 20' if "chat" in path else '"logprobs": 20')
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            with socket.socket() as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
                connection.connect(("127.0.0.1", running.port))
                connection.sendall(f"{head}\r\n\r\n{body}".encode())
                assert b" 200 " in connection.recv(1000)
                time.sleep(0.2)  # so that the server is likely to be stuck in sending; whether it is does not matter
        running.wait_until_idle()
        gc.collect()
        assert running.get("/health/live").status_code == 200  # the loop has had its turn since
    assert not caplog.records
