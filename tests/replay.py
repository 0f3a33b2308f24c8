"""Recorded rounds where there are no CUDA graphs: a replay runs the round again, on the same seats."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from outrider.engine import engine as engines
from outrider.engine.graphs import Graphs, Recording
from outrider.engine.seats import Kind, Seats


@dataclass
class Again:
    """Instead of a CUDA graph."""

    graphs: Graphs
    seats: Seats
    kind: Kind
    outcome: tuple[torch.Tensor, torch.Tensor]

    def replay(self) -> None:
        for old, new in zip(self.outcome, self.graphs._round(self.seats, self.kind), strict=True):
            old.copy_(new)


def record(graphs: Graphs, kind: Kind) -> Recording:
    seats = Seats.of(kind, graphs._nobody, graphs._runner.vocab_size, graphs._runner.device)
    outcome = graphs._round(seats, kind)
    return Recording(Again(graphs, seats, kind, outcome), seats, *outcome)  # type: ignore[arg-type]


class Landed:
    def record(self) -> None: ...

    def synchronize(self) -> None: ...


def record_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines record rounds wherever they are."""
    monkeypatch.setattr(engines, "records", lambda config: not config.enforce_eager)
    monkeypatch.setattr(Graphs, "_record", record)
    monkeypatch.setattr(torch.cuda, "Event", Landed)
