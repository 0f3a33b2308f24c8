"""Imports point down only, and the core needs nothing it should not."""

import ast
import graphlib
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent.parent / "src" / "outrider"
# from the ground up; a module may import its own layer and those below
LAYERS = [
    {"startup", "commands", "overload", "lanes", "processes", "template_worker"},
    {"compatibility"},
    {"types", "config", "extras", "registry", "sampling_params", "outputs", "threads", "host_memory"},
    {"template", "chat_template", "tokenizer", "detokenizer", "text_stream", "inputs", "prompts", "generation_config"},
    {"grammar"},
    {"kernels"},
    {"layers"},
    {"models"},
    {"drafters"},
    {"checkpoints"},
    {"engine"},
    {"vision", "agreement", "hub", "metrics", "offline"},
    {"preflight", "tokenizer_choice"},
    {"pair"},
    {"llm_arguments", "request_maker"},
    {"llm", "matrix", "local_models", "options", "worker"},
    {"console", "conversation", "measure"},
    {"certify", "bench", "doctor", "server", "training", "inventory"},
    {"async_llm"},
    {"cli"},
    {"__main__", "__init__"},
]
FORBIDDEN = {"pickle", "dill", "cloudpickle", "marshal", "shelve", "transformers"}


def layer(name: str) -> int:
    for number, names in enumerate(LAYERS):
        if name in names:
            return number
    raise AssertionError(f"{name} has no place in the import order: add it to tests/test_imports.py")


def imports(path: Path) -> list[tuple[str, bool]]:
    """(module, at the top of the file?)"""
    tree = ast.parse(path.read_text())
    top = set(map(id, tree.body))
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [(alias.name, id(node) in top) for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.append((node.module, id(node) in top))
    return found


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_point_down(path: Path) -> None:
    own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    for module, _ in imports(path):
        parts = module.split(".")
        if parts[0] == "outrider" and len(parts) > 1:
            assert layer(parts[1]) <= layer(own), f"{own} must not import {module}"


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_nothing_forbidden_is_imported(path: Path) -> None:
    for module, at_top in imports(path):
        name = module.split(".")[0]
        if name == "transformers" and not at_top and ("bench" in path.parts or path.name == "vision.py"):
            continue  # a peer to race against, or a vision tower, where it is installed
        assert name not in FORBIDDEN, f"{path.name} imports {module}"
    text = path.read_text()
    for call in (r"torch\.load\(", r"(?<![\w.])eval\(", r"(?<![\w.])exec\("):
        assert re.search(call, text) is None, f"{path.name} calls {call}"


def test_targets_know_nothing_of_speculation() -> None:
    words = ("draft", "specul", "eagle", "verdict")
    for path in (SOURCE / "models").glob("*.py"):
        if path.name != "base.py":
            text = path.read_text().lower()
            assert not any(word in text for word in words), f"{path.name} speaks of speculation"


def test_the_engine_names_no_model_and_no_method() -> None:
    names = [path.stem for folder in ("models", "drafters") for path in (SOURCE / folder).glob("*.py")]
    names = [name for name in names if name not in ("__init__", "base", "draft_model")]
    for path in [*(SOURCE / "engine").glob("*.py"), *(SOURCE / "checkpoints").glob("*.py")]:
        for module, _ in imports(path):
            assert module.split(".")[-1] not in names, f"{path.name} imports {module}"


def test_no_two_modules_wait_for_each_other() -> None:
    """So that any of them can be the first that somebody imports: a plugin begins with outrider.models.base."""
    files = {path: path.relative_to(SOURCE.parent).with_suffix("").parts for path in SOURCE.rglob("*.py")}
    names = {path: ".".join(parts).removesuffix(".__init__") for path, parts in files.items()}
    modules, needed = set(names.values()), {}
    for path, name in names.items():
        found = set()
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                found |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                inside = {f"{node.module}.{alias.name}" for alias in node.names}
                found |= inside & modules or {node.module}
        needed[name] = (found & modules) - {name}
    assert needed["outrider.kernels.native"] >= {"outrider.kernels.packed", "outrider.host_memory"}  # both forms
    graphlib.TopologicalSorter(needed).prepare()
