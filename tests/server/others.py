"""Others who are being served while a test does its worst: they must not notice."""

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import psutil
import pytest
from running import Running

MAX_GROWTH = 300 * 2**20  # bytes; a body may have 32 MiB, and is parsed
VICTIM = {"prompt": "Once upon a time", "max_tokens": 60, "ignore_eos": True, "return_token_ids": True, "seed": 3}


def is_clean(response: httpx.Response) -> None:
    """An answer, or an error that says nothing of what lies behind it."""
    assert response.status_code < 500, response.text[:500]
    if response.status_code >= 400 and response.headers["content-type"].startswith("application/json"):
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    for word in ("Traceback", "site-packages", "/src/", "outrider/"):
        assert word not in response.text
    assert response.status_code == 200 or len(response.content) < 2000


def tokens_of(running: Running, temperature: float) -> list[int]:
    body = VICTIM | {"temperature": temperature, "stream": True}
    tokens: list[int] = []
    with httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=60) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                event = json.loads(line.removeprefix("data: "))
                assert "error" not in event, event
                tokens += [token for choice in event["choices"] for token in choice["token_ids"]]
    assert len(tokens) == VICTIM["max_tokens"]
    return tokens


@pytest.fixture(scope="module")
def quiet(shared: Running) -> dict[float, list[int]]:
    """What the others get when nobody disturbs them."""
    return {temperature: tokens_of(shared, temperature) for temperature in (0.0, 1.0)}


@pytest.fixture
def busy(running: Running, quiet: dict[float, list[int]]) -> Iterator[Running]:
    """Others stream all the time; afterwards they must have got their own tokens, and memory must be as it was."""
    ended = threading.Event()
    found: list[tuple[float, list[int]]] = []

    def stream(temperature: float) -> None:
        while not ended.is_set():
            found.append((temperature, tokens_of(running, temperature)))

    before = psutil.Process().memory_info().rss
    with ThreadPoolExecutor(2) as pool:
        streams = [pool.submit(stream, temperature) for temperature in quiet]
        yield running
        ended.set()
        for each in streams:
            each.result()
    assert len(found) >= 2
    for temperature, tokens in found:
        assert tokens == quiet[temperature]
    assert psutil.Process().memory_info().rss - before < MAX_GROWTH
    assert running.get("/health/live").status_code == 200
