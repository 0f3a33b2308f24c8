"""A server that runs in a thread of the test's own process."""

import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from outrider import LLM
from outrider.server.app import Application
from outrider.server.engine_client import EngineClient
from outrider.server.serving import Server


@dataclass
class Running:
    llm: LLM
    application: Application
    server: Server
    thread: threading.Thread
    port: int

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def engine(self) -> EngineClient:
        return self.application.engine

    def openai(self, api_key: str = "none") -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=api_key, max_retries=0, timeout=30)

    def post(self, path: str, body: Any = None, **options: Any) -> httpx.Response:
        options |= {} if body is None else {"json": body}
        return httpx.post(self.url + path, timeout=30, **options)

    def get(self, path: str, **options: Any) -> httpx.Response:
        return httpx.get(self.url + path, timeout=30, **options)

    def wait_until_idle(self, seconds: float = 10.0) -> None:
        wait_for(lambda: self.engine.is_idle and not self.llm.engine.has_work, seconds)


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.01)


Serve = Callable[..., AbstractContextManager[Running]]
