"""`outrider list` and `outrider pull`: what is on this machine, told apart by its config.json. And that a shell can
complete what is typed."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from outrider.cli import app
from outrider.local_models import local_models

CONFIGS: dict[str, Any] = {
    "org/a-target": {"architectures": ["LlamaForCausalLM"], "model_type": "llama"},
    "org/b-head": {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 100, "model_type": "llama"},
    "org/c-unknown": {"architectures": ["WhoKnows"]},
    "org/d-list": [1],
}


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """As the hub's client lays it out."""
    for name, config in CONFIGS.items():
        put(tmp_path, name, "config.json", json.dumps(config))
    put(tmp_path, "org/e-gguf", "small.Q4_1.gguf", "GGUF")
    return tmp_path


def put(cache: Path, name: str, file: str, text: str) -> None:
    repository = cache / f"models--{name.replace('/', '--')}"
    snapshot = repository / "snapshots" / "0123abc"
    for folder in (repository / "refs", repository / "blobs", snapshot):
        folder.mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text("0123abc")
    (repository / "blobs" / "1").write_text(text)
    (snapshot / file).symlink_to(repository / "blobs" / "1")


def test_models_are_told_apart(cache: Path) -> None:
    found = {model.name: model for model in local_models(cache)}
    kinds = {name: (model.kind, model.what) for name, model in found.items()}
    assert kinds == {
        "embedded target": ("target", "LlamaForCausalLM"),
        "embedded drafter": ("drafter", "eagle3"),
        "embedded dflash": ("drafter", "dflash"),
        "org/a-target": ("target", "LlamaForCausalLM"),
        "org/b-head": ("drafter", "eagle3"),
        "org/c-unknown": ("not supported", "WhoKnows"),
        "org/d-list": ("not supported", "config.json is no object"),
        "org/e-gguf": ("target", "small.Q4_1.gguf"),
    }
    assert found["embedded target"].num_bytes > 10**7
    assert found["org/e-gguf"].num_bytes == 4
    assert list(found)[:3] == ["embedded target", "embedded drafter", "embedded dflash"]


def test_the_commands(cache: Path, tmp_path: Path) -> None:
    listed = CliRunner().invoke(app, ["list", "--download-dir", str(cache)], env={"COLUMNS": "80"})
    assert listed.exit_code == 0, listed.output
    assert [line.split()[:2] for line in listed.stdout.splitlines()[4:6]] == [
        ["org/a-target", "target"],
        ["org/b-head", "drafter"],
    ]
    models = json.loads(CliRunner().invoke(app, ["list", "--json", "--download-dir", str(tmp_path / "none")]).stdout)
    assert [model["name"] for model in models] == ["embedded target", "embedded drafter", "embedded dflash"]
    here = CliRunner().invoke(app, ["pull", models[0]["path"]])
    assert here.stdout.strip() == models[0]["path"]
    nowhere = CliRunner().invoke(app, ["pull", "no such name"])
    assert nowhere.exit_code == 2
    assert "does not exist" in nowhere.stderr


def test_a_shell_completes_commands_and_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION", "1")  # tests may run below any shell
    shown = CliRunner().invoke(app, ["--show-completion", "bash"], prog_name="outrider")
    assert shown.exit_code == 0, shown.output
    assert "_OUTRIDER_COMPLETE=complete_bash" in shown.stdout
    for words, wanted in (
        ("outrider ge", "generate"),
        ("outrider bench tr", "traffic"),
        ("outrider chat --sy", "--system"),
    ):
        asked = {"_OUTRIDER_COMPLETE": "complete_bash", "COMP_WORDS": words, "COMP_CWORD": str(words.count(" "))}
        answer = CliRunner().invoke(app, [], prog_name="outrider", env=os.environ | asked)
        assert wanted in answer.stdout.split(), words
