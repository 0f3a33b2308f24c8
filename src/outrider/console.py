"""What the commands show: text coloured by what was drafted, progress while weights load, and cards with the numbers.
The answer itself goes to standard output; everything about it goes to standard error, so that pipes stay clean."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import COLOR_SYSTEMS, Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.style import Style
from rich.table import Table
from rich.text import Text

from outrider.sampling_params import Speculation
from outrider.startup import CHECKING

if TYPE_CHECKING:  # they import torch, which help and version do without
    from outrider.engine.memory import Budget
    from outrider.local_models import LocalModel
    from outrider.matrix import Cell
    from outrider.measure import Comparison, Run
    from outrider.outputs import CompletionOutput

OnProgress = Callable[[str, int, int], None]  # what, done, total
# Of a token that was the first, second, ... of its draft. The target's own tokens keep the terminal's colour.
DRAFT_COLOURS = ("green", "cyan", "blue", "magenta", "yellow", "red")
BLOCKS = "▁▂▃▄▅▆▇█"
# A terminal acts on control characters, and a model may write any: they are shown as symbols instead.
SHOWN_CONTROLS = {
    **{code: 0x2400 + code for code in range(0x20) if chr(code) not in "\n\t"},
    **dict.fromkeys(range(0x7F, 0xA0), 0xFFFD),
}


@dataclass(frozen=True)
class Consoles:
    """Where the answer goes, and where everything about it goes."""

    out: Console
    about: Console


def open_consoles(*, no_color: bool = False) -> Consoles:
    """Colours only on a terminal, and not where the user or NO_COLOR says otherwise."""
    plain = no_color or bool(os.environ.get("NO_COLOR"))
    out, about = (Console(stderr=stderr, color_system=None if plain else "auto") for stderr in (False, True))
    return Consoles(out, about)


def draft_style(position: int) -> Style:
    if position == 0:
        return Style.null()
    return Style(color=DRAFT_COLOURS[min(position, len(DRAFT_COLOURS)) - 1])


class StreamedText:
    """Writes a growing answer, each token in the colour of its place in the draft."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._num_tokens = 0
        self._text_len = 0

    def show(self, completion: CompletionOutput) -> None:
        """Writes what is new since the last call."""
        new = slice(self._num_tokens, None)
        for end, position in zip(completion.text_ends[new], completion.draft_positions[new], strict=True):
            self._write(completion.text[self._text_len : end], draft_style(position))
            self._text_len = end
        self._num_tokens = len(completion.text_ends)
        self._console.file.flush()

    def finish(self) -> None:
        self._console.file.write("\n")
        self._console.file.flush()

    def _write(self, text: str, style: Style) -> None:
        """Not through Console.print: that wraps lines and expands tabs, and an answer must come out as it is."""
        if self._console.is_terminal:
            text = text.translate(SHOWN_CONTROLS)
        name = self._console.color_system
        system = COLOR_SYSTEMS[name] if name is not None else None
        self._console.file.write(style.render(text, color_system=system))


@contextmanager
def loading(console: Console) -> Iterator[OnProgress | None]:
    """A bar for each checkpoint while its weights are read, and for whatever else takes its time; None, and nothing
    shown, where nobody watches."""
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        tasks: dict[str, int] = {}

        def on_progress(what: str, done: int, total: int) -> None:
            if what not in tasks:
                name = what if what == CHECKING else f"loading {checkpoint_name(what)}"
                tasks[what] = progress.add_task(name, total=total)
            progress.update(tasks[what], completed=done)  # type: ignore[arg-type]

        yield on_progress


@contextmanager
def progress_bar(console: Console) -> Iterator[OnProgress | None]:
    """One bar for work of several stages; None, and nothing shown, where nobody watches."""
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description:<24}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("loading", total=None)
        yield lambda what, done, total: progress.update(task, description=what, completed=done, total=total)


def print_json(console: Console, report: Mapping[str, Any], *, asked: bool) -> None:
    """One line for programs, the last of the output. Someone at a terminal sees it only where it was asked for."""
    if asked or not console.is_terminal:
        console.file.write(json.dumps(report) + "\n")
        console.file.flush()


def checkpoint_name(path: str) -> str:
    """The part of a path that people know a checkpoint by; for one in the hub's cache, its hub id."""
    place = Path(path)
    if place.parent.name == "snapshots":
        return place.parent.parent.name.removeprefix("models--").replace("--", "/")
    return place.name


def show_error(console: Console, error: Exception) -> None:
    message = " ".join(str(error).split()).translate(SHOWN_CONTROLS) or type(error).__name__
    _print_line(console, Text(f"error: {message}", "red"))


def show_note(console: Console, note: str) -> None:
    _print_line(console, Text(note, "dim"))


def _print_line(console: Console, line: Text) -> None:
    """On a terminal, lines break between words; for programs, what is said is one line."""
    console.print(line, soft_wrap=not console.is_terminal)


def show_memory(console: Console, budget: Budget) -> None:
    """One line: what the weights and the cache take."""
    show_note(console, f"memory: {budget.describe()}")


def show_memory_table(console: Console, rows: Mapping[str, str]) -> None:
    for name, value in rows.items():
        _row(console, name, Text(value))


def show_card(console: Console, run: Run, method: str | None) -> None:
    """Speed, and how drafting went."""
    counted = f"{run.num_tokens} tokens in {run.seconds:.2f} s, the first after {run.ttft:.2f} s"
    _row(console, "tokens", Text(counted + (", interrupted" if run.interrupted else "")))
    _row(console, "speed", Text(f"{run.tokens_per_second:.1f} tokens/s"))
    if method is not None:
        show_speculation(console, run.completion.speculation, method)


def show_speculation(console: Console, speculation: Speculation, method: str) -> None:
    _row(console, "drafter", Text(method))
    _row(console, "rounds", Text(f"{speculation.rounds}, accept length {speculation.accept_length:.2f}"))
    if speculation.drafted:
        _row(console, "acceptance", acceptance_bars(speculation, plain=console.options.ascii_only))
    elif speculation.rounds:
        reason = "drafts did not pay here and now, or the text suggested none (--no-adaptive: whenever there are some)"
        _row(console, "acceptance", Text(f"nothing was drafted: {reason}"))


def acceptance_bars(speculation: Speculation, *, plain: bool = False) -> Text:
    """A bar for each draft position, in the colour that its tokens have in the text."""
    bars = Text()
    for position, rate in enumerate(speculation.acceptance_per_position, start=1):
        block = ":" if plain else BLOCKS[round(rate * (len(BLOCKS) - 1))]
        bars.append(f"{position}{block}{rate:.0%} ", draft_style(position))
    return bars


def show_comparison(console: Console, comparison: Comparison) -> None:
    """Both speeds, and whether the two sides said the same."""
    plain = comparison.plain
    _row(
        console,
        "plain",
        Text(f"{plain.num_tokens} tokens in {plain.seconds:.2f} s, {plain.tokens_per_second:.1f} tokens/s"),
    )
    _row(console, "speed-up", Text(f"{comparison.speedup:.2f}x", "bold"))
    if comparison.difference is None:
        verdict = Text(f"yes, all {plain.num_tokens} tokens", "green")
    else:
        verdict = Text(f"NO, they part at token {comparison.difference + 1}", "bold red")
    _row(console, "identical", verdict)


def show_matrix(console: Console, cells: Sequence[Cell]) -> None:
    """The drafters that work with every target in one line, then a row for every target with the others."""
    methods = sorted({cell.drafter for cell in cells})
    particular = [name for name in methods if not all(cell.supported for cell in cells if cell.drafter == name)]
    table = Table(box=None, header_style="dim", padding=(0, 1, 0, 0))
    for name in ("target", *particular):
        table.add_column(name, overflow="fold")
    for target in sorted({cell.target for cell in cells}):
        supported = {cell.drafter: cell.supported for cell in cells if cell.target == target}
        table.add_row(target, *("yes" if supported[method] else "-" for method in particular))
    universal = ", ".join(name for name in methods if name not in particular)
    console.print(Text(f"with every target: {universal}"))
    console.print(Text("with some, and the targets themselves:"))
    console.print(table)


def show_models(console: Console, models: Sequence[LocalModel]) -> None:
    """A row for each model on this machine."""
    table = Table(box=None, header_style="dim", padding=(0, 1, 0, 0))
    for name in ("name", "kind", "what", "MB"):
        table.add_column(name, overflow="fold", justify="right" if name == "MB" else "left")
    for model in models:
        table.add_row(model.name, model.kind, model.what, f"{model.num_bytes / 1e6:,.0f}")
    console.print(table)


def _row(console: Console, label: str, value: Text) -> None:
    console.print(Text.assemble((f"{label:<12}", "dim"), value), soft_wrap=True)
