"""`outrider route`: one address for several servers."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from outrider.commands import option
from outrider.console import open_consoles, show_note
from outrider.extras import extra_missing
from outrider.server.address import port_of, taken
from outrider.server.command import AccessOptions, Drain
from outrider.server.log import log, log_to_stderr
from outrider.server.serve_options import HttpOptions
from outrider.startup import importing

if TYPE_CHECKING:
    from outrider.server.router.fleet import Fleet

_GROUP = "Replicas"
_PATIENCE_HELP = "Seconds that a request waits where no replica is ready."
_REQUESTS_HELP = "Requests under way at once, at most."

Urls = Annotated[list[str], typer.Argument(help="Where the replicas are, as http://host:8000.", metavar="URL...")]
Patience = Annotated[float, option(_GROUP, "--patience", metavar="X", help=_PATIENCE_HELP, min=0)]
MaxRequests = Annotated[int, option(_GROUP, "--max-requests", metavar="N", help=_REQUESTS_HELP, min=1)]


def route_command(
    access: AccessOptions,
    http: HttpOptions,
    urls: Urls,
    patience: Patience = 30.0,
    max_requests: MaxRequests = 1024,
    shutdown_timeout: Drain = 30.0,
) -> None:
    """One address in front of several `outrider serve` of the same model.

    A conversation goes back to the replica that knows it. Where a replica ends,
    its requests are asked again elsewhere, and its streams go on with the same
    text. Keys are passed on: give all of them the same.

    \b
    Example:
      outrider serve --port 8001 & outrider serve --port 8002 &
      outrider route http://127.0.0.1:8001 http://127.0.0.1:8002
    """
    with importing():
        try:
            from outrider.server.router.fleet import HttpFleet
        except ImportError as error:
            raise extra_missing("outrider route", "serve", error) from error
    for url in urls:
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ValueError(f"{url} is no address of a server: write it as http://host:8000")
    run_router(HttpFleet(urls, patience), access, http, max_requests, shutdown_timeout)


def run_router(fleet: Fleet, given: AccessOptions, http: HttpOptions, max_requests: int, drain: float) -> None:
    """Until it is told to end."""
    from outrider.server.router.app import RouterApplication
    from outrider.server.security import access_for
    from outrider.server.serving import Server

    origins = [*(given.allowed_origin or []), *http.checked().origins()]
    allowed = (given.api_key or [], given.allowed_host or [], origins)
    access = replace(access_for(given.host, *allowed, given.max_body * 2**20), pace=given.pace / 1000)
    log_to_stderr(*(["uvicorn"] if http.uvicorn_log_level is not None else []))
    with taken(given.host, given.port) as sockets:
        application = RouterApplication(fleet, access, max_requests, http.root_path)
        port = port_of(sockets)
        host_name = f"[{given.host}]" if ":" in given.host else given.host
        url = f"{'https' if http.is_secure else 'http'}://{host_name}:{port}"

        def on_listening() -> None:
            log("listening", host=given.host, port=port, replicas=fleet.num_ready)
            with suppress(OSError):
                show_note(open_consoles().about, f"{fleet.num_ready} replicas at {url}/v1")

        Server(application, given.host, port, drain, on_listening=on_listening, **http.of_uvicorn()).run(
            sockets=sockets
        )
        log("ended")
