"""Recorded rounds where there are no CUDA graphs: a replay runs a part of a round again, on the same memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from outrider.config import EngineConfig
from outrider.engine.graphs import GraphKey, Graphs, RecordedRound, Recording
from outrider.engine.request import Work
from outrider.types import RoundShape


@dataclass
class Again:
    """Instead of a CUDA graph."""

    graphs: Graphs
    key: GraphKey
    outcomes: torch.Tensor | None

    def replay(self) -> None:
        new = self.graphs._run(self.key)
        if self.outcomes is not None:
            assert new is not None
            self.outcomes.copy_(new)


class ReplayedRound(RecordedRound):
    def draft(self) -> torch.Tensor:
        return super().draft().clone()  # the next replay writes over it


class Replays(Graphs):
    def round(self, plan: Sequence[Work], shape: RoundShape) -> RecordedRound:
        made = super().round(plan, shape)
        return ReplayedRound(made._graphs, made._plan, made._shape, made._keys)

    def _record(self, key: GraphKey) -> Recording:
        self._clear(key.shape)
        outcomes = self._run(key)
        return Recording(Again(self, key, outcomes), outcomes, self._runner.options.generation)  # type: ignore[arg-type]


def recorder_of(config: EngineConfig) -> type[Graphs] | None:
    """Rounds are recorded wherever they are."""
    return Replays if not config.enforce_eager else None
