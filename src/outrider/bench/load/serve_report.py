"""From the records of single requests to figures: latencies, throughput, goodput, acceptance; a card and JSON."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from rich.console import Console

from outrider import __version__
from outrider.bench.load.serve_client import Answered
from outrider.bench.load.serve_load import Load, LoadOutcome
from outrider.bench.load.serve_metrics import DraftingFigures, drafting_of

GOALS = ("ttft", "tpot", "e2el")  # what goodput may ask for, in vLLM's names
WIDTH = 50
TITLES = {
    "ttft": ("TTFT", "Time to First Token"),
    "tpot": ("TPOT", "Time per Output Token (excl. 1st token)"),
    "itl_chunk": ("ITL per chunk", "Inter-token Latency (per chunk)"),
    "itl_token": ("ITL per token", "Inter-token Latency (per token)"),
    "e2el": ("E2EL", "End-to-end Latency"),
}


@dataclass(frozen=True)
class LatencyFigures:
    """Mean, median and percentiles of one latency, in milliseconds."""

    mean: float
    median: float
    p90: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> LatencyFigures | None:
        if not seconds:
            return None
        milliseconds = np.asarray(seconds) * 1e3
        median, p90, p99 = np.percentile(milliseconds, (50, 90, 99))
        return cls(float(milliseconds.mean()), float(median), float(p90), float(p99))


@dataclass(frozen=True)
class Summary:
    seconds: float
    good: list[Answered]  # those without an error
    errors: dict[str, int]  # by kind
    figures: dict[str, LatencyFigures]
    num_prompt_tokens: int | None  # None: the server does not count
    num_tokens: int | None
    num_within_goals: int | None  # None: there are no goals
    drafting: DraftingFigures | None
    num_distinct: int | None = None  # prompts

    @property
    def notes(self) -> list[str]:
        notes = []
        if self.good and self.num_tokens is None:
            notes.append("the server gives no usage, so nothing is said of tokens: chunks are not tokens")
        elif self.good and "itl_token" not in self.figures and "itl_chunk" in self.figures:
            notes.append("the server does not count tokens chunk by chunk, so there is no latency between tokens")
        if self.drafting is not None and self.num_distinct is not None and len(self.good) > self.num_distinct:
            notes.append(
                f"{len(self.good)} requests asked {self.num_distinct} prompts: a drafter that learns from earlier "
                "requests, such as suffix, has seen their answers"
            )
        return notes


def parse_goals(texts: Sequence[str]) -> dict[str, float]:
    """ttft:200 tpot:50, in milliseconds."""
    goals = {}
    for part in (part for text in texts for part in text.split()):
        name, _, value = part.partition(":")
        try:
            limit = float(value)
        except ValueError:
            limit = -1.0
        if name not in GOALS or limit <= 0:
            raise ValueError(f"--goodput takes {', '.join(f'{goal}:MS' for goal in GOALS)}, not {part!r}")
        goals[name] = limit
    return goals


def within(answer: Answered, goals: Mapping[str, float]) -> bool:
    """Whether a request met every goal. One that cannot be measured (a single token has no time per token) meets it."""
    if answer.error is not None:
        return False
    measured = {"ttft": answer.first, "tpot": answer.token_seconds, "e2el": answer.seconds}
    return all(value is None or value * 1e3 <= goals[name] for name, value in measured.items() if name in goals)


def summarise(outcome: LoadOutcome, goals: Mapping[str, float]) -> Summary:
    good = [answer for answer in outcome.answers if answer.error is None]
    samples = {
        "ttft": [answer.first for answer in good if answer.first is not None],
        "tpot": [value for answer in good if (value := answer.token_seconds) is not None],
        "itl_chunk": [gap for answer in good for gap in answer.chunk_gaps],
        "itl_token": [gap / count for answer in good for gap, count in answer.token_gaps for _ in range(count)],
        "e2el": [answer.seconds for answer in good],
    }
    figures = {name: made for name, values in samples.items() if (made := LatencyFigures.of(values)) is not None}
    counted = all(answer.num_tokens is not None for answer in good)
    return Summary(
        seconds=outcome.seconds,
        good=good,
        errors=dict(Counter(answer.error for answer in outcome.answers if answer.error is not None)),
        figures=figures,
        num_prompt_tokens=sum(answer.num_prompt_tokens or 0 for answer in good) if counted else None,
        num_tokens=sum(answer.num_tokens or 0 for answer in good) if counted else None,
        num_within_goals=sum(within(answer, goals) for answer in good) if goals else None,
        drafting=outcome.drafting or drafting_of(answer.speculation for answer in good),
        num_distinct=outcome.num_distinct,
    )


def to_dict(summary: Summary, outcome: LoadOutcome, load: Load, goals: Mapping[str, float]) -> dict[str, Any]:
    """The result as JSON, in the names of vLLM's result files where they have the figure."""
    seconds = summary.seconds or float("inf")
    asking = outcome.asking
    report: dict[str, Any] = {
        "benchmark": "bench serve",
        "model_id": asking.model,
        "endpoint": asking.path,
        "num_prompts": load.num_prompts,
        "num_distinct_prompts": outcome.num_distinct,
        "max_concurrency": load.concurrency,
        "request_rate": load.request_rate,
        "seed": load.seed,
        "max_tokens": asking.max_tokens,
        "temperature": asking.temperature,
        "top_p": asking.top_p,
        "request_seeds": asking.sends_seed,
        "ignore_eos": asking.ignore_eos,
        "duration": summary.seconds,
        "completed": len(summary.good),
        "failed": sum(summary.errors.values()),
        "errors": summary.errors,
        "total_input_tokens": summary.num_prompt_tokens,
        "total_output_tokens": summary.num_tokens,
        "request_throughput": len(summary.good) / seconds,
        "output_throughput": summary.num_tokens / seconds if summary.num_tokens is not None else None,
        "total_token_throughput": None,
    }
    if summary.num_tokens is not None and summary.num_prompt_tokens is not None:
        report["total_token_throughput"] = (summary.num_tokens + summary.num_prompt_tokens) / seconds
    if summary.num_within_goals is not None:
        report |= {"goodput_goals_ms": dict(goals), "request_goodput": summary.num_within_goals / seconds}
    for name, figures in summary.figures.items():
        report |= {f"{which}_{name}_ms": value for which, value in vars(figures).items()}
    if summary.drafting is not None:
        report |= summary.drafting.to_dict()
    return report | {"notes": summary.notes, "versions": {"outrider": __version__}}


def show_card(console: Console, summary: Summary, report: Mapping[str, Any]) -> None:
    """The block that users of vLLM know."""
    lines = [*_totals(summary, report), *_latencies(summary), *_drafting(summary.drafting)]
    for line in [f"{' Serving Benchmark Result ':=^{WIDTH}}", *lines, "=" * WIDTH, *summary.notes]:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _totals(summary: Summary, report: Mapping[str, Any]) -> list[str]:
    rows = [
        ("Successful requests:", len(summary.good)),
        ("Failed requests:", report["failed"]),
        *((f"  {kind}:", count) for kind, count in summary.errors.items()),
        ("Maximum request concurrency:", report["max_concurrency"]),
        ("Request rate configured (RPS):", report["request_rate"]),
        ("Benchmark duration (s):", summary.seconds),
        ("Total input tokens:", summary.num_prompt_tokens),
        ("Total generated tokens:", summary.num_tokens),
        ("Request throughput (req/s):", report["request_throughput"]),
        ("Request goodput (req/s):", report.get("request_goodput")),
        ("Output token throughput (tok/s):", report["output_throughput"]),
        ("Total token throughput (tok/s):", report["total_token_throughput"]),
    ]
    return [_row(label, value) for label, value in rows if value is not None]


def _latencies(summary: Summary) -> list[str]:
    lines = []
    for name, figures in summary.figures.items():
        short, title = TITLES[name]
        lines.append(f"{title:-^{WIDTH}}")
        words = {"mean": "Mean", "median": "Median", "p90": "P90", "p99": "P99"}
        lines += [_row(f"{words[which]} {short} (ms):", value) for which, value in vars(figures).items()]
    return lines


def _drafting(drafting: DraftingFigures | None) -> list[str]:
    if drafting is None:
        return []
    rows = [
        _row("Acceptance rate (%):", 100 * drafting.acceptance_rate),
        _row("Acceptance length:", drafting.accept_length),
        _row("Drafts:", drafting.num_drafts),
        _row("Draft tokens:", drafting.num_draft_tokens),
        _row("Accepted tokens:", drafting.num_accepted),
        "Per-position acceptance (%):" if drafting.accepted_at else "",
    ]
    rates = enumerate(drafting.acceptance_per_position)
    rows += [_row(f"  Position {place}:", 100 * rate) for place, rate in rates]
    return [f"{'Speculative Decoding':-^{WIDTH}}", *filter(None, rows)]


def _row(label: str, value: float) -> str:
    return f"{label:<40} {value:<10.2f}" if isinstance(value, float) else f"{label:<40} {value:<10}"
