"""Served accept length: what a drafter brings in the engine that serves it. The metric, the curve and the stop rule."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider.llm import LLM
from outrider.outputs import total_speculation
from outrider.sampling_params import SamplingParams

TEMPERATURES = (0.0, 0.8)


@dataclass(frozen=True)
class Served:
    """How drafting went on prompts that nothing was learnt from, by temperature."""

    by_temperature: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    @property
    def accept_length(self) -> float:
        """The mean over the temperatures: what a run is judged by."""
        return sum(each["accept_length"] for each in self.by_temperature.values()) / len(self.by_temperature)

    def report(self) -> dict[str, Any]:
        return {"accept_length": round(self.accept_length, 4), "by_temperature": self.by_temperature}


def served(llm: LLM, prompts: Sequence[Sequence[int]], max_tokens: int) -> Served:
    """The engine answers all prompts, with the drafter that it has now."""
    found = {}
    for temperature in TEMPERATURES:
        llm.reset_prefix_cache()  # what an earlier drafter has left there is not this one's
        params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=1)
        total = total_speculation(llm.generate([list(prompt) for prompt in prompts], params))
        found[f"{temperature:g}"] = {
            "accept_length": round(total.accept_length, 4),
            "acceptance_per_position": [round(share, 4) for share in total.acceptance_per_position],
            "rounds": total.rounds,
        }
    return Served(found)
