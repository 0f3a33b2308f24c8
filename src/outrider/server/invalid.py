"""What is wrong with a request that does not fit its schema, in one sentence that names the part."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from outrider.server.errors import ApiError, bad_request, clean
from outrider.server.schema_base import FOREIGN

MAX_PLACE = 100


def invalid_request(errors: Sequence[dict[str, Any]], body: Any) -> ApiError:
    """Of several ways in which a part may be written, the one that the client came closest to is told."""
    first = errors[0]
    if first["type"] == FOREIGN:
        return bad_request(first["msg"], first["ctx"]["param"])
    begin = _place(first, body)[:1]
    alike = [error for error in errors if _place(error, body)[:1] == begin]
    chosen = max(alike, key=lambda error: len(_place(error, body)))  # the first of the deepest
    place = clean(".".join(_place(chosen, body)))[:MAX_PLACE]
    message = chosen["msg"].removeprefix("Value error, ")
    return bad_request(f"{place}: {message}" if place else message, place or None)


def _place(error: dict[str, Any], body: Any) -> list[str]:
    """Where in the body it is: without the names of the schema's own kinds, which the client has not written."""
    place: list[str] = []
    parts = list(error["loc"])[1:]
    for number, part in enumerate(parts):
        is_there = part < len(body) if isinstance(body, list) and isinstance(part, int) else part in _keys(body)
        if is_there:
            body = body[part]
        elif not (number == len(parts) - 1 and error["type"] == "missing"):
            continue
        place.append(str(part))
    return place


def _keys(body: Any) -> Collection[Any]:
    return body.keys() if isinstance(body, dict) else ()
