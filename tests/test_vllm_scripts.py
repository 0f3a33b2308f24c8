"""Scripts written for vLLM run with the import swapped: see vllm_scripts/README.md."""

import re
import runpy
import sys
from pathlib import Path

import pytest

from outrider.pair import DEFAULT_DIRECTORY

SCRIPTS = Path(__file__).parent / "vllm_scripts"
TARGET, DRAFTER = str(DEFAULT_DIRECTORY / "target"), str(DEFAULT_DIRECTORY / "drafter")
MODULES = {  # where vLLM has a name, and where we have it
    "vllm": "outrider",
    "vllm.inputs": "outrider.inputs",
    "vllm.sampling_params": "outrider.sampling_params",
    "vllm.engine.arg_utils": "outrider",
    "vllm.v1.engine.async_llm": "outrider",
    "vllm.v1.metrics.reader": "outrider.metrics",
}
RUNS = {
    "basic": [TARGET],
    "chat": [TARGET],
    "structured_outputs": [TARGET],
    "async_streaming": [TARGET],
    "spec_decode": ["--model-dir", TARGET, "--eagle-dir", DRAFTER],
    "spec_decode ngram": ["--model-dir", TARGET, "--method", "ngram"],
}


def swapped(source: str) -> str:
    return re.sub(r"^from (vllm[\w.]*) import", lambda found: f"from {MODULES[found[1]]} import", source, flags=re.M)


@pytest.mark.parametrize("name", RUNS)
def test_a_script_for_vllm_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.write_text(swapped((SCRIPTS / f"{name.split()[0]}.py").read_text()))
    assert "vllm" not in re.findall(r"^(?:from|import) (\w+)", script.read_text(), flags=re.M)
    monkeypatch.setattr(sys, "argv", [str(script), *RUNS[name]])
    runpy.run_path(str(script), run_name="__main__")
    assert capsys.readouterr().out


def test_every_script_is_run() -> None:
    assert {path.stem for path in SCRIPTS.glob("*.py")} == {name.split()[0] for name in RUNS}
