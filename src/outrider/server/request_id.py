"""Every answer says in X-Request-Id what its request is called: as the client called it, or else by chance."""

from __future__ import annotations

import re
import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

NAME = b"x-request-id"
_FORM = re.compile(rb"[A-Za-z0-9._:/=+-]{1,128}")


class RequestIds:
    """ASGI middleware, outside of everything else: refusals have a name as well."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        given = next((value for name, value in scope["headers"] if name.lower() == NAME), b"")
        name = given if _FORM.fullmatch(given) else secrets.token_hex(12).encode()
        scope["request_id"] = name.decode()

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (NAME, name)]
            await send(message)

        return await self._app(scope, receive, named)
