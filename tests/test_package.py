"""What people install: a wheel that holds all of it, and words that help where an extra is missing."""

import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from outrider import __version__, vision
from outrider.extras import extra_missing
from outrider.grammar import compiler as grammar_compiler

ROOT = Path(__file__).parent.parent
SOURCE = ROOT / "src" / "outrider"
DATA = ("py.typed", "kernels/native.c", "default/target/config.json", "server/playground/index.html")
LEGAL = ("LICENSE", "NOTICE")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built from a copy, with the setuptools that is installed: nothing is fetched."""
    copy, made = tmp_path_factory.mktemp("copy"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", *LEGAL):
        shutil.copy(ROOT / name, copy)
    leave_out = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", copy / "src", ignore=leave_out)
    build = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", build, str(made)], cwd=copy, check=True, capture_output=True)
    (found,) = made.glob("*.whl")
    return found


def test_the_wheel_holds_every_file(wheel: Path) -> None:
    files = [path for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    wanted = {f"outrider/{path.relative_to(SOURCE).as_posix()}" for path in files}
    assert wanted >= {f"outrider/{name}" for name in DATA}
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if name.startswith("outrider/")}
        (about,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(about).decode()
    assert held == wanted
    assert all(f"Provides-Extra: {extra}\n" in metadata for extra in ("serve", "vision", "train", "docs", "test"))


def test_the_wheel_says_whose_it_is(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (about,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = archive.read(about).decode()
        folder = about.removesuffix("METADATA")
        for name in LEGAL:
            assert archive.read(f"{folder}licenses/{name}") == (ROOT / name).read_bytes()
    assert f"\nVersion: {__version__}\n" in metadata
    assert "\nLicense-Expression: Apache-2.0\n" in metadata
    assert "\nAuthor: Outrider authors\n" in metadata


def test_there_is_one_version_number() -> None:
    """It is written in the package; what installs it reads it there."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert "version" not in project["project"]
    newest = re.search(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest is not None
    assert newest[1] == __version__


def test_the_embedded_model_runs_from_the_wheel(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    script = (
        "import outrider; from outrider import LLM, SamplingParams; print(outrider.__file__); "
        "print(LLM(max_model_len=32).generate('Once', SamplingParams(max_tokens=4))[0].outputs[0].token_ids)"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    said = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, check=True, capture_output=True, text=True
    ).stdout.splitlines()
    assert Path(said[0]).is_relative_to(tmp_path)
    assert len(said[1].split(",")) == 4


def test_a_missing_or_broken_module_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)  # as if it were not installed
    with pytest.raises(
        ValueError, match=r"guided needs the extra serve, and xgrammar is not .*pip install '\.\[serve\]'"
    ):
        grammar_compiler.import_xgrammar()
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(
        ValueError, match=r"an image needs the extra vision, and PIL is not installed: pip install '\.\[vi"
    ):
        vision.open_pictures([b""])
    monkeypatch.delitem(sys.modules, "xgrammar")
    (tmp_path / "xgrammar.py").write_text("from json import nothing_of_that_name")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match=r"json is broken \(cannot import name 'nothing_of_that_name'"):
        grammar_compiler.import_xgrammar()


def test_a_fault_of_our_own_is_no_missing_extra() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"outrider\.nowhere"):
        extra_missing("it", "serve", ModuleNotFoundError("No module named 'outrider.nowhere'", name="outrider.nowhere"))


def test_the_readme_installs_the_torch_that_the_tests_have() -> None:
    (pinned,) = (line for line in (ROOT / "constraints.txt").read_text().splitlines() if line.startswith("torch=="))
    assert f"pip install {pinned} " in (ROOT / "README.md").read_text()
