"""The sides of `outrider bench traffic`: an engine in this process, or a server in its own. Both take the same load,
and leave the same record of every request."""

from __future__ import annotations

import asyncio
import heapq
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from outrider.bench.load.serve_client import Answered, Asking
from outrider.bench.load.serve_load import Load, LoadOutcome, connect, run_load, served_model
from outrider.bench.load.serve_metrics import DraftingFigures
from outrider.bench.prompts import PromptText
from outrider.engine.engine import Engine
from outrider.engine.request import Request
from outrider.measure import forget_all
from outrider.sampling_params import SamplingParams, Speculation

TIMEOUT_SECONDS = 600.0


class TrafficSide(Protocol):
    name: str

    def run(self, prompts: Sequence[PromptText], load: Load) -> LoadOutcome:
        """Answers a load of requests; an engine forgets those of earlier runs."""
        ...


class Clients:
    """When each request of a load is due. With a number of clients, each sends its next request some time after its
    last one has ended; with a rate, requests come whether or not earlier ones have ended. A chat's next turn is sent by
    whoever has sent the one before."""

    def __init__(self, load: Load) -> None:
        self._load, self._arrivals, self._thinking = load, load.arrivals(), load.thinking()
        self._unsent = deque(range(0, load.num_prompts, load.num_turns))
        self._due: list[tuple[float, int]] = []  # a heap
        for _ in range(load.concurrency or load.num_prompts):
            self.send_next(0.0)

    def send_next(self, now: float, last: int | None = None) -> None:
        """A client is free: `now` its last request has ended, which was number `last`."""
        if last is not None and last + 1 < self._load.num_prompts and not self._load.begins(last + 1):
            number = last + 1
        else:
            number = self._unsent.popleft() if self._unsent else -1
        if number >= 0:
            heapq.heappush(self._due, (max(now, self._arrivals[number]) + self._thinking[number], number))

    def take_due(self, now: float) -> list[tuple[float, int]]:
        """Requests that have been sent by `now`: when, and which."""
        taken = []
        while self._due and self._due[0][0] <= now:
            taken.append(heapq.heappop(self._due))
        return taken

    @property
    def next_due(self) -> float:
        return self._due[0][0]


@dataclass
class EngineSide:
    """An engine in this process. Requests join its loop between two steps; their time begins when their client sends
    them, so what they wait for a step to end counts."""

    name: str
    engine: Engine
    make: Callable[[PromptText, SamplingParams], Request]
    asking: Asking
    num_runs: int = 0

    def run(self, prompts: Sequence[PromptText], load: Load) -> LoadOutcome:
        self.num_runs += 1
        forget_all(self.engine.drafter)  # or it would know the answers of the run before
        (chosen, _), clients = load.choose(prompts), Clients(load)
        running: dict[Request, Answered] = {}
        ended: list[tuple[Request, Answered]] = []
        said: dict[int, list[int]] = {}  # in chats, by the turn that comes next
        begin = time.perf_counter()
        with self._on_device():
            while len(ended) < len(chosen):
                now = time.perf_counter() - begin
                for sent, number in clients.take_due(now):
                    prompt = chosen[number]
                    if number in said:
                        prompt = replace(prompt, ids=(*said.pop(number), *prompt.ids))
                    request = self.make(prompt, self._params(number, load))
                    running[request] = Answered(number, begin + sent, num_prompt_tokens=len(request.prompt))
                    self.engine.add(request)
                if not running:
                    time.sleep(max(clients.next_due - now, 0.0))
                    continue
                brought = self.engine.step()
                now = time.perf_counter()
                for request in [each.request for each in brought]:
                    if self._note(request, running[request], now):
                        ended.append((request, running.pop(request)))
                        number = ended[-1][1].number
                        if not load.begins(number + 1):
                            said[number + 1] = request.tokens
                        clients.send_next(now - begin, number)
        seconds = max((each.sent + each.seconds for _, each in ended), default=begin) - begin
        answers = sorted((each for _, each in ended), key=lambda each: each.number)
        drafting = _drafting(sum((request.speculation for request, _ in ended), Speculation()))
        return LoadOutcome(answers, seconds, self.asking, drafting, len(set(prompts)))

    def _params(self, number: int, load: Load) -> SamplingParams:
        asking, chat = self.asking, f"{self.num_runs}-{number // load.num_turns}"
        return SamplingParams(
            temperature=asking.temperature,
            top_p=asking.top_p,
            max_tokens=asking.max_tokens,
            ignore_eos=asking.ignore_eos,
            seed=asking.seed + number,
            tenant=chat if load.num_turns > 1 else None,  # or it would find pages of the run before
        )

    @staticmethod
    def _note(request: Request, answered: Answered, now: float) -> bool:
        """What a step brought a request, and whether it has ended."""
        if answered.first is None and request.num_outputs:
            answered.first = now - answered.sent
        if request.finished:
            answered.seconds, answered.num_tokens = now - answered.sent, request.num_outputs
            answered.num_cached = request.num_cached
            answered.error = request.error
        return request.finished

    def _on_device(self) -> AbstractContextManager[object]:
        device = self.engine.runner.device
        return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _drafting(total: Speculation) -> DraftingFigures | None:
    num_drafts = total.drafted_at[0] if total.drafted_at else 0
    if not num_drafts:
        return None
    return DraftingFigures(num_drafts, total.drafted, total.accepted, total.accepted_at, "the engine")


@dataclass
class ServerSide:
    """A server in a process of its own, asked over HTTP with the client of `outrider bench serve`."""

    name: str
    url: str
    asking: Asking
    num_runs: int = 0

    def run(self, prompts: Sequence[PromptText], load: Load) -> LoadOutcome:
        self.num_runs += 1
        return asyncio.run(self._run(prompts, load))

    async def _run(self, prompts: Sequence[PromptText], load: Load) -> LoadOutcome:
        async with connect(self.url, None, TIMEOUT_SECONDS) as client:
            asking = replace(self.asking, model=await served_model(client, None))
            if load.num_turns > 1:
                asking = replace(asking, chat=str(self.num_runs))
            return await run_load(client, asking, prompts, load, None)
