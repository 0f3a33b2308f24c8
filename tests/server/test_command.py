"""`outrider serve` as a process: it starts, answers, drains on SIGTERM, and says what it needs."""

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from running import wait_for
from typer.testing import CliRunner

import outrider.pair
from outrider.cli import app
from outrider.server.address import port_of, taken
from outrider.server.command import name_of


@pytest.mark.slow
def test_serving_and_sigterm() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "outrider", "serve", "--port", str(port), "--max-num-seqs", "1"]
    environment = os.environ | {"OUTRIDER_API_KEY": "key-for-a-test", "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=environment)
    try:
        url = f"http://127.0.0.1:{port}"

        def ready() -> bool:
            assert process.poll() is None
            try:
                return httpx.get(f"{url}/health/ready").status_code == 200
            except httpx.TransportError:
                return False

        wait_for(ready, 60)
        assert httpx.get(f"{url}/v1/models").status_code == 401
        body = {"prompt": "Hello", "max_tokens": 150, "ignore_eos": True, "temperature": 0, "stream": True}
        headers = {"Authorization": "Bearer key-for-a-test"}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=30) as response:
            lines = response.iter_lines()
            next(lines)
            process.send_signal(signal.SIGTERM)
            rest = [line for line in lines if line]
        assert '"finish_reason":"length"' in rest[-2]
        assert process.wait(20) == 0
        assert process.stderr is not None
        said = process.stderr.read().decode()
        events = [json.loads(line) for line in said.splitlines() if line.startswith("{")]
        assert [event["event"] for event in events] == [
            "parsers",
            "memory",
            "listening",
            "draining",
            "request",
            "ended",
        ]
        assert (events[0]["tools"], events[0]["reasoning"]) == (None, None)
        assert "no marker" in events[0]["because"]["tools"]
        assert events[1]["num_tokens"] >= 64
        assert events[4]["completion_tokens"] == 150
        for label in ("weights", "drafter", "cache", "context"):
            assert any(line.startswith(f"{label} ") for line in said.splitlines()), said
        assert "Hello" not in said
    finally:
        process.kill()
        process.wait()


def serve(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["serve", *arguments], env={"OUTRIDER_API_KEY": None})
    assert result.exit_code == 2
    assert result.stderr.startswith("error: ")
    return result.stderr


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--api-key" in serve("--host", "0.0.0.0")
    assert "at least 8" in serve("--api-key", "short")
    assert "contradict" in serve("--no-draft", "--draft", "ngram")
    assert "nonsense" in serve("--tool-call-parser", "nonsense")
    monkeypatch.delitem(sys.modules, "outrider.server.app", raising=False)
    monkeypatch.setitem(sys.modules, "fastapi", None)  # as if it were not installed
    assert "outrider serve needs the extra serve, and fastapi is not installed: pip install '.[serve]'" in serve()


def test_an_address_that_is_not_to_be_had_is_refused_before_loading(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("weights are being read")

    monkeypatch.setattr(outrider.pair, "load_weights", fail)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
        said = serve("--port", str(port))
    assert f"port {port} of 127.0.0.1 is in use" in said
    assert "--port" in said
    assert "is no address" in serve("--host", "no.such.host.invalid", "--api-key", "key-for-a-test")
    assert "cannot listen on 192.0.2.1" in serve("--host", "192.0.2.1", "--api-key", "key-for-a-test")


def test_an_address_is_taken_and_given_back() -> None:
    with taken("127.0.0.1", 0) as sockets:
        port = port_of(sockets)
        assert port > 0
        with pytest.raises(ConnectionRefusedError):  # nobody is let in before there is an answer
            socket.create_connection(("127.0.0.1", port), timeout=5)
    with taken("127.0.0.1", port) as sockets:
        assert port_of(sockets) == port
    with taken("localhost", 0) as sockets:
        assert len({each.getsockname()[1] for each in sockets}) == 1


def test_the_name_of_a_model(tmp_path: Path) -> None:
    """Clients do not learn where a model lies."""
    assert name_of(None) == "default"
    assert name_of("org/name") == "org/name"
    assert name_of(str(tmp_path)) == tmp_path.name
