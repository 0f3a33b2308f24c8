"""`outrider bench siege`: what the command takes."""

from __future__ import annotations

from typing import Annotated

import typer

from outrider.bench.load.server_commands import ApiKey, ServedModel
from outrider.console import open_consoles, print_json, progress_bar
from outrider.options import AsJson, Threads
from outrider.startup import importing

RunningServer = Annotated[
    str | None, typer.Option("--base-url", metavar="URL", help="A running server. By default, one of its own.")
]
Seconds = Annotated[float, typer.Option("--seconds", metavar="X", help="How long each attack lasts.", min=0.1)]


def siege(
    base_url: RunningServer = None,
    model: ServedModel = None,
    api_key: ApiKey = None,
    seconds: Seconds = 4.0,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Attack a server of ours while others use it.

    Requests that are small to send and large to answer, connections that say nothing, readers who never read. Status 1
    if the server or anybody else suffered: a plain request over 2 s, health over 0.5 s, 1.5 GB more memory, a request
    refused, an answer changed. Memory is watched where the server is our own. Needs Linux and the serve extra.

    \b
    Examples:
      outrider bench siege
      outrider bench siege --base-url http://127.0.0.1:8000 --seconds 3
    """
    with importing():
        from outrider.bench.load.siege import Bounds, besiege, own_server, running_server, show, to_dict
    consoles, bounds = open_consoles(), Bounds()
    with progress_bar(consoles.about) as progress:
        if base_url is not None:
            found = besiege(running_server(base_url, api_key, model), seconds, bounds, progress=progress)
        else:
            with own_server(threads=threads) as target:
                found = besiege(target, seconds, bounds, progress=progress)
    if not as_json:
        show(consoles.out, found, bounds)
    report = to_dict(found, bounds)
    print_json(consoles.out, report, asked=as_json)
    if not report["good"]:
        raise typer.Exit(1)
