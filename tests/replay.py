"""Recorded rounds where there are no CUDA graphs: a replay runs a part of a round again, on the same memory."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from outrider.engine import engine as engines
from outrider.engine.graphs import GraphKey, Graphs, Recording


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


def record(graphs: Graphs, key: GraphKey) -> Recording:
    graphs._clear(key.shape)
    outcomes = graphs._run(key)
    return Recording(Again(graphs, key, outcomes), outcomes, graphs._runner.options.generation)  # type: ignore[arg-type]


def to_host(table: torch.Tensor) -> tuple[torch.Tensor, None]:
    return table.clone(), None  # the next replay writes over it


def record_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines record rounds wherever they are."""
    monkeypatch.setattr(engines, "records", lambda config: not config.enforce_eager)
    monkeypatch.setattr(engines, "to_host", to_host)
    monkeypatch.setattr(Graphs, "_record", record)
