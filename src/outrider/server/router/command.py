"""`outrider route`: one address for several servers."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer

from outrider.commands import option
from outrider.console import open_consoles, show_note
from outrider.extras import extra_missing
from outrider.server.address import Sockets, port_of, taken
from outrider.server.command import AccessOptions, Drain, Plan, settled_access, url_of
from outrider.server.log import log, log_to_stderr
from outrider.server.serve_options import HttpOptions, RayOptions
from outrider.startup import importing

if TYPE_CHECKING:
    from outrider.server.router.fleet import Fleet

_GROUP = "Replicas"
_PATIENCE_HELP = "Seconds that a request waits where no replica is ready."
_REQUESTS_HELP = "Requests under way at once, at most."

Urls = Annotated[list[str], typer.Argument(help="Where the replicas are, as http://host:8000.", metavar="URL")]
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
    """Put one address in front of several servers of the same model.

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
    with taken(access.host, access.port) as sockets:
        run_router(HttpFleet(urls, patience), sockets, access, http, max_requests, shutdown_timeout)


def serve_on_ray(plan: Plan, ray: RayOptions, access: AccessOptions, http: HttpOptions) -> None:
    """Replicas of a server on a Ray cluster, and the router in front of them here."""
    with importing():
        try:
            from outrider.server.router.cluster import RayFleet, deployed
        except ImportError as error:
            raise extra_missing("outrider serve --ray", "ray", error) from error
    drain = plan.limits.shutdown_timeout
    with taken(access.host, access.port) as sockets, deployed(plan, ray.checked()) as handle:
        fleet = RayFleet(handle, plan.limits.request_timeout)
        run_router(fleet, sockets, access, http, 1024 * ray.replicas[1], drain)


def run_router(
    fleet: Fleet, sockets: Sockets, given: AccessOptions, http: HttpOptions, max_requests: int, drain: float
) -> None:
    """Until it is told to end."""
    from outrider.server.router.app import RouterApplication
    from outrider.server.serving import Server

    log_to_stderr(*(["uvicorn"] if http.uvicorn_log_level is not None else []))
    application = RouterApplication(fleet, settled_access(given, http), max_requests, http.root_path)
    port = port_of(sockets)
    url = url_of(given, http, port)

    def on_listening() -> None:
        log("listening", host=given.host, port=port, replicas=fleet.num_ready)
        with suppress(OSError):
            show_note(open_consoles().about, f"{fleet.num_ready} replicas at {url}/v1")

    settings = {"on_listening": on_listening, **http.of_uvicorn()}
    Server(application, given.host, port, drain, **settings).run(sockets=sockets)
    log("ended")
