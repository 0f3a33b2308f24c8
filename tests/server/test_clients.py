"""Clients that nobody here wrote drive chat, streams, tools and schemas against the embedded model. They live in an
environment of their own, tests/clients/requirements.txt, which `make test` makes; OUTRIDER_CLIENTS says where it is."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from running import Running, Serve
from scripted import Script, Scripted

from outrider.server.parsers import ParserNames

SCRIPTS = Path(__file__).parent.parent / "clients"
CLIENTS = sorted(path.stem.removeprefix("use_") for path in SCRIPTS.glob("use_*.py"))
GIVEN = os.environ.get("OUTRIDER_CLIENTS")
PYTHON = Path(GIVEN or Path(sys.prefix) / "clients") / "bin" / "python"
CALL = '<tool_call>\n{"name": "walk", "arguments": {"hours": 2}}\n</tool_call>'

if GIVEN is None and not PYTHON.exists():  # where one is named it must be there
    pytest.skip("the clients are not installed: make test does it", allow_module_level=True)


@pytest.fixture(scope="module")
def server(serve: Serve) -> Iterator[Running]:
    with serve(parsers=ParserNames("hermes", None)) as running:
        yield running


@pytest.fixture(scope="module")
def caller(serve: Serve) -> Iterator[Running]:
    """Its model says a call of the tool, whatever it is asked."""
    with Scripted(max_num_seqs=1) as told:
        assert told.tokenizer is not None
        told.script = Script([*told.tokens(CALL), told.tokenizer.eos_token_id or 0])
        with serve(parsers=ParserNames("hermes", None), other=told) as running:
            yield running


def test_all_of_them_are_here() -> None:
    assert CLIENTS == ["instructor", "langchain", "litellm", "llm", "openai", "pydantic_ai"]


@pytest.mark.slow
@pytest.mark.parametrize("name", CLIENTS)
def test_a_client(server: Running, caller: Running, name: str, tmp_path: Path) -> None:
    command = [str(PYTHON), str(SCRIPTS / f"use_{name}.py"), server.url, caller.url]
    places = {"HOME": str(tmp_path), "LLM_USER_PATH": str(tmp_path), "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    environment = {"PATH": os.environ["PATH"], "NO_PROXY": "127.0.0.1", **places}
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    body = {"messages": [{"role": "user", "content": "Tell me about walking."}], "max_tokens": 24, "temperature": 0}
    said = server.post("/v1/chat/completions", body).json()["choices"][0]["message"]["content"]
    for kind in ("chat", "streamed", "response", "streamed_response"):
        if kind in found:
            assert found[kind].strip() == said.strip(), kind
    call = found["call"]["arguments"]
    arguments = json.loads(call) if isinstance(call, str) else call
    assert 1 <= arguments["hours"] <= 9
    assert found["call"]["name"]
    for kind in ("structured", "called", "grown"):
        if kind in found:
            assert found[kind]["place"] in ("wood", "hill"), kind
            assert 1 <= found[kind]["hours"] <= 9, kind
    assert {"chat", "streamed", "structured"} <= found.keys()
    assert found.get("too_long", "ContextWindowExceededError") == "ContextWindowExceededError"
    assert found.get("result", "2 hours later") == "2 hours later"
