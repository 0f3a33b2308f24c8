"""The server on a CUDA device: everybody at once, streaming and not, with every kind of option, gets what each gets
alone."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from outrider import LLM

httpx = pytest.importorskip("httpx")
pytest.importorskip("fastapi")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}},
          "required": ["name", "age"]}  # fmt: skip
QUESTIONS = ["Tell me a story about a dog.", "Why is the sky blue?", "What is a friend?", "Name three animals."]
OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0},
    {"temperature": 0.8, "seed": 3},
    {"temperature": 0.9, "seed": 4, "top_p": 0.9, "top_k": 20},
    {"temperature": 0.7, "seed": 5, "repetition_penalty": 1.2, "presence_penalty": 0.3},
    {"temperature": 0, "logprobs": True, "top_logprobs": 2},
    {"temperature": 0, "response_format": {"type": "json_schema", "json_schema": {"name": "p", "schema": SCHEMA}}},
]
BODIES = [
    {"messages": [{"role": "user", "content": question}], "max_tokens": 40, **options}
    for options in OPTIONS
    for question in QUESTIONS
]


@contextmanager
def serving(llm: LLM) -> Iterator[str]:
    from outrider.server.app import Application
    from outrider.server.engine_client import EngineClient, QueueLimits
    from outrider.server.engine_host import ThreadHost
    from outrider.server.security import access_for
    from outrider.server.serving import Server

    host = ThreadHost(llm, "default")
    engine = EngineClient(host.link, host.model, "default", QueueLimits(), host.why_ended)
    application = Application(engine, llm.tokenizer, "default", access_for("127.0.0.1"))
    server = Server(application, "127.0.0.1", 0, 5.0)
    thread = threading.Thread(target=server.run)
    thread.start()
    end = time.monotonic() + 20
    while not server.started and time.monotonic() < end:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.handle_exit(15, None)
        server.handle_exit(15, None)
        thread.join(20)
        assert not thread.is_alive()
        host.close()


def answer(url: str, body: dict[str, Any]) -> str:
    response = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=120)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def streamed(url: str, body: dict[str, Any]) -> str:
    text = ""
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body | {"stream": True}, timeout=120) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                chunk = json.loads(line.removeprefix("data: "))
                assert "error" not in chunk, chunk
                text += "".join(choice["delta"].get("content") or "" for choice in chunk["choices"])
    return text


def check(llm: LLM) -> None:
    """Float32, where near ties are rare enough that company changes nothing."""
    with serving(llm) as url, ThreadPoolExecutor(16) as pool:
        assert httpx.get(f"{url}/health/ready").status_code == 200
        alone = [answer(url, body) for body in BODIES]
        assert len(set(alone)) > len(BODIES) // 2
        for ask in (answer, streamed):
            assert list(pool.map(lambda body, ask=ask: ask(url, body), BODIES)) == alone
        assert httpx.get(f"{url}/health/live").status_code == 200
    assert llm.engine.scheduler.pool.num_free == llm.engine.scheduler.pool.capacity


@pytest.mark.parametrize("speculative", ["auto", None])
def test_everybody_at_once(speculative: str | None) -> None:
    with LLM(None, speculative, device="cuda", dtype="float32", max_num_seqs=16, max_model_len=512) as llm:
        llm.warm_up()
        check(llm)
        assert llm.engine.num_recorded_rounds > 100
