"""How a certificate is shown: a line for each way of asking and for each option, then the verdict."""

from __future__ import annotations

from collections.abc import Callable

from rich.console import Console, Group
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from outrider.certify.certificate import INCONCLUSIVE, MISMATCH, PROVEN, Case, Certificate, CertifiedCounts
from outrider.certify.comparison import Divergence
from outrider.certify.questions import OPTIONS

STYLES = {PROVEN: "green", MISMATCH: "red", INCONCLUSIVE: "yellow"}
HEADLINES = {
    PROVEN: "PROVEN: token for token, what came out is what the target alone says",
    MISMATCH: "MISMATCH: speculative output differs from the target's own",
    INCONCLUSIVE: "INCONCLUSIVE: no mismatch, but this run proves nothing",
}
COLUMNS = ("tokens", "drafted", "accepted", "AL", "zero", "hits", "evicted", "differ")


def show_certificate(console: Console, certificate: Certificate) -> None:
    console.print(case_table(certificate))
    console.print(verdict_card(certificate))


def case_table(certificate: Certificate) -> Table:
    table = Table(title="plain against speculative", title_style="bold", box=None, padding=(0, 1, 0, 0))
    table.add_column("case", no_wrap=True)
    for name in COLUMNS:
        table.add_column(name, justify="right")
    for composition in certificate.compositions:
        preemptions = certificate.preemptions.get(composition, 0)
        counts = _sum(certificate, lambda case, wanted=composition: case.composition == wanted)  # type: ignore[misc]
        counts.preemptions = preemptions
        _add(table, composition, counts)
    table.add_row()
    for option in [name for name in OPTIONS if any(case.option == name for case in certificate.cases)]:
        counts = _sum(certificate, lambda case, wanted=option: case.option == wanted)  # type: ignore[misc]
        _add(table, option, counts, preempted=False)
    table.add_row()
    for temperature in sorted({case.temperature for case in certificate.cases}):
        counts = _sum(certificate, lambda case, wanted=temperature: case.temperature == wanted)  # type: ignore[misc]
        _add(table, f"temperature {temperature:g}", counts, preempted=False)
    return table


def verdict_card(certificate: Certificate) -> Panel:
    style, counts = STYLES[certificate.verdict], certificate.counts
    lines = [
        Text(HEADLINES[certificate.verdict], f"bold {style}"),
        *_identity_lines(certificate),
        Text(
            f"{counts.tokens} tokens compared, {counts.mismatches} answers differ; {counts.rounds} rounds, "
            f"{counts.drafted} drafted, {counts.accepted} accepted, {counts.rejected} rejected"
        ),
        *(Text(line) for line in _check_lines(certificate)),
    ]
    if certificate.verdict == INCONCLUSIVE:
        lines += [Text(f"doubt: {doubt}", "yellow") for doubt in certificate.doubts]
    if certificate.first_divergence is not None:
        lines += [Text(line, "red") for line in divergence_lines(certificate.first_divergence)]
    if certificate.control_mismatches:
        control = (
            f"plain decoding differs from itself, alone and in a batch, in {certificate.control_mismatches} answers"
        )
        reason = "rounding depends on company here and decides near ties (float32 on a CPU: it does not)"
        lines.append(Text(f"{control}: {reason}", "yellow"))
    return Panel(Group(*lines), border_style=style, title="certificate", expand=False)


def divergence_lines(divergence: Divergence) -> list[str]:
    difference = divergence.difference
    lines = [
        f"first divergence: {divergence.case}, prompt {divergence.prompt}, {divergence.option}, temperature "
        f"{divergence.temperature:g}, seed {divergence.seed}, position {difference.position} ({difference.kind})",
        f"  plain {difference.plain!r} {divergence.plain_text!r}, "
        f"speculative {difference.speculative!r} {divergence.speculative_text!r}",
    ]
    if divergence.context:
        lines.append(f"  after {divergence.context!r}")
    if divergence.top_two_gap is not None:
        margin = divergence.choice_margin
        noise = f"; the plain choice wins by {margin:.3g}, noise included" if margin is not None else ""
        lines.append(f"  the target's two best logits there are {divergence.top_two_gap:.3g} apart{noise}")
    return lines


def _identity_lines(certificate: Certificate) -> list[Text]:
    identity = certificate.identity
    millions = identity.num_parameters / 1e6
    mode = " in exact mode" if identity.exact else ""
    return [
        Text(f"target  {identity.model} ({identity.architecture}, {millions:.1f} M parameters)"),
        Text(f"drafter {identity.drafter}, {identity.num_speculative_tokens} tokens a round"),
        Text(f"{identity.dtype} on {identity.device}{mode}, {certificate.seconds:.0f} s"),
    ]


def _check_lines(certificate: Certificate) -> list[str]:
    noticed = "noticed" if certificate.self_check else "NOT NOTICED"
    lines = [
        f"log-probabilities differ by {certificate.largest_logprob_difference:.1e} at most",
        f"self-check: a token changed on purpose was {noticed}",
    ]
    for test in certificate.draws:
        drafts = f", {test.drafted} of them drafted, {test.accepted} accepted" if test.drafted else ""
        control = "rejected" if test.control_rejected else "not rejected"
        lines.append(
            f"distribution of the {test.name}: p = {test.p_value:.3g} over {test.draws} draws{drafts}; "
            f"a wrong distribution is {control} (p = {test.control_p_value:.1e})"
        )
    if certificate.recorded_rounds:
        lines.append(f"{certificate.recorded_rounds} of the rounds were replayed from CUDA graphs")
    if certificate.not_exercised:
        lines.append(f"not met in this run: {', '.join(certificate.not_exercised)}")
    return lines


def _sum(certificate: Certificate, chosen: Callable[[Case], bool]) -> CertifiedCounts:
    total = CertifiedCounts()
    for case in certificate.cases:
        if chosen(case):
            total += case.counts
    return total


def _add(table: Table, name: str, counts: CertifiedCounts, *, preempted: bool = True) -> None:
    style = "bold red" if counts.mismatches else "green"
    table.add_row(
        name,
        *(str(number) for number in (counts.tokens, counts.drafted, counts.accepted)),
        f"{counts.accept_length:.2f}",
        str(counts.zero_draft_rounds),
        str(counts.prefix_hit_tokens),
        str(counts.preemptions) if preempted else "",
        Text(str(counts.mismatches), style),
    )
