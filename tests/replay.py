"""Recorded rounds where there are no CUDA graphs: a replay runs the round again, on the same seats."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from outrider.engine import engine as engines
from outrider.engine.graphs import GraphKey, Graphs, Recording, Result


@dataclass
class Again:
    """Instead of a CUDA graph."""

    graphs: Graphs
    seats: torch.Tensor
    key: GraphKey
    result: Result

    def replay(self) -> None:
        new = self.graphs._round(self.seats, self.key)
        self.result.outcomes.copy_(new.outcomes)
        self.result.logits.copy_(new.logits)


def record(graphs: Graphs, key: GraphKey) -> Recording:
    seats = graphs._empty_seats(key.shape)
    result = graphs._round(seats, key)
    again = Again(graphs, seats, key, result)
    return Recording(again, seats, result, graphs._runner.options.generation)  # type: ignore[arg-type]


def to_host(table: torch.Tensor) -> tuple[torch.Tensor, None]:
    return table.clone(), None  # the next replay writes over it


def record_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines record rounds wherever they are."""
    monkeypatch.setattr(engines, "records", lambda config: not config.enforce_eager)
    monkeypatch.setattr(engines, "to_host", to_host)
    monkeypatch.setattr(Graphs, "_record", record)
