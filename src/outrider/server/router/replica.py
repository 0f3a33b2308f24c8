"""A server as a replica on a Ray cluster: the same application, asked by messages of Ray's instead of over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import suppress
from typing import Any

from outrider.console import open_consoles
from outrider.server.command import Plan, assembled
from outrider.server.engine_host import ProcessHost
from outrider.server.router.fleet import Asked, passed_back

LEAVE_SECONDS = 5.0  # that an application has after whoever asked has gone


class Replica:
    """Ray starts one for each replica, in a process of its own; the engine is a child of that, and its ranks are the
    engine's."""

    async def __init__(self, plan: Plan, name: str | None = None) -> None:  # type: ignore[misc]
        """`name`: what it is called; by default as Ray does."""
        self.name = name or _name()
        self._host = ProcessHost(plan.opening())
        self._application = await asyncio.to_thread(assembled, plan, self._host, open_consoles())
        self._application.engine.start()

    async def ask(
        self, asked: Asked, names: Sequence[bytes] = (), avoided: Collection[str] = ()
    ) -> AsyncGenerator[Any, None]:
        """First who answers, then status and headers, then the body as it comes. `names` and `avoided` were for those
        who chose this replica."""
        yield self.name
        messages: asyncio.Queue[Any] = asyncio.Queue()
        gone = asyncio.Event()
        bodies = [{"type": "http.request", "body": asked.body, "more_body": False}]

        async def receive() -> Any:
            if bodies:
                return bodies.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        async def answer() -> None:
            try:
                await self._application.asgi(_scope(asked), receive, messages.put)
            finally:
                messages.put_nowait(None)

        answering = asyncio.create_task(answer())
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start":
                    headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in message["headers"]]
                    yield message["status"], passed_back(headers)
                elif message["type"] == "http.response.body":
                    if message.get("body"):
                        yield bytes(message["body"])
                    if not message.get("more_body", False):
                        break
        finally:
            gone.set()
            with suppress(asyncio.TimeoutError, Exception):
                await asyncio.wait_for(answering, LEAVE_SECONDS)

    async def check_health(self) -> None:
        """Ray starts a replica again that raises here."""
        engine = self._application.engine
        if not engine.is_alive or engine.is_stalled:
            raise RuntimeError("the engine has ended" if not engine.is_alive else "requests get no further")

    def __del__(self) -> None:
        if hasattr(self, "_host"):
            self._host.kill()


def _name() -> str:
    from ray import serve

    return serve.get_replica_context().replica_id.unique_id


def _scope(asked: Asked) -> dict[str, Any]:
    path, _, query = asked.path.partition("?")
    headers = [(name.lower().encode("latin-1"), value.encode("latin-1")) for name, value in asked.headers]
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": asked.method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode("latin-1"),
        "root_path": "",
        "headers": [*headers, (b"host", b"localhost"), (b"content-length", str(len(asked.body)).encode())],
        "client": None,
        "server": None,
    }
