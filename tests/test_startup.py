"""The first moments of a command: help without torch, Ctrl-C without a traceback, and help that fits a terminal."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from typing import Any

import pytest
import typer.main
from typer.testing import CliRunner

import outrider
from outrider.cli import app

WIDTH = 80
HEAVY = ("torch", "numpy", "transformers", "tokenizers", "safetensors", "fastapi")


def commands(command: Any = None, names: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """All of them, as they are typed."""
    command = command if command is not None else typer.main.get_command(app)
    found = [names]
    for name, each in (command.commands if "commands" in vars(command) else {}).items():
        found += commands(each, (*names, name))
    return found


ALL = commands()


def python(code: str) -> str:
    command = [sys.executable, "-c", textwrap.dedent(code)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


# imports


def test_help_and_version_import_nothing_heavy() -> None:
    said = python(
        f"""
        import json, sys
        from typer.testing import CliRunner
        from outrider.cli import app
        statuses = [CliRunner().invoke(app, [*names, "--help"]).exit_code for names in {ALL!r}]
        statuses.append(CliRunner().invoke(app, ["--version"]).exit_code)
        print(json.dumps([statuses, [name for name in {HEAVY!r} if name in sys.modules]]))
        """
    )
    statuses, imported = json.loads(said)
    assert statuses == [0] * (len(ALL) + 1)
    assert imported == []


def test_the_package_imports_what_is_used_when_it_is_used() -> None:
    said = python(
        """
        import sys, outrider
        before = "torch" in sys.modules
        names = dir(outrider)
        from outrider import LLM, SamplingParams
        import outrider.llm
        print(before, outrider.LLM is outrider.llm.LLM, LLM.__name__, set(outrider.__all__) <= set(names))
        """
    )
    assert said.split() == ["False", "True", "LLM", "True"]


def test_templates_are_left_to_their_own_process() -> None:
    """jinja2 takes memory and time, and nobody else needs it."""
    said = python(
        """
        import sys
        from outrider import LLM, SamplingParams
        with LLM(None, None) as llm:
            chat = [{"role": "user", "content": "Hi"}]
            outputs = llm.chat(chat, SamplingParams(max_tokens=2), chat_template="{{ 1 }}")
        print(len(outputs), "jinja2" in sys.modules)
        """
    )
    assert said.split() == ["1", "False"]


def test_every_export_is_there() -> None:
    for name in outrider.__all__:
        assert vars(outrider).get(name) or outrider.__getattr__(name)
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        outrider.__getattr__("Llm")


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize("awaited", ["typer", "torch"])
def test_an_interrupt_while_importing_shows_no_traceback(awaited: str) -> None:
    """Python tells of every import on standard error, so that the interrupt comes in the middle of them."""
    command = [sys.executable, "-X", "importtime", "-m", "outrider", "generate", "Hello"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    said = ""
    try:
        for line in process.stderr:
            if re.search(rf"\| +{awaited}\b", line):
                process.send_signal(signal.SIGINT)
                break
        said = process.stderr.read()
        assert process.wait(30) in (-signal.SIGINT, 130)
    finally:
        process.kill()
        process.wait()
    shown = [line for line in said.splitlines() if not line.startswith("import time:")]
    assert shown == []


# help


@pytest.mark.parametrize("names", ALL, ids=" ".join)
def test_help_fits_a_terminal_and_cuts_nothing_off(names: tuple[str, ...]) -> None:
    result = CliRunner().invoke(app, [*names, "--help"], env={"COLUMNS": str(WIDTH), "TERM": "dumb"})
    assert result.exit_code == 0
    assert max(map(len, result.stdout.splitlines())) <= WIDTH
    assert "…" not in result.stdout
    assert "..." not in re.sub(r"[\[{]\w+[\]}]\.\.\.|KEY=\.\.\.", "", result.stdout)
    assert re.search(r"<\w", result.stdout) is None, "a type instead of a name"
    command = typer.main.get_command(app)
    for name in names:
        command = command.commands[name]  # type: ignore[attr-defined]
    for parameter in command.params:
        for option in (*parameter.opts, *parameter.secondary_opts):
            if option.startswith("--"):
                assert re.search(rf"(^|[ ,/]){option}\b", result.stdout, re.MULTILINE), option
        if not vars(parameter).get("hidden"):
            assert vars(parameter)["help"], f"{parameter.name} is not explained"


def test_the_matrix_fits_a_terminal() -> None:
    result = CliRunner().invoke(app, ["matrix"], env={"COLUMNS": str(WIDTH)})
    cells = json.loads(CliRunner().invoke(app, ["matrix", "--json"]).stdout)
    assert max(map(len, result.stdout.splitlines())) <= WIDTH
    assert {*cells["targets"], *cells["drafters"]} <= set(re.findall(r"\w+", result.stdout))
    rows = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines() if line.split()}
    columns = rows["target"]
    for target, supported in cells["matrix"].items():
        assert dict(zip(columns, rows[target], strict=True)) == {
            name: "yes" if supported[name] else "-" for name in columns
        }
    universal = [name for name in cells["drafters"] if name not in columns]
    assert all(supported[name] for supported in cells["matrix"].values() for name in universal)
