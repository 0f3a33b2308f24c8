"""The card that people read and the JSON line that machines read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider import __version__
from outrider.bench.interleave import Record, num_equal, paired_ratio

PLAIN, SPECULATIVE = "outrider plain", "outrider speculative"


@dataclass(frozen=True)
class RaceSetting:
    """What was measured, and where."""

    command: str
    model: str
    drafter: str | None
    dtype: str
    device: str
    threads: int
    num_prompts: int
    batch_size: int
    max_tokens: int
    num_runs: int
    bandwidth: float  # gigabytes a second that the memory gives


def to_dict(setting: RaceSetting, records: Sequence[Record], notes: Sequence[str]) -> dict[str, Any]:
    return {
        "benchmark": setting.command,
        "model": setting.model,
        "drafter": setting.drafter,
        "dtype": setting.dtype,
        "device": setting.device,
        "threads": setting.threads,
        "num_prompts": setting.num_prompts,
        "batch_size": setting.batch_size,
        "max_tokens": setting.max_tokens,
        "num_runs": setting.num_runs,
        "memory_gigabytes_per_second": setting.bandwidth,
        "sides": [_side(record, records[0]) for record in records],
        "ratios": {f"{a.name} / {b.name}": _ratio(a, b) for a, b in _pairs(records)},
        "versions": {"outrider": __version__, "torch": torch.__version__},
        "notes": list(notes),
    }


def show_card(console: Console, setting: RaceSetting, records: Sequence[Record], notes: Sequence[str]) -> None:
    plural = "s" if setting.num_prompts != 1 else ""
    threads = f"{setting.threads} thread{'s' if setting.threads != 1 else ''}"
    head = f"{setting.model}, {setting.dtype} on {setting.device} with {threads}"
    console.print(Text(f"{setting.command}: {head}", "bold"), soft_wrap=True)
    asked = f"{setting.num_prompts} prompt{plural}, batch {setting.batch_size}, {setting.max_tokens} tokens each"
    console.print(Text(f"{asked}, greedy; medians of {setting.num_runs} interleaved runs", "dim"), soft_wrap=True)
    console.print(_table(records))
    for left, right in _pairs(records):
        ratio = paired_ratio(left, right)
        compared = f"{left.name} is {ratio.median:.2f}x as fast as {right.name} ({ratio.low:.2f} to {ratio.high:.2f})"
        console.print(Text(compared, "green" if ratio.median >= 1 else "red"), soft_wrap=True)
    console.print(_roof_line(setting, records[0]), soft_wrap=True)
    for line in _equality_lines(records):
        console.print(line, soft_wrap=True)
    for note in notes:
        console.print(Text(note, "yellow"), soft_wrap=True)


def _table(records: Sequence[Record]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    table.add_column("side", no_wrap=True)
    for name in ("tokens/s", "range", "first ms", "ms/token", "ms/step", "AL", "GB/s"):
        table.add_column(name, justify="right")
    for record in records:
        speed, how = record.tokens_per_second, record.speculation
        table.add_row(
            record.name,
            f"{speed.median:.1f}",
            f"{speed.low:.1f}-{speed.high:.1f}",
            f"{record.first_token_ms.median:.1f}",
            f"{record.token_ms.median:.2f}",
            f"{record.step_ms.median:.2f}",
            f"{how.accept_length:.2f}" if how is not None else "",
            f"{record.gigabytes_per_second.median:.1f}",
        )
    return table


def _roof_line(setting: RaceSetting, plain: Record) -> Text:
    share = plain.gigabytes_per_second.median / setting.bandwidth
    return Text(
        f"a pass reads {plain.pass_bytes / 1e6:.0f} MB of weights; the memory gives {setting.bandwidth:.1f} GB/s, "
        f"of which plain decoding uses {share:.0%}"
    )


def _equality_lines(records: Sequence[Record]) -> list[Text]:
    plain, total = records[0], len(records[0].tokens)
    lines = []
    for record in records[1:]:
        equal = num_equal(record, plain)
        if record.name == SPECULATIVE:
            word = "yes" if equal == total else "NO"
            style = "green" if equal == total else "bold red"
            lines.append(Text(f"identical tokens, speculative and plain: {word} ({equal} of {total} answers)", style))
        else:
            lines.append(Text(f"identical answers, {record.name} and {plain.name}: {equal} of {total}"))
    unsteady = [record.name for record in records if not record.is_steady]
    lines += [Text(f"{name} gave different answers in different runs", "red") for name in unsteady]
    return lines


def _pairs(records: Sequence[Record]) -> list[tuple[Record, Record]]:
    """Each of ours against the others': speculative to plain, then both to every peer."""
    ours = [record for record in records if record.name in (PLAIN, SPECULATIVE)]
    theirs = [record for record in records if record not in ours]
    pairs = [(ours[1], ours[0])] if len(ours) > 1 else []
    return pairs + [(own, other) for other in theirs for own in ours]


def _ratio(left: Record, right: Record) -> dict[str, Any]:
    return paired_ratio(left, right).to_dict()


def _side(record: Record, plain: Record) -> dict[str, Any]:
    how = record.speculation
    return {
        "name": record.name,
        "tokens_per_second": record.tokens_per_second.to_dict(),
        "first_token_ms": record.first_token_ms.to_dict(),
        "ms_per_token": record.token_ms.to_dict(),
        "ms_per_step": record.step_ms.to_dict(),
        "bytes_per_step": record.pass_bytes,
        "gigabytes_per_second": record.gigabytes_per_second.to_dict(),
        "accept_length": how.accept_length if how is not None else None,
        "acceptance_per_position": how.acceptance_per_position if how is not None else None,
        "answers": len(record.tokens),
        "answers_equal_to_plain": num_equal(record, plain),
        "same_in_every_run": record.is_steady,
    }
