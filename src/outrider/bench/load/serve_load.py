"""Load: requests at Poisson-distributed times, or from a number of clients that each wait for their answer before they
send again; first some that are not counted."""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from outrider.bench.interleave import Progress
from outrider.bench.load.serve_client import Answered, Asking, ask
from outrider.bench.load.serve_metrics import DraftingFigures, drafting_from
from outrider.bench.load.streaming import TIMEOUT, Streams
from outrider.bench.prompts import PromptText
from outrider.extras import extra_missing

if TYPE_CHECKING:
    import httpx

# The most that a server may be asked to count, then less: some refuse what they do not know.
STREAM_OPTIONS: tuple[dict[str, bool] | None, ...] = (
    {"include_usage": True, "continuous_usage_stats": True},
    {"include_usage": True},
    None,
)


@dataclass(frozen=True)
class Load:
    """How the requests come."""

    num_prompts: int
    num_warm_ups: int
    concurrency: int | None  # at once, at most; None: as many as come
    request_rate: float | None  # a second; None: as soon as there is room
    seed: int
    think_seconds: float = 0.0  # that a client waits on average before it sends its next request
    num_turns: int = 1  # of a chat: so many requests in a row are one; each begins with all that was said before

    def begins(self, number: int) -> bool:
        """Whether a request is a chat's first."""
        return number % self.num_turns == 0

    def arrivals(self) -> list[float]:
        """Seconds after the start. A chat's later turns follow its earlier ones: 0."""
        if self.request_rate is None:
            return [0.0] * self.num_prompts
        source, now, times = random.Random(self.seed), 0.0, []
        for number in range(self.num_prompts):
            times.append(now if self.begins(number) else 0.0)
            now += source.expovariate(self.request_rate)
        return times

    def thinking(self) -> list[float]:
        """Seconds that a client waits before each request, exponentially distributed."""
        if not self.think_seconds:
            return [0.0] * self.num_prompts
        source = random.Random(f"thinking-{self.seed}")
        return [source.expovariate(1 / self.think_seconds) for _ in range(self.num_prompts)]

    def choose(self, prompts: Sequence[PromptText]) -> tuple[list[PromptText], list[PromptText]]:
        """Those that are counted, and others to warm up with, or a server would know the first ones already: all in an
        order of this seed's, and again, until there are enough."""
        source, chosen = random.Random(self.seed), list[PromptText]()
        while len(chosen) < self.num_prompts + self.num_warm_ups:
            chosen += source.sample(list(prompts), len(prompts))
        return chosen[: self.num_prompts], chosen[self.num_prompts :][: self.num_warm_ups]


@dataclass(frozen=True)
class LoadOutcome:
    answers: list[Answered]
    seconds: float
    asking: Asking
    drafting: DraftingFigures | None  # of the server's own counters, over the same time
    num_distinct: int | None = None  # prompts; where requests are more, they came again


def connect(base_url: str, api_key: str | None, timeout: float) -> httpx.AsyncClient:
    try:
        import httpx
    except ImportError as error:
        raise extra_missing("outrider bench serve", "serve", error) from error
    if not base_url.startswith(("http://", "https://")):
        raise ValueError(f"--base-url must begin with http:// or https://, not {base_url!r}")
    root = base_url.rstrip("/").removesuffix("/v1")
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    return httpx.AsyncClient(base_url=root, headers=headers, timeout=timeout, limits=limits, trust_env=False)


async def served_model(client: httpx.AsyncClient, wanted: str | None) -> str:
    """The model's name as the server has it; an error that says what to do where there is none such."""
    import httpx

    try:
        response = await client.get("/v1/models")
    except httpx.TransportError as error:
        raise ValueError(
            f"nobody answers at {client.base_url}: is the server running? ({type(error).__name__})"
        ) from error
    if response.status_code in (401, 403):
        raise ValueError(f"{client.base_url} refuses us (HTTP {response.status_code}): give its key with --api-key")
    known = _names(response)
    if wanted is None:
        if not known:
            raise ValueError(f"{client.base_url} does not say which models it has: name one with --model")
        return known[0]
    if known and wanted not in known:
        raise ValueError(f"there is no model {wanted!r} at {client.base_url}, only {', '.join(known)}")
    return wanted


def _names(response: httpx.Response) -> list[str]:
    try:
        return [str(card["id"]) for card in response.json()["data"]] if response.status_code == 200 else []
    except (ValueError, KeyError, TypeError):
        return []


async def settle(streams: Streams, asking: Asking, prompt: PromptText) -> Asking:
    """One request, so that what is wrong with all of them is known before any is counted."""
    kinds = []
    for options in STREAM_OPTIONS:
        tried = replace(asking, stream_options=options)
        answered = await ask(streams, tried, prompt, 0)
        if answered.error is None:
            return tried
        kinds.append(answered.error)
        if not answered.error.startswith("HTTP 4"):
            break
    raise ValueError(f"the first request failed ({kinds[-1]}), so the others are not sent")


async def run_load(
    client: httpx.AsyncClient, asking: Asking, prompts: Sequence[PromptText], load: Load, progress: Progress | None
) -> LoadOutcome:
    key = client.headers.get("authorization")
    headers = {"Authorization": key} if key else {}
    async with Streams(str(client.base_url), headers, client.timeout.read or TIMEOUT) as streams:
        counted, others = load.choose(prompts)
        asking = await settle(streams, asking, others[-1] if others else counted[-1])
        warm = replace(load, request_rate=None)
        await _ask_all(streams, asking, others, warm, _named(progress, "warming up"))
        before = await _counters(client)
        begin = time.perf_counter()
        answers = await _ask_all(streams, asking, counted, load, _named(progress, "requests"))
        seconds = max((answer.sent + answer.seconds for answer in answers), default=begin) - begin
        after = await _counters(client)
    return LoadOutcome(answers, seconds, asking, drafting_from(before, after), len(set(prompts)))


async def _ask_all(
    streams: Streams, asking: Asking, prompts: Sequence[PromptText], load: Load, progress: Any
) -> list[Answered]:
    room = asyncio.Semaphore(load.concurrency) if load.concurrency is not None else nullcontext()
    begin, answers = time.perf_counter(), list[Answered]()
    load = replace(load, num_prompts=len(prompts))
    arrivals, thinking = load.arrivals(), load.thinking()

    async def one(first: int) -> None:
        """A request, or all turns of a chat."""
        await asyncio.sleep(begin + arrivals[first] - time.perf_counter())
        async with room:  # a client thinks, then sends
            said: tuple[int, ...] = ()
            own = asking if asking.chat is None else replace(asking, chat=f"{asking.chat}-{first}")
            for number in range(first, min(first + load.num_turns, len(prompts))):
                await asyncio.sleep(thinking[number])
                prompt = prompts[number]
                asked = replace(prompt, ids=(*said, *prompt.ids)) if said else prompt
                answers.append(await ask(streams, own, asked, number))
                said = (*asked.ids, *answers[-1].token_ids)
                progress(len(answers), len(prompts))

    await asyncio.gather(*(one(first) for first in range(0, len(prompts), load.num_turns)))
    return sorted(answers, key=lambda answer: answer.number)


def _named(progress: Progress | None, what: str) -> Any:
    return lambda done, total: progress(what, done, total) if progress is not None else None


async def _counters(client: httpx.AsyncClient) -> str:
    """The server's own figures, empty where it has none."""
    import httpx

    try:
        response = await client.get("/metrics")
    except httpx.TransportError:
        return ""
    return response.text if response.status_code == 200 else ""


def to_lines(answers: Sequence[Answered]) -> list[dict[str, Any]]:
    """Every request with its times, as lines of a JSONL file."""
    begin = min((answer.sent for answer in answers), default=0.0)
    return [json.loads(json.dumps(vars(answer) | {"sent": answer.sent - begin})) for answer in answers]
