"""`outrider merge`: trained modules of a target's own, back in the target's files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from outrider.startup import importing


def merge_command(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="The target: a directory or a hub id.")],
    drafter: Annotated[str, typer.Argument(metavar="DRAFTER", help="Its modules, as outrider train mtp wrote them.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="A new directory.", file_okay=False)],
) -> None:
    """Put trained MTP modules back into their target's files.

    Other engines look for a target's own modules there. Files without modules
    are linked, not copied: keep MODEL where it is.

    \b
    Examples:
      outrider train mtp --target MODEL --data FILE --out DRAFTER --minutes 60
      outrider merge MODEL DRAFTER OUT
    """
    with importing():
        from outrider.training.merge import merge
    written = merge(model, drafter, out)
    typer.echo(f"{out}: {', '.join(written)}; the rest is linked")
