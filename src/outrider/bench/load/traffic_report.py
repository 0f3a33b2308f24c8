"""Traffic as figures: a dict for programs, a card for people. The speculative side must never be under the plain one,
and each level where it is is marked."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider import __version__
from outrider.bench.interleave import Spread
from outrider.bench.load.serve_client import Answered
from outrider.bench.load.serve_load import LoadOutcome
from outrider.bench.load.serve_report import LatencyFigures
from outrider.bench.load.traffic import LevelRuns, TrafficPlan, output_rate
from outrider.sampling_params import accept_length

NEVER_UNDER = 0.98  # of plain: less counts as slower, and not as noise
SIDES = ("plain", "speculative")


@dataclass(frozen=True)
class TrafficSetting:
    """What was measured, and where."""

    model: str
    drafter: str | None
    weights: str  # real or random
    accept_length: float | None  # made up; None: what the drafter reaches
    way: str  # engine or http
    dtype: str
    device: str
    threads: int


def to_dict(setting: TrafficSetting, plan: TrafficPlan, found: Sequence[LevelRuns]) -> dict[str, Any]:
    """Everything in one object. Latencies are over all requests of all runs of a level."""
    levels = [_level(each) for each in found]
    report: dict[str, Any] = {
        "benchmark": "bench traffic",
        **vars(setting),
        "prompt_tokens": plan.prompt_len,
        "answer_tokens": plan.answer_len,
        "num_turns": plan.num_turns,
        "arrivals": "clients" if plan.levels[0].clients is not None else "poisson",
        "think_seconds": plan.think_seconds if plan.levels[0].clients is not None else None,
        "temperature": plan.temperature,
        "top_p": plan.top_p,
        "num_runs": plan.num_runs,
        "levels": levels,
    }
    if setting.drafter is not None:
        under = [level["level"] for level in levels if level["is_under_plain"]]
        report |= {"never_under": NEVER_UNDER, "levels_under_plain": under}
    return report | {"versions": {"outrider": __version__}}


def _level(found: LevelRuns) -> dict[str, Any]:
    level: dict[str, Any] = {
        "level": found.level.name,
        "clients": found.level.clients,
        "request_rate": found.level.rate,
        "num_requests": len(found.runs[0][0].answers),
    }
    level |= {name: _side(runs) for name, runs in zip(SIDES, found.runs, strict=False)}
    if len(found.runs) > 1:
        plain, drafted = ([output_rate(run) for run in runs] for runs in found.runs)
        ratio = statistics.median(drafted) / statistics.median(plain)  # of the two lines that are drawn
        pairs = Spread(tuple(own / other for own, other in zip(drafted, plain, strict=True)))
        level |= {"times_plain": round(ratio, 4), "times_plain_in_pairs": pairs.to_dict()}
        level["is_under_plain"] = ratio < NEVER_UNDER
    return level


def _side(runs: Sequence[LoadOutcome]) -> dict[str, Any]:
    answers = [answer for run in runs for answer in run.answers]
    first = LatencyFigures.of([answer.first for answer in answers if answer.first is not None])
    token = LatencyFigures.of([value for answer in answers if (value := answer.token_seconds) is not None])
    rounds = sum(run.drafting.num_drafts for run in runs if run.drafting is not None)
    accepted = sum(run.drafting.num_accepted for run in runs if run.drafting is not None)
    return {
        "tokens_per_second": Spread(tuple(output_rate(run) for run in runs)).to_dict(),
        "ttft_ms": _latency(first),
        "tpot_ms": _latency(token),
        "cached_share": _cached_share(answers),
        "drafted_rounds": rounds,
        "accept_length": round(accept_length(rounds, accepted), 3) if rounds else None,
    }


def _cached_share(answers: Sequence[Answered]) -> float | None:
    """Of all tokens of prompts, those that were found in pages."""
    known = [(each.num_cached, each.num_prompt_tokens) for each in answers]
    cached, total = (sum(pair[place] or 0 for pair in known) for place in (0, 1))
    return round(cached / total, 4) if total else None


def _latency(figures: LatencyFigures | None) -> dict[str, float] | None:
    return None if figures is None else {"median": round(figures.median, 3), "p99": round(figures.p99, 3)}


# the card


def show_card(console: Console, report: dict[str, Any]) -> None:
    threads = f"{report['threads']} thread{'s' if report['threads'] != 1 else ''}"
    where = report["device"] if report["device"] != "cpu" else f"cpu with {threads}"
    weights = ", random weights" if report["weights"] == "random" else ""
    through = "over HTTP" if report["way"] == "http" else "through the engine"
    _say(console, f"bench traffic: {report['model']}{weights}, {report['dtype']} on {where}, {through}", "bold")
    _say(console, _asked(report), "dim")
    console.print(_table(report))
    if report["drafter"] is not None:
        _say(console, *_verdict(report))
    if report["accept_length"] is not None:
        _say(console, f"the accept length of {report['accept_length']:g} is made up: this is not real text", "yellow")


def _asked(report: dict[str, Any]) -> str:
    waits = f"clients wait {report['think_seconds']:g} s on average between requests"
    arrivals = waits if report["arrivals"] == "clients" else "requests arrive at random times"
    lengths = f"prompts of {report['prompt_tokens']} tokens, answers of {report['answer_tokens']}"
    if report["num_turns"] > 1:
        lengths = f"chats of {report['num_turns']} turns, {lengths} each, hits: prompt tokens found in pages"
    drawn = f", temperature {report['temperature']:g}" if report["temperature"] else ""
    drawn += f", top_p {report['top_p']:g}" if report["top_p"] < 1 else ""
    runs = f"{report['num_runs']} run{'s' if report['num_runs'] != 1 else ''} of every level, sides in turn"
    return f"{lengths}{drawn}, drafter {report['drafter'] or 'none'}; {arrivals}; {runs}"


def _table(report: dict[str, Any]) -> Table:
    table = Table(box=None, padding=(0, 1, 0, 0))
    is_chat = report["num_turns"] > 1
    titles = ("level", "side", "tokens/s", "x plain", "TTFT ms", "p99", "TPOT ms", "p99", "AL")
    for title in (*titles, "hits") if is_chat else titles:
        table.add_column(title, no_wrap=True, justify="left" if title in ("level", "side") else "right")
    for level in report["levels"]:
        for name in (name for name in SIDES if name in level):
            side = level[name]
            ratio = _ratio(level) if name == "speculative" else Text()
            length = f"{side['accept_length']:.2f}" if side["accept_length"] is not None else ""
            cells = [*_cells(side["ttft_ms"], 0), *_cells(side["tpot_ms"], 2)]
            rate = f"{side['tokens_per_second']['median']:.0f}"
            hits = [f"{side['cached_share'] or 0:.1%}"] if is_chat else []
            table.add_row(level["level"] if name == "plain" else "", name, rate, ratio, *cells, length, *hits)
    return table


def _ratio(level: dict[str, Any]) -> Text:
    value, under = level["times_plain"], level["is_under_plain"]
    return Text(f"{value:.2f}{' UNDER' if under else ''}", "bold red" if under else "green")


def _cells(latency: dict[str, float] | None, digits: int) -> tuple[str, str]:
    if latency is None:
        return "", ""
    return f"{latency['median']:.{digits}f}", f"{latency['p99']:.{digits}f}"


def _verdict(report: dict[str, Any]) -> tuple[str, str]:
    under, count = report["levels_under_plain"], len(report["levels"])
    if not under:
        return f"speculative is never under plain: {NEVER_UNDER} of it or more at all {count} levels", "green"
    return f"speculative is UNDER plain at {len(under)} of {count} levels: {', '.join(under)}", "bold red"


def _say(console: Console, text: str, style: str) -> None:
    console.print(Text(text, style), soft_wrap=True)
