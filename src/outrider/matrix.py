"""The support matrix: every registered target by every registered drafter. A pair works because both keep to their
protocol, and the conformance tests run each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import outrider.drafters
import outrider.models  # noqa: F401  (both register what they have)
from outrider.drafters.base import drafters
from outrider.models.base import targets


@dataclass(frozen=True)
class Cell:
    target: str  # the architecture's name in config.json
    drafter: str  # the method's name in speculative_config
    supported: bool


def support_matrix() -> list[Cell]:
    return [
        Cell(target, method, drafters[method].supports(targets[target]))
        for target in sorted(targets)
        for method in sorted(drafters)
    ]


def as_json(cells: list[Cell]) -> dict[str, Any]:
    """{"targets": [...], "drafters": [...], "matrix": {target: {drafter: supported}}}"""
    rows: dict[str, dict[str, bool]] = {}
    for cell in cells:
        rows.setdefault(cell.target, {})[cell.drafter] = cell.supported
    return {"targets": sorted(rows), "drafters": sorted(drafters), "matrix": rows}
