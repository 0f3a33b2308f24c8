"""`outrider bench depth`: plain, every depth that is the same for all, and drafting as much as is worth it, in one run,
with made-up acceptance that may differ from request to request."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider import __version__
from outrider.bench.interleave import Spread
from outrider.bench.load.serve_client import Asking
from outrider.bench.load.serve_load import Load, LoadOutcome
from outrider.bench.load.traffic import LevelRuns, Note, TrafficPlan, output_rate
from outrider.bench.load.traffic_opening import engine_sides, random_sides
from outrider.bench.load.traffic_sides import EngineSide, TrafficSide
from outrider.bench.prompts import PromptText
from outrider.config import EngineConfig
from outrider.engine.policy import DepthPolicy, FixedDepth

PLAIN, ADAPTIVE = "plain", "adaptive"


@dataclass
class PolicySide:
    """An engine that drafts as a policy says, which learns from run to run."""

    name: str
    side: EngineSide
    policy: DepthPolicy

    def run(self, prompts: Sequence[PromptText], load: Load) -> LoadOutcome:
        with self.side.engine.drafting_with(self.policy):
            return self.side.run(prompts, load)


def open_sides(
    config: EngineConfig, shape: str | None, asking: Asking, opened: ExitStack, note: Note
) -> list[TrafficSide]:
    """Two engines: a plain one, and one with a drafter, which every other side has in its turn."""
    speculative = config.speculative
    if speculative is None:
        raise ValueError("there is nothing to compare without a drafter: name one with --draft")
    if shape is not None:
        plain, drafting = random_sides(config, shape, asking, opened, note)
    else:
        plain, drafting = engine_sides(config, asking, opened, note)
    assert isinstance(plain, EngineSide)
    assert isinstance(drafting, EngineSide)
    fixed = range(1, drafting.engine.lookahead + 1)
    sides = [PolicySide(f"K = {depth}", drafting, FixedDepth(depth)) for depth in fixed]
    return [replace(plain, name=PLAIN), *sides, PolicySide(ADAPTIVE, drafting, drafting.engine.drafting.policy)]


def to_dict(
    config: EngineConfig, plan: TrafficPlan, sides: Sequence[TrafficSide], found: Sequence[LevelRuns]
) -> dict[str, Any]:
    assert config.speculative is not None
    return {
        "benchmark": "bench depth",
        "model": str(config.model),
        "method": config.speculative.method,
        "acceptance": "synthetic: not real text",
        "acceptance_rates": list(config.speculative.synthetic_acceptance_rates or ()),
        "prompt_tokens": plan.prompt_len,
        "answer_tokens": plan.answer_len,
        "device": torch.cuda.get_device_name() if config.torch_device.type == "cuda" else "cpu",
        "num_runs": plan.num_runs,
        "levels": [_level(each, sides) for each in found],
        "versions": {"outrider": __version__, "torch": torch.__version__},
    }


def _level(found: LevelRuns, sides: Sequence[TrafficSide]) -> dict[str, Any]:
    rates = {side.name: [output_rate(run) for run in runs] for side, runs in zip(sides, found.runs, strict=True)}
    medians = {name: statistics.median(values) for name, values in rates.items()}
    best = max((name for name in medians if name not in (PLAIN, ADAPTIVE)), key=lambda name: medians[name])
    return {
        "level": found.level.name,
        "clients": found.level.clients,
        "sides": {
            name: {
                "tokens_per_second": Spread(tuple(values)).to_dict(),
                "times_plain": Spread(_ratios(values, rates[PLAIN])).to_dict(),
            }
            for name, values in rates.items()
        },
        "best_fixed": best,
        "adaptive_times_best_fixed": Spread(_ratios(rates[ADAPTIVE], rates[best])).to_dict(),
    }


def _ratios(values: Sequence[float], others: Sequence[float]) -> tuple[float, ...]:
    return tuple(value / other for value, other in zip(values, others, strict=True))


def show_card(console: Console, report: dict[str, Any]) -> None:
    said = ", ".join(f"{rate:g}" for rate in report["acceptance_rates"])
    console.print(Text(f"bench depth: {report['model']}, {report['method']}, on {report['device']}", "bold"))
    console.print(Text(f"acceptance of a draft token, by request: {said}; made up: this is not real text", "yellow"))
    table = Table(box=None, padding=(0, 1, 0, 0))
    names = list(report["levels"][0]["sides"])
    for title in ("level", *names, "x plain", "x best K"):
        table.add_column(title, no_wrap=True, justify="left" if title == "level" else "right")
    for level in report["levels"]:
        rates = [f"{level['sides'][name]['tokens_per_second']['median']:.0f}" for name in names]
        plain = level["sides"][ADAPTIVE]["times_plain"]["median"]
        best = level["adaptive_times_best_fixed"]["median"]
        table.add_row(level["level"], *rates, f"{plain:.2f}", f"{best:.2f} ({level['best_fixed']})")
    console.print(table)
