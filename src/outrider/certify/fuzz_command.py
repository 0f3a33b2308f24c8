"""`outrider bench fuzz`: what the command takes, and what it shows."""

from __future__ import annotations

import shlex
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.commands import option
from outrider.console import open_consoles, print_json, progress_bar, show_note
from outrider.options import AsJson, EngineOptions, ModelArgument
from outrider.startup import importing

if TYPE_CHECKING:
    from rich.console import Console

    from outrider.certify.fuzz import FuzzReport

WORLDS = "Worlds"
Requests = Annotated[int, option(WORLDS, "--requests", metavar="N", help="Requests in all worlds together.", min=1)]
Seed = Annotated[int, option(WORLDS, "--seed", metavar="S", help="Other worlds with every seed.")]
OneWorld = Annotated[str | None, option(WORLDS, "--world", metavar="SEED", help="One world alone: what failed before.")]
Only = Annotated[str | None, option(WORLDS, "--only", metavar="N,N", help="Of that world, these requests alone.")]


def fuzz(
    options: EngineOptions,
    target: ModelArgument = None,
    requests: Requests = 1000,
    seed: Seed = 0,
    world: OneWorld = None,
    only: Only = None,
    as_json: AsJson = False,
) -> None:
    """Random worlds: everybody must be told what he is told alone.

    An engine with any settings, and requests with any options that come and go while others are read, judged, given up,
    preempted or broken off, with drafts of any depth: tokens, text and log-probabilities are those of the same request
    alone, without a drafter. Exit status 0: so it is. 1: not so; it ends there, with as few requests as still fail and
    the command that shows it again. 3: no difference, but some of that never happened.

    \b
    Examples:
      outrider bench fuzz
      outrider bench fuzz MODEL --draft DRAFTER --requests 5000 --seed 7
      outrider bench fuzz --world 7-123 --only 3,8
    """
    with importing():
        from outrider.certify.fuzz import FuzzReport, Truth, try_world
        from outrider.certify.fuzz import fuzz as fuzz_pairs
        from outrider.certify.trial import Pair
        from outrider.pair import shown_name
    if only is not None and world is None:
        raise ValueError("--only says which requests of one world: give --world too")
    config = options.named(target).config(default_method="ngram")
    pair = Pair(shown_name(config.model), replace(config, speculative=None), config.speculative)
    records = config.torch_device.type == "cuda" and not config.enforce_eager
    consoles = open_consoles()
    with progress_bar(consoles.about) as progress:
        if world is None:
            report = fuzz_pairs([pair], seed, requests, records=records, progress=progress, most_failures=1)
        else:
            figures, failure = try_world(world, pair, Truth(pair), _numbers(only), records=records)
            report = FuzzReport(figures, [failure] if failure is not None else [])
    if not as_json:
        _show(consoles.about, report)
    print_json(consoles.out, _to_dict(report), asked=as_json)
    raise typer.Exit(report.exit_status)


def _numbers(listed: str | None) -> list[int] | None:
    if listed is None:
        return None
    try:
        return [int(number) for number in listed.split(",")]
    except ValueError as error:
        raise ValueError(f"--only takes numbers with commas between them, not {listed!r}") from error


def _show(console: Console, report: FuzzReport) -> None:
    figures = {name: value for name, value in vars(report.figures).items() if name != "seconds"}
    show_note(console, ", ".join(f"{value} {name.replace('_', ' ')}" for name, value in figures.items()))
    for failure in report.failures:
        where = "the engine" if failure.request is None else f"request {failure.request}"
        console.print(f"world {failure.world.seed}, {where}: {failure.what}", markup=False, highlight=False)
        console.print(f"  again: {_again(failure.world.seed, failure.numbers)}", markup=False, highlight=False)
    verdict = f"{len(report.failures)} worlds fail" if report.failures else "0 mismatches"
    doubts = f" ({', '.join(report.figures.doubts)})" if report.figures.doubts and not report.failures else ""
    console.print(f"{verdict} in {report.figures.requests} requests{doubts}", markup=False, highlight=False)


def _again(seed: str, numbers: list[int]) -> str:
    """The same command for one world; what came before of --requests and --seed has no meaning there."""
    return f"outrider {shlex.join(sys.argv[1:])} --world {seed} --only {','.join(map(str, numbers))}"


def _to_dict(report: FuzzReport) -> dict[str, Any]:
    return {
        "command": "fuzz",
        **vars(report.figures),
        "doubts": report.figures.doubts,
        "failures": [
            {"world": each.world.seed, "only": each.numbers, "request": each.request, "what": each.what}
            for each in report.failures
        ],
    }
