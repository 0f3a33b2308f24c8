"""Recorded rounds where there are no CUDA graphs: a replay runs a part of a round again, on the same memory."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.config import EngineConfig
from outrider.engine.graphs import GraphKey, Graphs, Recording


@dataclass
class Again:
    """Instead of a CUDA graph."""

    graphs: Graphs
    key: GraphKey

    def replay(self) -> None:
        self.graphs._run(self.key)


class Replays(Graphs):
    def _record(self, key: GraphKey) -> Recording:
        self._clear(key.shape)
        outcomes = self._run_empty(key)
        return Recording(Again(self, key), outcomes, self._runner.options.generation)  # type: ignore[arg-type]


def recorder_of(config: EngineConfig) -> type[Graphs] | None:
    """Rounds are recorded wherever they are."""
    return Replays if not config.enforce_eager else None
