"""Commands that say what there is: which pairs can exist, which models are on this machine; and one that fetches."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from outrider.console import open_consoles, show_matrix, show_models
from outrider.options import AsJson, NoColor
from outrider.startup import importing

DownloadDir = Annotated[
    Path | None, typer.Option("--download-dir", metavar="DIRECTORY", help="Instead of the hub's usual cache.")
]
Revision = Annotated[str | None, typer.Option("--revision", metavar="NAME", help="A branch, a tag or a commit.")]
HubName = Annotated[str, typer.Argument(help="A hub id like org/name.", metavar="NAME")]


def matrix(as_json: AsJson = False, no_color: NoColor = False) -> None:
    """Show which targets work with which drafters.

    A target goes by the architecture in its config.json, a drafter by its method in --speculative-config.

    \b
    Examples:
      outrider matrix
      outrider matrix --json | jq '.matrix.Gemma3ForCausalLM'
    """
    with importing():
        from outrider.matrix import as_json as matrix_json
        from outrider.matrix import support_matrix
    cells = support_matrix()
    if as_json:
        typer.echo(json.dumps(matrix_json(cells)))
    else:
        show_matrix(open_consoles(no_color=no_color).out, cells)


def list_models(download_dir: DownloadDir = None, as_json: AsJson = False, no_color: NoColor = False) -> None:
    """List the models on this machine, targets and drafters.

    \b
    Examples:
      outrider list
      outrider list --json | jq '.[] | select(.kind == "drafter").name'
    """
    with importing():
        from outrider.local_models import as_json as models_json
        from outrider.local_models import local_models
    models = local_models(download_dir)
    if as_json:
        typer.echo(json.dumps(models_json(models)))
    else:
        show_models(open_consoles(no_color=no_color).out, models)


def pull(name: HubName, revision: Revision = None, download_dir: DownloadDir = None) -> None:
    """Fetch a model from the hub, and say where it is.

    \b
    Examples:
      outrider pull org/name
      outrider pull org/name-eagle3 --revision main
    """
    with importing():
        from outrider.hub import Hub, located
    place = None if download_dir is None else str(download_dir)
    typer.echo(located(name, Hub(revision=revision, download_dir=place)))
