"""Load against any OpenAI-compatible server: everything of `outrider bench serve` that touches it."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.bench.interleave import Progress
from outrider.bench.load.serve_client import Asking
from outrider.bench.load.serve_load import Load, LoadOutcome, connect, run_load, served_model
from outrider.bench.prompts import WORKLOADS, PromptText


@dataclass(frozen=True)
class LoadedServer:
    base_url: str
    model: str | None
    api_key: str | None
    timeout: float


async def measure(
    server: LoadedServer, asking: Asking, prompts: list[PromptText], load: Load, progress: Progress | None = None
) -> LoadOutcome:
    """Everything that touches the server. `asking.model` is filled in from what it says."""
    async with connect(server.base_url, server.api_key, server.timeout) as client:
        asking = Asking(**vars(asking) | {"model": await served_model(client, server.model)})
        return await run_load(client, asking, prompts, load, progress)


def built_in(name: str) -> list[PromptText]:
    if name not in WORKLOADS:
        raise ValueError(f"unknown workload {name!r}; known: {', '.join(WORKLOADS)}")
    return [PromptText(text, is_chat=True) for text in WORKLOADS[name]]
