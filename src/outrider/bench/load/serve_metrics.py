"""How drafting went, from a server's Prometheus counters (vLLM's names) or from the answers themselves."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from outrider.sampling_params import accept_length

# vllm:..., and whoever took over the names with a prefix of their own or none
_LINE = re.compile(
    r"^(?:\w+:)?spec_decode_num_(drafts|draft_tokens|accepted_tokens|accepted_tokens_per_pos)_total(\{.*\})? (\S+)"
)
_POSITION = re.compile(r'position="(\d+)"')


@dataclass(frozen=True)
class DraftingFigures:
    num_drafts: int  # rounds that had one
    num_draft_tokens: int
    num_accepted: int
    accepted_at: tuple[int, ...]  # by place in the draft
    source: str

    @property
    def accept_length(self) -> float:
        """Of the rounds that had a draft. Counters do not say where answers end, and vLLM counts the whole round."""
        return accept_length(self.num_drafts, self.num_accepted)

    @property
    def acceptance_rate(self) -> float:
        return self.num_accepted / self.num_draft_tokens if self.num_draft_tokens else 0.0

    @property
    def acceptance_per_position(self) -> list[float]:
        """The share of all rounds that accepted a draft up to each position, as vLLM counts."""
        return [count / self.num_drafts for count in self.accepted_at]

    def to_dict(self) -> dict[str, Any]:
        return {
            "spec_decode_acceptance_rate": self.acceptance_rate * 100,
            "spec_decode_acceptance_length": self.accept_length,
            "spec_decode_num_drafts": self.num_drafts,
            "spec_decode_draft_tokens": self.num_draft_tokens,
            "spec_decode_accepted_tokens": self.num_accepted,
            "spec_decode_per_position_acceptance_rates": self.acceptance_per_position,
            "spec_decode_source": self.source,
        }


def counters_in(text: str) -> dict[str, float]:
    """Sums over models and engines; by position where there are positions."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = _LINE.match(line)
        if match is None:
            continue
        name, labels, value = match.groups()
        position = _POSITION.search(labels or "")
        name += f"/{position.group(1)}" if position is not None else ""
        found[name] = found.get(name, 0.0) + float(value)
    return found


def drafting_from(before: str, after: str) -> DraftingFigures | None:
    """What happened between two readings of /metrics; None where nothing was drafted or counted."""
    old, new = counters_in(before), counters_in(after)
    moved = {name: round(value - old.get(name, 0.0)) for name, value in new.items()}
    if not moved.get("drafts"):
        return None
    prefix = "accepted_tokens_per_pos/"
    places = [int(name.removeprefix(prefix)) for name in moved if name.startswith(prefix)]
    accepted_at = tuple(moved.get(f"{prefix}{place}", 0) for place in range(max(places, default=-1) + 1))
    return DraftingFigures(
        num_drafts=moved["drafts"],
        num_draft_tokens=moved.get("draft_tokens", 0),
        num_accepted=moved.get("accepted_tokens", 0),
        accepted_at=accepted_at,
        source="the server's counters",
    )


def drafting_of(answers: Iterable[dict[str, Any] | None]) -> DraftingFigures | None:
    """The sum over answers that say how their drafting went."""
    made = [answer for answer in answers if answer is not None]
    num_drafts = sum(answer["num_spec_steps"] for answer in made)
    if not num_drafts:
        return None
    histogram = [0] * max(len(answer["acceptance_histogram"]) for answer in made)
    for answer in made:
        for accepted, count in enumerate(answer["acceptance_histogram"]):
            histogram[accepted] += count
    at_least = list(accumulate(reversed(histogram)))[::-1]  # rounds that accepted so many or more
    return DraftingFigures(
        num_drafts=num_drafts,
        num_draft_tokens=sum(answer["num_draft_tokens"] for answer in made),
        num_accepted=sum(answer["num_accepted_draft_tokens"] for answer in made),
        accepted_at=tuple(at_least[1:]),
        source="the answers",
    )
