"""Who may talk to the server: addresses, Host and Origin, the API key, and how much at once.
Everything is denied unless it is on a list; only health and the playground's own files are had without a key."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import time
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from outrider.overload import OverloadError
from outrider.server.errors import ApiError, bad_request, overloaded
from outrider.server.playground import ASSETS

OPEN_PATHS = frozenset({"/health", "/health/live", "/health/ready", "/health/decode", "/ping", *ASSETS})
LOOPBACK = frozenset({"localhost", "127.0.0.1", "::1"})
MAX_BODY = 32 * 2**20
BODY_SECONDS = 60.0
MAX_VALUES = 2**21  # in a body, about: to read a million takes a tenth of a second, in which nothing else is done


@dataclass(frozen=True)
class Access:
    """`hosts`: names that the Host header may hold; empty: any, which is for a server with a key.
    `pace`: seconds between the frames of a stream; 0: pieces leave as they come."""

    api_keys: tuple[str, ...] = ()
    hosts: frozenset[str] = LOOPBACK
    origins: frozenset[str] = frozenset()
    max_body: int = MAX_BODY
    body_seconds: float = BODY_SECONDS  # that a body may take to arrive
    pace: float = 0.0
    root_path: str = ""  # with which paths may begin, where a proxy does not take it off


def access_for(
    host: str,
    api_keys: Sequence[str] = (),
    allowed_hosts: Sequence[str] = (),
    origins: Sequence[str] = (),
    max_body: int = MAX_BODY,
) -> Access:
    """What listening on this address asks for."""
    if any(len(key) < 8 for key in api_keys):
        raise ValueError("an API key must have at least 8 characters: choose a longer one")
    if not is_loopback(host) and not api_keys:
        raise ValueError(
            f"{host} can be reached from other machines: give --api-key (or OUTRIDER_API_KEY), or keep to 127.0.0.1"
        )
    hosts = frozenset(name.lower() for name in allowed_hosts)
    if is_loopback(host):
        hosts |= LOOPBACK | {host.lower()}
    return Access(tuple(api_keys), hosts, frozenset(origin.rstrip("/").lower() for origin in origins), max_body)


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """ASGI middleware around everything else."""

    def __init__(self, app: ASGIApp, access: Access, max_requests: int) -> None:
        self._app, self._access = app, access
        self._num_requests, self._max_requests = 0, max_requests  # under way; health is not counted
        self._digests = [_digest(key.encode()) for key in access.api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        if scope["type"] != "http":  # no web sockets here
            return None
        try:
            self._check(scope)
        except ApiError as error:
            headers = error.headers | {"Connection": "close"}  # nothing more of what may follow is read
            return await JSONResponse(error.body, error.status, headers)(scope, receive, send)
        limited = _Limited(receive, self._access)
        if self._is_open(scope):
            return await self._app(scope, limited, send)
        self._num_requests += 1
        try:
            return await self._app(scope, limited, send)
        finally:
            self._num_requests -= 1

    def _is_open(self, scope: Scope) -> bool:
        return scope["path"].removeprefix(self._access.root_path) in OPEN_PATHS

    def _check(self, scope: Scope) -> None:
        host = self._check_host(_values(scope, b"host"))
        self._check_origin(_values(scope, b"origin"), host)
        if not self._is_open(scope):
            scope["tenant"] = self._check_key(_values(scope, b"authorization"))
            if self._num_requests >= self._max_requests:
                raise overloaded(OverloadError("too many requests at once: try again later"))
        length = _values(scope, b"content-length")
        if length and _values(scope, b"transfer-encoding"):  # a proxy might go by the other one
            raise bad_request("the request must not have both Content-Length and Transfer-Encoding")
        if length and (not length[0].isdigit() or int(length[0][:20]) > self._access.max_body):
            raise too_large(self._access.max_body)

    def _check_host(self, given: list[bytes]) -> str:
        if len(given) != 1:
            raise bad_request("the request must have one Host header")
        try:
            parts = urlsplit("//" + given[0].decode("ascii"))
            name, _ = (parts.hostname or "").lower(), parts.port
        except ValueError:
            raise bad_request("the Host header cannot be read") from None
        if self._access.hosts and name not in self._access.hosts:  # a name of someone else's that leads here
            raise ApiError(403, "this server does not go by that name (--allowed-host adds it)", "unknown_host")
        return given[0].decode("ascii").lower()

    def _check_origin(self, given: list[bytes], host: str) -> None:
        """Browsers say which page is asking; only our own page and those on the list may."""
        for value in given:
            origin = value.decode("latin-1").lower()
            if "*" in self._access.origins:
                continue
            if origin not in self._access.origins and origin not in (f"http://{host}", f"https://{host}"):
                raise ApiError(403, "pages of that origin may not use this server", "unknown_origin")

    def _check_key(self, given: list[bytes]) -> str | None:
        """Compares with all keys in the same time, whatever was sent. Who holds another key is another tenant."""
        if not self._digests:
            return None
        scheme, _, key = (given[0] if len(given) == 1 else b"").partition(b" ")
        sent = _digest(key.strip())
        matches = [hmac.compare_digest(sent, digest) for digest in self._digests]
        if scheme.lower() != b"bearer" or not any(matches):
            raise ApiError(401, "a valid API key is needed: Authorization: Bearer KEY", "invalid_api_key")
        return f"key-{matches.index(True)}" if len(matches) > 1 else None


class _Limited:
    """receive() that counts bytes and seconds: a body without an honest Content-Length is cut off as well, and one
    that does not come is not waited for."""

    def __init__(self, receive: Receive, access: Access) -> None:
        self._receive, self._left, self._limit = receive, access.max_body, access.max_body
        self._values_left = MAX_VALUES
        self._until: float | None = time.monotonic() + access.body_seconds  # None: all of the body is here

    async def __call__(self) -> Message:
        if self._until is None:  # what comes now is the end of the connection
            return await self._receive()
        try:
            async with asyncio.timeout(self._until - time.monotonic()):
                message = await self._receive()
        except TimeoutError:  # FastAPI is reading, and would make a 400 of any other exception
            raise HTTPException(408, "the body did not come in time", {"Connection": "close"}) from None
        body = message.get("body", b"")
        self._left -= len(body)
        self._values_left -= body.count(b",") + body.count(b"[") + body.count(b"{")
        if self._values_left < 0:
            raise HTTPException(413, f"the request holds more than {MAX_VALUES} values", {"Connection": "close"})
        if self._left < 0:
            raise HTTPException(413, too_large(self._limit).message, {"Connection": "close"})
        if not message.get("more_body", False):
            self._until = None
        return message


def too_large(limit: int) -> ApiError:
    return ApiError(413, f"the request is larger than {limit} bytes", "too_large")


def _values(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key.lower() == name]


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
