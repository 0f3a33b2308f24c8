"""The command line of `vllm serve`, given to `outrider serve`."""

import functools
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import typer
from running import wait_for
from typer.testing import CliRunner

from outrider.cli import app
from outrider.commands import length, size
from outrider.compatibility.flags import OWN, SERVE, SWITCHES
from outrider.server.flags import settle_arguments
from outrider.server.security import access_for


@functools.cache
def own() -> dict[str, bool]:
    """The command's own options, and whether they take a value."""
    command: Any = typer.main.get_command(app).commands["serve"]  # type: ignore[attr-defined]
    options = [each for each in command.params if each.param_type_name == "option"]
    return {name: not each.is_flag for each in options for name in (*each.opts, *each.secondary_opts)}


def test_what_is_said_to_be_ours_is_ours() -> None:
    assert set(OWN) <= set(own())
    names = SERVE.names()
    assert len(names) == len(set(names))
    assert not set(names) & set(own())
    assert set(names) >= SWITCHES
    assert {"--data-parallel-size", "--load-format", "--enable-lora", "--max-logprobs"} <= set(names)


def test_a_line_of_vllms() -> None:
    line = "org/name -tp 1 --max_model_len 4k --enable-auto-tool-choice --no-enable-chunked-prefill --port=8001"
    line += " --trust-remote-code=false --kv-cache-dtype auto --served-model-name a b --max-logprobs 20"
    kept = ["--tensor-parallel-size", "1", "--max-model-len", "4k", "--port=8001", "--kv-cache-dtype", "auto"]
    kept += ["--served-model-name", "a", "--served-model-name", "b", "org/name"]
    assert settle_arguments(line.split(), own()) == kept
    # a model that comes last is no name
    assert settle_arguments(["--served-model-name", "a", "org/name"], own()) == ["--served-model-name", "a", "org/name"]


def test_what_is_refused_is_named_together() -> None:
    line = "m -dp 2 --trust-remote-code --gpu-memory-utilisation 0.9 --wibble --quantization fp8"
    with pytest.raises(ValueError, match="outrider serve cannot take") as told:
        settle_arguments(line.split(), own())
    said = str(told.value)
    for word in (
        "--data-parallel-size=2: an engine is one group",
        "--trust-remote-code=True: no code",
        "--wibble: nobody",
    ):
        assert word in said
    assert "did you mean --gpu-memory-utilization?" in said
    assert "--quantization" not in said
    result = CliRunner().invoke(app, ["serve", *line.split()])
    assert (result.exit_code, result.stderr.startswith("error: outrider serve cannot take")) == (2, True)
    for name in SERVE.names():
        if name in SWITCHES:
            continue
        with pytest.raises(ValueError, match="needs a value"):
            settle_arguments([name], own())


def test_a_file_of_flags(tmp_path: Path) -> None:
    file = tmp_path / "flags.yaml"
    file.write_text(
        "model: org/name\nport: 9000\nmax_model_len: 4k\nenable-prefix-caching: false\nenforce-eager: true\n"
        "data-parallel-size: 1\nserved-model-name: [a, b]\nallowed-origins: ['*']\n"
        "speculative-config: {method: ngram, num_speculative_tokens: 3}\ntrust-remote-code: false\n"
    )
    kept = settle_arguments(["--config", str(file), "--port", "8001"], own())
    expected = ["--port", "8001", "--model=org/name", "--max-model-len=4k", "--no-enable-prefix-caching"]
    expected += ["--enforce-eager", "--served-model-name", "a", "--served-model-name", "b", '--allowed-origins=["*"]']
    expected.append('--speculative-config={"method": "ngram", "num_speculative_tokens": 3}')
    assert kept == expected
    assert "--model=org/name" not in settle_arguments(["other", f"--config={file}"], own())
    file.write_text("data-parallel-size: 2\nwibble: 3\n")
    with pytest.raises(ValueError, match=r"--data-parallel-size=2: .*--wibble"):
        settle_arguments(["--config", str(file)], own())
    for text in ("a: [", "- a", "just text"):
        file.write_text(text)
        with pytest.raises(ValueError, match="--config"):
            settle_arguments(["--config", str(file)], own())
    with pytest.raises(ValueError, match="no such file"):
        settle_arguments(["--config", "/nowhere.yaml"], own())


def test_sizes() -> None:
    written = {"4096": 4096, "4k": 4000, "4K": 4096, "1.5k": 1500, "2m": 2 * 10**6, "1G": 2**30, "1g": 10**9}
    assert {text: size(text) for text in written} == written
    for wrong in ("", "k", "-1", "0", "1.5", "4kb", "1e400", "nan", "1.0001k"):
        with pytest.raises(ValueError, match="no size"):
            size(wrong)
    assert length("auto") is length("-1") is None
    assert length("8k") == 8000


def refusal(*arguments: str) -> str:
    result = CliRunner().invoke(app, ["serve", *arguments], env={"OUTRIDER_API_KEY": None})
    assert result.exit_code == 2, result.output
    return " ".join(result.stderr.split())


def test_what_is_wrong_is_said_before_anything_is_loaded(tmp_path: Path) -> None:
    assert "is no size" in refusal("--max-model-len", "many")
    assert "--uvicorn-log-level loud is none of" in refusal("--uvicorn-log-level", "loud")
    assert "must begin with a slash" in refusal("--root-path", "llm")
    assert "needs --ssl-certfile" in refusal("--ssl-keyfile", "key.pem")
    assert "does not exist" in refusal("--ssl-certfile", "/nowhere.pem")
    (tmp_path / "no.pem").write_text("no certificate")
    assert "cannot be used" in refusal("--ssl-certfile", str(tmp_path / "no.pem"))
    assert "must be a JSON list" in refusal("--allowed-origins", "*")
    assert "neither a template nor a file" in refusal("--chat-template", "/nowhere.jinja")


def test_all_origins() -> None:
    assert access_for("127.0.0.1", origins=["*"]).origins == {"*"}


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes a certificate with openssl")
def test_a_server_with_all_of_it(tmp_path: Path) -> None:
    """HTTPS, a template, names, a root path, defaults, a tokenizer of its own: as a process."""
    key, certificate, template = tmp_path / "key.pem", tmp_path / "certificate.pem", tmp_path / "chat.jinja"
    make = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=localhost"]
    make += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)]
    subprocess.run(make, check=True, capture_output=True)
    template.write_text("MARK {{ messages[0].content }}")
    embedded = Path(sys.modules["outrider"].__file__ or "").parent / "default" / "target"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    flags: dict[str, Any] = {
        "port": port,
        "ssl-keyfile": str(key),
        "ssl-certfile": str(certificate),
        "chat-template": str(template),
        "served-model-name": ["first", "second"],
        "root-path": "/llm",
        "override-generation-config": {"temperature": 0.0, "max_new_tokens": 3},
        "tokenizer": str(embedded),
        "uvicorn-log-level": "info",
        "max-num-seqs": 1,
        "max-model-len": "1k",
        "block-size": 8,
        "tensor-parallel-size": 1,
    }
    file = tmp_path / "flags.yaml"
    file.write_text(json.dumps(flags))  # which is YAML
    command = [sys.executable, "-m", "outrider", "serve", "--config", str(file)]
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    try:
        client = httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=_trusting(certificate), timeout=30)

        def ready() -> bool:
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            try:
                return client.get("/health/ready").status_code == 200
            except httpx.TransportError:
                return False

        wait_for(ready, 120)
        models = client.get("/llm/v1/models").json()["data"]
        assert [(each["id"], each["max_model_len"]) for each in models] == [("first", 1000), ("second", 1000)]
        body = {"model": "second", "messages": [{"role": "user", "content": "Hello"}], "ignore_eos": True}
        answer = client.post("/v1/chat/completions", json=body | {"prompt_logprobs": 0}).json()
        assert (answer["model"], answer["usage"]["completion_tokens"]) == ("first", 3)
        rows = [next(iter(row.values()))["decoded_token"] for row in answer["prompt_logprobs"][1:]]
        assert "MARK Hello".endswith("".join(rows))
        assert client.get("/tokenizer_info").json()["chat_template"] == template.read_text()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
        assert process.stderr is not None
        assert "Application startup complete" in process.stderr.read().decode()
    finally:
        process.kill()
        process.wait()


def _trusting(certificate: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(certificate))
