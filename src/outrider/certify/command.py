"""`outrider certify`: anyone can run the proof. Exit status 0 proven, 1 mismatch, 3 inconclusive."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from outrider.bench.options import (
    AsJson,
    Device,
    Draft,
    Dtype,
    Exact,
    MaxModelLen,
    Model,
    NumSpeculativeTokens,
    PromptFile,
    SpeculativeJson,
    Threads,
    speculative_from,
)
from outrider.bench.prompts import read_prompts
from outrider.certify.proof import Progress as OnProgress
from outrider.certify.proof import certify
from outrider.certify.questions import FULL, QUICK
from outrider.certify.report import show_certificate
from outrider.console import open_consoles

MaxTokens = Annotated[int | None, typer.Option("--max-tokens", "-n", help="Tokens in each answer.", metavar="N")]
Quick = Annotated[bool, typer.Option("--quick", help="Fewer prompts, seeds and tokens.")]


def certify_command(
    model: Model = None,
    draft: Draft = None,
    speculative_config: SpeculativeJson = None,
    num_speculative_tokens: NumSpeculativeTokens = None,
    prompts: PromptFile = None,
    max_tokens: MaxTokens = None,
    quick: Quick = False,
    dtype: Dtype = "auto",
    device: Device = "auto",
    max_model_len: MaxModelLen = None,
    threads: Threads = None,
    exact: Exact = False,
    as_json: AsJson = False,
) -> None:
    """Prove that speculative output is what the target alone says: token for token, in every company.

    Exit status 0: proven. 1: an answer differs. 3: no difference, but nothing was accepted or nothing rejected.

    \b
    Examples:
      outrider certify --quick
      outrider certify --model DIRECTORY --draft DIRECTORY
      outrider certify --model MODEL.gguf --json > certificate.json
    """
    speculative = speculative_from(model, draft, speculative_config, num_speculative_tokens)
    effort = QUICK if quick else FULL
    if max_tokens is not None:
        effort = replace(effort, max_tokens=max_tokens)
    consoles = open_consoles()
    with progress_bar(consoles.about) as progress:
        certificate = certify(
            model,
            speculative,
            prompts=read_prompts(prompts) if prompts is not None else None,
            effort=effort,
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            exact=exact,
            progress=progress,
        )
    if as_json:
        typer.echo(json.dumps(certificate.to_dict()))
    else:
        show_certificate(consoles.out, certificate)
    raise typer.Exit(certificate.exit_status)


@contextmanager
def progress_bar(console: Console) -> Iterator[OnProgress | None]:
    """A bar where somebody watches."""
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("loading", total=None)
        yield lambda what, done, total: progress.update(task, description=what, completed=done, total=total)
