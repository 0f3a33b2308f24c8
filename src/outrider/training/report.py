"""What is told of a run: a bar while it lasts, then a card, a picture and a README beside the drafter."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from outrider import __version__
from outrider.training.course import OnProgress, Progress, Result
from outrider.training.picture import draw

CARD, PICTURE, README = "training.json", "training.png", "README.md"


@contextmanager
def shown(console: Console) -> Iterator[OnProgress | None]:
    """A bar with tokens a second, time left and the latest accept length; nothing where nobody watches."""
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description:<32}"), BarColumn(), TimeElapsedColumn(), TextColumn("left"),
               TimeRemainingColumn(), TextColumn("{task.fields[figures]}"))  # fmt: skip
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("loading", total=None, figures="")

        def on_progress(progress: Progress) -> None:
            bar.update(
                task,
                description=progress.what,
                completed=progress.done,
                total=progress.total,
                figures=figures(progress),
            )

        yield on_progress


def figures(progress: Progress) -> str:
    parts = []
    if progress.tokens_per_second:
        parts.append(f"{progress.tokens_per_second:,.0f} tok/s")
    if progress.loss is not None:
        parts.append(f"loss {progress.loss:.3f}")
    if progress.accept_length is not None:
        parts.append(f"accept length {progress.accept_length:.2f}")
    return "  ".join(parts)


def write_report(result: Result, command: str) -> str:
    """Writes the card, the picture (where Pillow is there) and the README; returns the card as text."""
    out, card = result.options.out, card_of(result)
    report = {**result.report(), "command": command, "version": __version__, "losses": result.losses}
    (out / CARD).write_text(json.dumps(report, indent=1) + "\n")
    has_picture = draw(result, out / PICTURE)
    (out / README).write_text(readme(result, command, card, has_picture))
    return card


def card_of(result: Result) -> str:
    options = result.options
    rows = [
        ("drafter", f"{options.method}, {options.depth} tokens, in {options.out}"),
        ("target", str(options.target)),
        ("data", f"{result.num_texts:,} texts, {result.num_tokens:,} tokens, {result.num_learnt:,} the target's own"),
        ("training", f"{result.num_steps} steps, {result.tokens_per_second:,.0f} tokens/s"),
        ("seconds", ", ".join(f"{name} {value:.0f}" for name, value in result.seconds.items())),
        ("vocabulary", f"{result.coverage:.2%} of what the target says"),
    ]
    for temperature, after in result.best.by_temperature.items():
        before = result.before.by_temperature[temperature]
        shares = " ".join(f"{share:.2f}" for share in after["acceptance_per_position"])
        lengths = f"{before['accept_length']:.2f} -> {after['accept_length']:.2f}"
        rows.append((f"accept length, T = {temperature}", f"{lengths}   by position {shares}"))
    if result.stopped_early:
        rows.append(("stopped", f"no better accept length in {options.patience} validations"))
    if result.interrupted:
        rows.append(("interrupted", "outrider train ... --resume goes on"))
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"{name:<{width}}  {value}" for name, value in rows)


def readme(result: Result, command: str, card: str, has_picture: bool) -> str:
    options = result.options
    made = datetime.now(UTC).strftime("%Y-%m-%d")
    picture = f"\n![loss, accept length and acceptance by position]({PICTURE})\n" if has_picture else ""
    return f"""# A drafter ({options.method}) for {Path(options.target).name}

Made on {made} by outrider {__version__}:

    {command}

Served accept length is what the engine reached with it on {result.num_prompts} held-out prompts, K = {options.depth},
at temperature 0 and 0.8. These are the weights with the best one.

    {card.replace(chr(10), chr(10) + "    ")}
{picture}
Use it with

    outrider generate "..." --model {options.target} --draft {options.out} -k {options.depth}
    outrider doctor {options.target} {options.out}
"""
