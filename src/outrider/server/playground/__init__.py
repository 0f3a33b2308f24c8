"""The playground: one page with a chat that shows speculation at work, served without a key.
It is the same for everybody: what it knows of this server it asks for, with the user's key."""

from __future__ import annotations

from importlib.resources import files

from fastapi import FastAPI
from starlette.responses import Response

_TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
}
_FILES = ("style.css", "page.js", "conversation.js", "answer.js", "request.js", "figures.js", "plot.js", "icon.svg")
ASSETS = {"/": "index.html"} | {f"/playground/{name}": name for name in _FILES}  # path: file
POLICY = {
    "default-src": "'none'",
    "script-src": "'self'",
    "style-src": "'self'",
    "img-src": "'self'",
    "connect-src": "'self'",
    "base-uri": "'none'",
    "form-action": "'none'",
    "frame-ancestors": "'none'",
    "require-trusted-types-for": "'script'",  # no text of a model's can become markup, whatever the page does with it
}
HEADERS = {
    "Content-Security-Policy": "; ".join(f"{name} {value}" for name, value in POLICY.items()),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def add_playground(app: FastAPI) -> None:
    folder = files(__name__)
    for path, name in ASSETS.items():
        _add(app, path, folder.joinpath(name).read_bytes(), _TYPES[name.rpartition(".")[2]])


def _add(app: FastAPI, path: str, content: bytes, media_type: str) -> None:
    async def page() -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    app.add_api_route(path, page, methods=["GET", "HEAD"], include_in_schema=False)
