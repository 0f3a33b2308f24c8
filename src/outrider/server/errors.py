"""What a client is told when something goes wrong: OpenAI's error body, and nothing of what lies behind it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.overload import OverloadError
from outrider.server.log import log_fault

MAX_MESSAGE = 500
_TYPES = {401: "authentication_error", 404: "not_found_error", 429: "rate_limit_error"}


@dataclass
class ApiError(Exception):
    """An answer that is an error. `retry_after` in seconds goes into the header of that name."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    retry_after: int | None = None

    def __reduce__(self) -> tuple[type[ApiError], tuple[Any, ...]]:
        """An exception is copied by its positional arguments, and these may have been named."""
        return ApiError, (self.status, self.message, self.code, self.param, self.retry_after)

    @property
    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        error = {"message": clean(self.message), "type": kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def headers(self) -> dict[str, str]:
        headers = {} if self.retry_after is None else {"Retry-After": str(self.retry_after)}
        return headers | ({"WWW-Authenticate": "Bearer"} if self.status == 401 else {})


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, "invalid_value", param)


def too_busy(message: str, retry_after: int) -> ApiError:
    return ApiError(429, message, "queue_full", retry_after=retry_after)


def overloaded(error: OverloadError) -> ApiError:
    return ApiError(503, str(error), "overloaded", retry_after=error.retry_after)


def shutting_down() -> ApiError:
    return ApiError(503, "the server is shutting down: ask another one", "shutting_down", retry_after=5)


def past_deadline() -> ApiError:
    return ApiError(504, "the request took longer than its deadline and was ended", "deadline_exceeded")


def internal_error(error: BaseException) -> ApiError:
    """The client gets a reference; what happened is in the log under it."""
    reference = f"fault-{secrets.token_hex(6)}"
    log_fault(reference, error)
    return ApiError(500, f"internal error; the server's log knows it as {reference}", "internal_error")


def engine_has_ended(error: BaseException) -> ApiError:
    """Nothing can be generated any more: the process must be started again."""
    reference = f"fault-{secrets.token_hex(6)}"
    log_fault(reference, error)
    message = f"the engine has ended and the server must be started again; its log knows why as {reference}"
    return ApiError(503, message, "engine_dead", retry_after=30)


def clean(text: str, names: Mapping[str, str] | None = None) -> str:
    """Short, valid Unicode, and with what is private replaced ({private: shown})."""
    for private, shown in (names or {}).items():
        text = text.replace(private, shown)
    text = text.encode("utf-8", errors="replace").decode()
    return text if len(text) <= MAX_MESSAGE else text[:MAX_MESSAGE] + "..."
