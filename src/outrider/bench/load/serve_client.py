"""One request to any OpenAI-compatible server: what was sent, when each part of the answer came, and how it ended."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from outrider.bench.load.streaming import Streamed, Streams
from outrider.bench.prompts import PromptText

MAX_KIND = 100  # characters of an error's kind


@dataclass(frozen=True)
class Asking:
    """What every request asks for."""

    model: str
    is_chat: bool
    max_tokens: int
    temperature: float
    seed: int
    ignore_eos: bool = False
    top_p: float = 1.0
    sends_seed: bool = True  # otherwise the server draws as it likes
    chat: str | None = None  # of which this is a turn: pages are shared with its other turns alone, and ids are wanted
    stream_options: dict[str, bool] | None = None

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.is_chat else "/v1/completions"

    def body(self, prompt: PromptText, number: int) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self.model,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "stream": True,
        }
        if self.sends_seed:
            body["seed"] = self.seed + number
        if self.stream_options is not None:
            body["stream_options"] = self.stream_options
        if self.ignore_eos:
            body["ignore_eos"] = True
        if self.top_p < 1:
            body["top_p"] = self.top_p
        if self.chat is not None:
            body |= {"cache_salt": self.chat, "return_token_ids": True}
        if not self.is_chat:
            return body | {"prompt": list(prompt.ids) or prompt.text}
        if prompt.ids:
            raise ValueError("a chat cannot be prompt_token_ids: use --endpoint completions")
        return body | {"messages": [{"role": "user", "content": prompt.text}]}


@dataclass
class Answered:
    """One request, from being sent to its end. Times are seconds, counted from `sent`."""

    number: int
    sent: float  # by time.perf_counter()
    first: float | None = None  # until the first text
    seconds: float = 0.0  # until the last text; until the end where there was none
    chunk_gaps: list[float] = field(default_factory=list)  # between two chunks that held text
    token_gaps: list[tuple[float, int]] = field(default_factory=list)  # and over how many tokens each gap went
    num_prompt_tokens: int | None = None  # None: the server gave no usage
    num_tokens: int | None = None
    num_cached: int | None = None  # of the prompt's, found in pages
    token_ids: list[int] = field(default_factory=list)  # of the answer, where they were asked for
    speculation: dict[str, Any] | None = None  # as vLLM reports it
    error: str | None = None  # its kind

    @property
    def token_seconds(self) -> float | None:
        """From one token to the next, after the first: time per *output token*, whatever chunks they came in."""
        if self.first is None or self.num_tokens is None or self.num_tokens < 2:
            return None
        return (self.seconds - self.first) / (self.num_tokens - 1)


async def ask(streams: Streams, asking: Asking, prompt: PromptText, number: int) -> Answered:
    """Never raises for what a server may do: it is in the record."""
    answered = Answered(number, time.perf_counter())
    try:
        streamed = await streams.post(asking.path, asking.body(prompt, number))
    except TimeoutError:
        answered.error = "timeout"
    except ConnectionError as error:
        answered.error = "no connection" if isinstance(error, ConnectionRefusedError) else "the connection broke"
    except OSError:
        answered.error = "no connection"
    else:
        if streamed.status != 200:
            answered.error = kind_of(streamed.status, streamed.body)
        else:
            answered.error = _read(streamed, answered)
    if answered.first is None or answered.error is not None:
        answered.seconds = time.perf_counter() - answered.sent
    return answered


def _read(streamed: Streamed, answered: Answered) -> str | None:
    """Fills the record; what went wrong, if anything."""
    reader, splitter = StreamReader(answered), EventSplitter()
    found = [(when, data) for when, part in streamed.parts for data in splitter.feed(part)]
    found += [(streamed.parts[-1][0], data) for data in splitter.end()]
    for when, data in found:
        if data == "[DONE]":
            return reader.verdict(is_done=True)
        try:
            chunk = json.loads(data)
        except ValueError:
            return "a chunk that is no JSON"
        error = reader.read(chunk, when - answered.sent)
        if error is not None:
            return error
    return reader.verdict(is_done=False)


class EventSplitter:
    """The data of server-sent events, however the bytes were cut. Lines are split as the standard says and not as
    Python does: text may hold U+2028."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, part: bytes) -> list[str]:
        """The events that these bytes complete."""
        found = []
        *lines, self._rest = (self._rest + part).replace(b"\r\n", b"\n").split(b"\n")
        for line in lines:
            self._data += _data(line)
            if not line and self._data:
                found.append("\n".join(self._data))
                self._data = []
        return found

    def end(self) -> list[str]:
        """The last event, which may lack its empty line."""
        return self.feed(b"\n\n")


async def events(parts: AsyncIterator[bytes]) -> AsyncIterator[str]:
    splitter = EventSplitter()
    async for part in parts:
        for event in splitter.feed(part):
            yield event
    for event in splitter.end():
        yield event


def _data(line: bytes) -> list[str]:
    name, _, value = line.partition(b":")
    is_data = name in (b"data", b"error")  # llama.cpp has had errors in a field of their own
    return [value.removeprefix(b" ").decode(errors="replace")] if is_data else []


class StreamReader:
    """Chunks in, times and counts out."""

    def __init__(self, answered: Answered) -> None:
        self._answered = answered
        self._last: float | None = None
        self._num_known = 0  # tokens that the last text's usage spoke of
        self._has_ended = False

    def read(self, chunk: Any, now: float) -> str | None:
        """What the chunk says is wrong, if it does."""
        if not isinstance(chunk, dict):
            return "a chunk that is no object"
        if "error" in chunk or "choices" not in chunk:
            return f"error in the stream: {_name_of(chunk)}"
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self._answered.num_prompt_tokens = usage.get("prompt_tokens")
            self._answered.num_tokens = usage.get("completion_tokens")
            details = usage.get("prompt_tokens_details")
            self._answered.num_cached = details.get("cached_tokens") if isinstance(details, dict) else None
        made = (chunk.get("metrics") or {}).get("speculative_decoding")
        self._answered.speculation = made or self._answered.speculation
        choices = chunk["choices"]
        if any(has_text(choice) for choice in choices):
            self._text_came(now, usage)
        self._has_ended |= any(choice.get("finish_reason") for choice in choices)
        self._answered.token_ids += [token for choice in choices for token in choice.get("token_ids") or ()]
        return None

    def verdict(self, *, is_done: bool) -> str | None:
        return None if is_done or self._has_ended else "the stream ended early"

    def _text_came(self, now: float, usage: Any) -> None:
        answered = self._answered
        count = usage.get("completion_tokens") if isinstance(usage, dict) else None
        if self._last is None:
            answered.first = now
        else:
            answered.chunk_gaps.append(now - self._last)
            if count is not None and count > self._num_known:
                answered.token_gaps.append((now - self._last, count - self._num_known))
        self._num_known = count or self._num_known
        self._last = answered.seconds = now


def has_text(choice: dict[str, Any]) -> bool:
    """Whether a choice of a chunk holds anything that the model wrote; a chunk with the role alone does not."""
    delta = choice.get("delta") or {}
    parts = (choice.get("text"), delta.get("content"), delta.get("reasoning_content"), delta.get("reasoning"))
    return any(parts) or bool(delta.get("tool_calls"))


def kind_of(status: int, body: bytes) -> str:
    try:
        name = _name_of(json.loads(body))
    except ValueError:
        name = ""
    return f"HTTP {status} {name}".strip()


def _name_of(content: Any) -> str:
    """What an error calls itself: its code, else its type, else the beginning of its message."""
    error = content.get("error", content) if isinstance(content, dict) else content
    if not isinstance(error, dict):
        return str(error)[:MAX_KIND]
    for name in ("code", "type", "message", "detail"):
        if isinstance(error.get(name), str) and error[name]:
            return str(error[name])[:MAX_KIND]
    return ""
