"""What the drafters of the embedded default learn from: many prompts, none of which they are measured with."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
drafters: Any = pytest.importorskip("default_model.drafters")
measure: Any = pytest.importorskip("default_model.measure")


def test_prompts_of_the_default() -> None:
    count = 4000
    found, again = (list(itertools.islice(drafters.prompts(3), count)) for _ in range(2))
    assert found == again != list(itertools.islice(drafters.prompts(4), count))
    assert len({json.dumps(entry) for entry in found}) > 0.85 * count
    turns = [entry["turns"] for entry in found if "turns" in entry]
    assert not {text for each in turns for text in each} & set(measure.CHAT_PROMPTS)
    assert 0.01 < sum(len(each) > 2 for each in turns) / count < 0.05
    assert 0.4 < sum(set(entry) == {"text"} for entry in found) / count < 0.5
    assert all(text.strip() for entry in found for text in entry.get("turns", [entry.get("text")]))


def test_prompts_that_are_kept_apart(tmp_path: Path) -> None:
    held_out = drafters.write_prompts(tmp_path / "held-out", 50, 1)
    learnt = drafters.write_prompts(tmp_path / "prompts", 400, 1, held_out)  # the same seed: all would be among them
    assert len(held_out) == 50
    assert len(learnt) == 400
    assert not set(learnt) & set(held_out)
    assert (tmp_path / "prompts").read_text().splitlines() == learnt
