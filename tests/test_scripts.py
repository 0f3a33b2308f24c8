"""Scripts are run by hand, some of them seldom: what they take from the package must still be there."""

from __future__ import annotations

import ast
import importlib
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[1] / "scripts"
SCRIPTS = sorted([*FOLDER.glob("*.py"), *FOLDER.glob("h200/*.py")])


def names_taken(path: Path) -> list[tuple[str, str]]:
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "outrider":
            found += [(str(node.module), alias.name) for alias in node.names]
    return found


def is_there(module: str, name: str) -> bool:
    found = importlib.import_module(module)
    return hasattr(found, name) or (hasattr(found, "__path__") and find_spec(f"{module}.{name}") is not None)


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.name)
def test_names_that_a_script_takes_exist(path: Path) -> None:
    missing = [f"{module}.{name}" for module, name in names_taken(path) if not is_there(module, name)]
    assert not missing


def test_a_name_that_is_gone_is_found_out() -> None:
    assert not is_there("outrider.bench.load.serve_load", "Outcome")
