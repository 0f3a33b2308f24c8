"""How a diagnosis is shown: the drafter as it was read, what was noticed, how it drafts, the readings, the verdict."""

from __future__ import annotations

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from outrider.console import acceptance_bars
from outrider.doctor.diagnosis import (
    DEAD,
    FAULT,
    FAULTY,
    GOOD,
    HEALTHY,
    MISREAD,
    NOTE,
    UNCLEAR,
    Diagnosis,
    Tried,
    accept_length,
)

VERDICT_STYLES = {HEALTHY: "green", FAULTY: "red", MISREAD: "red", DEAD: "red", UNCLEAR: "yellow"}
LEVEL_STYLES = {GOOD: "green", NOTE: "yellow", FAULT: "bold red"}
HEADLINES = {
    HEALTHY: "HEALTHY: the drafter agrees with the target, and no other reading of it does better",
    FAULTY: "FAULTY: the drafter agrees with the target, but something about it cannot be right",
    MISREAD: "MISREAD: the weights were trained with another reading than the checkpoint's own",
    DEAD: "DEAD: the drafter does not agree with the target",
    UNCLEAR: "UNCLEAR: there was too little text to tell",
}


def show_diagnosis(console: Console, diagnosis: Diagnosis) -> None:
    if diagnosis.provenance:
        console.print(_provenance(diagnosis))
    console.print(_findings(diagnosis))
    console.print(_acceptance(console, diagnosis))
    if diagnosis.tried:
        console.print(_readings(diagnosis))
    if diagnosis.rounded:
        console.print(_rounded(diagnosis))
    console.print(_verdict(diagnosis))


def _table(title: str, *columns: str) -> Table:
    return Table(*columns, title=title, title_style="bold", title_justify="left", box=None, padding=(0, 2, 0, 0))


def _provenance(diagnosis: Diagnosis) -> Table:
    table = _table("how the drafter was read", "setting", "value")
    table.add_column("from", overflow="fold")
    for name, resolved in diagnosis.provenance.items():
        value = list(resolved.value) if isinstance(resolved.value, tuple) else resolved.value
        table.add_row(Text(name), Text(str(value)), Text(resolved.source, "dim"))
    return table


def _findings(diagnosis: Diagnosis) -> Table:
    table = _table("what was noticed", "", "", "")
    table.show_header = False
    for finding in diagnosis.findings:
        level = Text(finding.level, LEVEL_STYLES[finding.level])
        table.add_row(level, Text(finding.subject), Text(finding.message))
    return table


def _acceptance(console: Console, diagnosis: Diagnosis) -> Table:
    """Shows acceptance by draft position, then by context length."""
    rounds = diagnosis.agreement.speculation
    table = _table("how it drafts", "", "")
    table.show_header = False
    table.add_row("accept length", Text(f"{rounds.accept_length:.2f} over {rounds.rounds} rounds", "bold"))
    table.add_row("acceptance", acceptance_bars(rounds, plain=console.options.ascii_only))
    for bucket in diagnosis.buckets:
        part = bucket.agreement
        drafts = Text(f"  {len(part.places)} drafts", "dim")
        table.add_row(f"context {bucket.low}-{bucket.high - 1}", Text(f"{part.mean_accept_length:.2f}") + drafts)
    return table


def _readings(diagnosis: Diagnosis) -> Table:
    """Each beside the reading of the checkpoint, over the places that both drafted at."""
    table = _table("other readings of the same weights, place by place", "reading", "accept length", "as read", "")
    for tried in diagnosis.tried:
        style = "bold green" if tried.is_better else ""
        lengths = Text(f"{tried.accept_length:.2f}", style), f"{tried.as_read:.2f}"
        table.add_row(Text(tried.name, style), *lengths, Text(_difference(tried), style or "dim"))
    return table


def _rounded(diagnosis: Diagnosis) -> Table:
    table = _table("what fewer bits would cost it", "quantization", "accept length", "as read", "")
    for tried in diagnosis.rounded:
        table.add_row(tried.name, f"{tried.accept_length:.2f}", f"{tried.as_read:.2f}", Text(_difference(tried), "dim"))
    return table


def _difference(tried: Tried) -> str:
    return f"{tried.gain:+.2f} ({tried.deviations:+.1f} sigma)"


def _verdict(diagnosis: Diagnosis) -> Panel:
    identity, style = diagnosis.identity, VERDICT_STYLES[diagnosis.verdict]
    lines = [
        Text(HEADLINES[diagnosis.verdict], f"bold {style}"),
        Text(f"target  {identity.target} ({identity.architecture})"),
        Text(f"drafter {identity.drafter} ({identity.method}), {identity.num_speculative_tokens} tokens a round"),
        Text(f"{identity.dtype} on {identity.device}, {diagnosis.seconds:.0f} s"),
    ]
    if diagnosis.remedy:
        before, after = accept_length(diagnosis.agreement), accept_length(diagnosis.remedy[-1].agreement)
        names = " and ".join(tried.name for tried in diagnosis.remedy)
        lines.append(Text(f"trained with: {names} (accept length {after:.2f} instead of {before:.2f})", "bold"))
    lines += [Text(f"- {advice}", style) for advice in diagnosis.advice]
    return Panel(Group(*lines), border_style=style, title="diagnosis", expand=False)
