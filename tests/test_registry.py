"""Entries that installed packages bring: a distribution made up for the test is found by the command line."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider.pair import DEFAULT_DIRECTORY
from outrider.registry import Registry

ROOT = Path(__file__).parent.parent
MODELS = """
from outrider.models.llama import Llama

class Alpaca(Llama):
    pass
"""


def install(directory: Path, modules: dict[str, str], points: str) -> None:
    """As pip would, but for what nobody reads."""
    for name, source in modules.items():
        (directory / f"{name}.py").write_text(source)
    about = directory / "toys-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: toys\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(points)


def outrider(*arguments: str, path: Path) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(path), str(ROOT / "src")]), "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-m", "outrider", *arguments], capture_output=True, text=True, env=environment, timeout=120
    )


def alpaca(directory: Path) -> Path:
    """The embedded target under another architecture's name."""
    directory.mkdir()
    for file in (DEFAULT_DIRECTORY / "target").iterdir():
        if file.name != "config.json":
            (directory / file.name).symlink_to(file)
    config = json.loads((DEFAULT_DIRECTORY / "target" / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"architectures": ["AlpacaForCausalLM"]}))
    return directory


def test_the_command_line_finds_what_packages_bring(tmp_path: Path) -> None:
    echo = (ROOT / "examples" / "add_a_drafter.py").read_text()
    points = (
        "[outrider.drafters]\necho = toy_echo:Echo\nlost = toy_nowhere:Lost\n"
        "[outrider.targets]\nAlpacaForCausalLM = toy_models:Alpaca\n"
    )
    site = tmp_path / "site"
    site.mkdir()
    install(site, {"toy_echo": echo, "toy_models": MODELS}, points)
    matrix = outrider("matrix", "--json", path=site)
    assert json.loads(matrix.stdout)["matrix"]["AlpacaForCausalLM"]["echo"] is True
    assert "lost = toy_nowhere:Lost of package toys: ModuleNotFoundError" in matrix.stderr
    named = ("--model", str(alpaca(tmp_path / "alpaca")), "--draft", "echo", "--force", "-n", "24", "--json")
    made = outrider("generate", "a b c a b c a b", *named, path=site)
    assert made.returncode == 0, made.stderr
    report = json.loads(made.stdout)
    assert report["method"] == "echo"
    assert report["rounds"] > 0
    missing = outrider("generate", "a", "--speculative-config", '{"method": "lost"}', path=site)
    assert missing.returncode == 2
    assert "'lost' could not be loaded" in missing.stderr


def test_entry_points_are_read_at_the_first_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not before: a package that is being imported may import the registry."""
    source = "from test_registry import REGISTRY\n@REGISTRY.register('one')\nclass One: ...\nclass Two: ...\n"
    install(tmp_path, {"toys_of_two": source}, "[toys]\none = toys_of_two:One\ntwo = toys_of_two:Two\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert "toys_of_two" not in sys.modules
    assert list(REGISTRY) == ["one", "two"]
    assert REGISTRY["two"].__module__ == "toys_of_two"


def test_a_name_that_is_taken_and_what_is_no_class_are_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry: Registry[type] = Registry("toy", "more_toys")
    registry.register("bear")(int)
    install(tmp_path, {"toy_bears": "class Bear: ...\nnumber = 1\n"},
            "[more_toys]\nbear = toy_bears:Bear\nnumber = toy_bears:number\n")  # fmt: skip
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.warns(RuntimeWarning, match="two toys are called 'bear'|must name a class") as warned:
        assert registry["bear"] is int
    assert len(warned) == 2
    with pytest.raises(ValueError, match=r"'number' could not be loaded, .*must name a class"):
        registry["number"]


REGISTRY: Registry[type] = Registry("toy", "toys")
