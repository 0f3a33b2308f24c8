"""The clients of a soak: chats that go on and on, clients that leave or are killed, answers bound by grammars,
several answers at once, and the same questions again and again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from outrider.bench.load.serve_client import events, kind_of
from outrider.bench.prompts import CHAT, REPETITION
from outrider.sampling_params import accept_length

if TYPE_CHECKING:
    import httpx

NUM_CHATS = 6
PATH = "/v1/chat/completions"
TURN_TOKENS = 40
BURST_EVERY = 8  # of the requests for several answers, one asks for many
CHAT_LEN = 1200  # characters after which a chat begins anew
# A client that does nothing but ask and read: cheap to start, and killed before it is done.
KILLED_CLIENT = """
import socket, sys
host, port, body = sys.argv[1], int(sys.argv[2]), sys.argv[3].encode()
connection = socket.create_connection((host, port))
head = f"POST /v1/chat/completions HTTP/1.1\\r\\nHost: {host}:{port}\\r\\nContent-Type: application/json\\r\\n"
connection.sendall(head.encode() + f"Content-Length: {len(body)}\\r\\n\\r\\n".encode() + body)
while connection.recv(4096):
    print("read", flush=True)
"""


@dataclass(frozen=True)
class ReplayedQuestion:
    """Asked once at the start, and again until the end: the answer may not change."""

    messages: tuple[str, ...]
    options: tuple[tuple[str, Any], ...]

    def body(self) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": text} for text in self.messages], **dict(self.options)}


QUESTIONS = tuple(
    ReplayedQuestion((text,), (("temperature", heat), ("seed", number), ("max_tokens", 64)))
    for number, text in enumerate(CHAT + REPETITION[1:3])
    for heat in ((0, 0.8)[number % 2],)
)


@dataclass
class Replay:
    """One answer to one of the questions."""

    when: float
    question: int
    text: str
    num_rounds: int
    num_accepted: int


@dataclass
class SoakTally:
    """What happened. Whoever finds something wrong writes it here and goes on."""

    done: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    replays: list[Replay] = field(default_factory=list)
    num_prompt_tokens: int = 0  # of the chats' turns after the first
    num_repeated_tokens: int = 0  # of these: prompt and answer of the turn before

    def wrong(self, what: str) -> None:
        self.errors[what[:200]] += 1


@dataclass
class Crowd:
    """All clients of one soak."""

    client: httpx.AsyncClient
    address: tuple[str, int]
    until: float  # by time.monotonic()
    seed: int = 0
    tally: SoakTally = field(default_factory=SoakTally)

    @property
    def has_time(self) -> bool:
        return time.monotonic() < self.until

    async def run(self) -> None:
        actors: list[Callable[[random.Random], Coroutine[Any, Any, None]]] = [self._chat] * NUM_CHATS
        actors += [self._leave, self._be_killed, self._be_bound, self._ask_for_several, self._replay]
        await asyncio.gather(
            *(self._again(actor, random.Random(self.seed + number)) for number, actor in enumerate(actors))
        )

    async def _again(self, actor: Callable[[random.Random], Coroutine[Any, Any, None]], source: random.Random) -> None:
        import httpx

        name = actor.__name__.strip("_")
        while self.has_time:
            try:
                await actor(source)
            except (httpx.HTTPError, KeyError, IndexError, ValueError, OSError) as error:
                self.tally.wrong(f"{name}: {type(error).__name__} {error}")
                await asyncio.sleep(0.2)
            self.tally.done[name] += 1

    # who does what

    async def _chat(self, source: random.Random) -> None:
        """Turn after turn, everything said so far sent again; one chat, until it is long or time is up."""
        messages: list[dict[str, str]] = []
        known = 0
        while self.has_time and sum(len(message["content"]) for message in messages) < CHAT_LEN:
            messages.append({"role": "user", "content": source.choice((*CHAT, "Go on.", "Why?", "And then?"))})
            options = {"temperature": source.choice((0, 0.7)), "seed": source.randrange(2**31)}
            answer = await self.stream({"messages": messages, "max_tokens": TURN_TOKENS, **options})
            if answer is None:
                return
            usage = answer.usage or {}
            if known:
                self.tally.num_prompt_tokens += usage["prompt_tokens"]
                self.tally.num_repeated_tokens += known
            known = usage["prompt_tokens"] + usage["completion_tokens"]
            messages.append({"role": "assistant", "content": answer.text})
            self.tally.done["turns"] += 1

    async def _leave(self, source: random.Random) -> None:
        """Goes away in the middle of a stream, or while it waits for a whole answer."""
        import httpx

        body = {"messages": _ask(source.choice(CHAT)), "max_tokens": 300, "ignore_eos": True}
        if source.random() < 0.3:
            with contextlib.suppress(httpx.ReadTimeout):
                await self.client.post(PATH, json=body, timeout=httpx.Timeout(10, read=source.uniform(0.01, 0.3)))
            return
        num_chunks = source.randrange(12)
        async with self.client.stream("POST", PATH, json=body | {"stream": True}) as response:
            async for _ in response.aiter_raw():
                num_chunks -= 1
                if num_chunks <= 0:
                    break

    async def _be_killed(self, source: random.Random) -> None:
        """A process of its own that reads a stream, until it is killed without a word."""
        body = {"messages": _ask(source.choice(CHAT)), "max_tokens": 300, "ignore_eos": True, "stream": True}
        command = [sys.executable, "-S", "-c", KILLED_CLIENT, *map(str, self.address), json.dumps(body)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            for _ in range(source.randrange(1, 4)):
                await asyncio.to_thread(process.stdout.readline)
            process.send_signal(signal.SIGKILL)
        if process.returncode != -signal.SIGKILL:
            self.tally.wrong("be_killed: the client ended before it was killed")
        await asyncio.sleep(source.uniform(0.5, 1.5))

    async def _be_bound(self, source: random.Random) -> None:
        """Grammars and tools: what comes back must be what was asked for."""
        number = source.randrange(3)
        body: dict[str, Any] = {"messages": _ask(source.choice(CHAT)), "seed": source.randrange(2**31)}
        if number == 0:
            answer = await self.stream(body | {"max_tokens": 20, "guided_choice": ["yes", "no", "perhaps"]})
            if answer is not None and answer.text not in ("yes", "no", "perhaps"):
                self.tally.wrong(f"be_bound: {answer.text!r} is no choice")
        elif number == 1:
            answer = await self.stream(body | {"max_tokens": 30, "guided_regex": r"[a-z]{3,8}-[0-9]{2,4}"})
            if answer is not None and answer.reason == "stop" and "-" not in answer.text:
                self.tally.wrong(f"be_bound: {answer.text!r} does not match")
        else:
            schema = {"type": "object", "properties": {"ok": {"type": "boolean"}, "word": {"enum": ["a", "b"]}}}
            strict = schema | {"required": ["ok", "word"], "additionalProperties": False}
            form = {"type": "json_schema", "json_schema": {"name": "x", "schema": strict}}
            answer = await self.stream(body | {"max_tokens": 60, "response_format": form, "tools": [_TOOL]})
            if answer is not None and answer.reason == "stop" and set(json.loads(answer.text)) != {"ok", "word"}:
                self.tally.wrong(f"be_bound: {answer.text!r} is against the schema")

    async def _ask_for_several(self, source: random.Random) -> None:
        """A few short ones, or many long ones, which take the pages of everybody else."""
        body = {"messages": _ask(source.choice(CHAT)), "n": 3, "max_tokens": 24, "logprobs": True, "top_logprobs": 2}
        if self.tally.done["ask_for_several"] % BURST_EVERY == 0:
            body |= {"n": 8, "max_tokens": 280, "ignore_eos": True}
        elif source.random() < 0.5:
            body |= {"tools": [_TOOL], "tool_choice": "auto"}
        response = await self.client.post(PATH, json=body | {"seed": source.randrange(2**31)})
        if response.status_code != 200:
            self.tally.wrong(f"ask_for_several: {kind_of(response.status_code, response.content)}")
            return
        choices = response.json()["choices"]
        rows = sum(len(choice["logprobs"]["content"]) for choice in choices)
        if len(choices) != body["n"] or rows != response.json()["usage"]["completion_tokens"]:
            self.tally.wrong("ask_for_several: answers or logprobs are missing")
        await asyncio.sleep(source.uniform(0, 0.5))

    async def _replay(self, source: random.Random) -> None:
        """All questions once, in another order every time."""
        for number in source.sample(range(len(QUESTIONS)), len(QUESTIONS)):
            await self.ask_again(number)
            await asyncio.sleep(0.05)

    async def ask_again(self, number: int) -> None:
        answer = await self.stream(QUESTIONS[number].body())
        if answer is None:
            return
        made = answer.speculation or {}
        rounds, accepted = made.get("num_spec_steps", 0), made.get("num_accepted_draft_tokens", 0)
        self.tally.replays.append(Replay(time.monotonic(), number, answer.text, rounds, accepted))

    # asking

    async def stream(self, body: dict[str, Any]) -> StreamedChat | None:
        """The whole of a stream; None, and a note of it, where it did not end well."""
        options = {"stream": True, "stream_options": {"include_usage": True}}
        answer = StreamedChat()
        async with self.client.stream("POST", PATH, json=body | options) as response:
            if response.status_code != 200:
                self.tally.wrong(f"stream: {kind_of(response.status_code, await response.aread())}")
                return None
            async for event in events(response.aiter_raw()):
                if event == "[DONE]":
                    answer.is_done = True
                else:
                    answer.add(json.loads(event))
        if not answer.is_done or answer.error is not None or answer.reason is None or answer.usage is None:
            self.tally.wrong(f"stream: ended badly ({answer.error or answer.reason})")
            return None
        return answer


@dataclass
class StreamedChat:
    text: str = ""
    reason: str | None = None
    usage: dict[str, Any] | None = None
    speculation: dict[str, Any] | None = None
    error: str | None = None
    is_done: bool = False

    def add(self, chunk: dict[str, Any]) -> None:
        if "error" in chunk:
            self.error = str(chunk["error"].get("code"))
            return
        for choice in chunk["choices"]:
            self.text += choice["delta"].get("content") or ""
            self.reason = choice.get("finish_reason") or self.reason
        self.usage = chunk.get("usage") or self.usage
        self.speculation = (chunk.get("metrics") or {}).get("speculative_decoding") or self.speculation


_TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a town",
        "parameters": {"type": "object", "properties": {"town": {"type": "string"}}},
    },
}


def _ask(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def mean_accept_lengths(*several: Sequence[Replay]) -> list[float]:
    """Of each of these, over the questions that all of them have been asked: texts differ in how well they are drafted,
    and whoever is in a hurry asks some of them more often. 0 where nothing was drafted."""
    common = set.intersection(*({replay.question for replay in replays if replay.num_rounds} for replays in several))
    found = []
    for replays in several:
        each = [[replay for replay in replays if replay.question == question] for question in common]
        lengths = [
            accept_length(sum(one.num_rounds for one in group), sum(one.num_accepted for one in group))
            for group in each
        ]
        found.append(sum(lengths) / len(lengths) if lengths else 0.0)
    return found
