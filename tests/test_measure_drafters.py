"""scripts/measure_drafters.py on the embedded pair: what it counts, what it writes, what it refuses."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from outrider.pair import DEFAULT_DIRECTORY

sys.path.insert(0, str(Path(__file__).parents[1] / "scripts"))
measure_drafters: Any = pytest.importorskip("measure_drafters")


def test_drafters_are_measured_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = tmp_path / "animals.jsonl"
    prompts.write_text(json.dumps({"prompt": "Tell a story about a cat."}) + "\n")
    pair = [str(DEFAULT_DIRECTORY / "target"), str(prompts), "--draft", f"own={DEFAULT_DIRECTORY / 'drafter'}"]
    lengths = ["-k", "3", "--max-tokens", "24", "--speed-tokens", "8", "--limit", "2", "--runs", "1"]
    few = [*lengths, "--batches", "1,2", "--speed-batches", "1", "--device", "cpu"]
    given = [*pair, "--out", str(tmp_path / "out"), *few, "--against", ""]
    for part in ("accept", "speed"):  # two runs complete each other's report
        monkeypatch.setattr(sys, "argv", ["measure_drafters", *given, "--only", part])
        measure_drafters.main()
    report = json.loads((tmp_path / "out" / "drafters.json").read_text())
    assert report["accept"]["own"]["animals"]["0"]["accept_length"] > 1.5
    assert {batch: set(sides) for batch, sides in report["speed"].items()} == {
        "1": {"plain", "own"},
        "2": {"plain", "own"},
    }
    own = report["speed"]["2"]["own"]
    assert own["same_answers"] == "2 of 2"
    assert own["efficiency"] == pytest.approx(own["times_plain"]["median"] / own["accept_length"], abs=0.01)
    table = (tmp_path / "out" / "drafters.md").read_text()
    assert "| | animals, T = 0 | animals, T = 1 |" in table
    assert "| batch | plain | own |" in table
    assert (tmp_path / "out" / "accept.svg").read_text().count("<polyline") == 1
    assert (tmp_path / "out" / "speed.svg").read_text().count("<polyline") == 2
    for wrong in (["--only", "nothing"], ["--against", "nobody"]):
        with pytest.raises(SystemExit):
            measure_drafters.parsed([*given, *wrong])
