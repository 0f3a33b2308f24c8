"""From the text of an answer to the assistant's message: content, reasoning, tool calls.
A whole message is the sum of its deltas, so streamed and whole answers cannot differ."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from outrider.sampling_params import PROMPT_TAIL
from outrider.server.parsers import (
    AnswerParser,
    Event,
    ParserNames,
    Reasoning,
    Text,
    ToolArguments,
    ToolCallBegin,
    ToolOptions,
    answer_parser,
    merged,
)
from outrider.server.protocol import Piece
from outrider.tokenizer import Tokenizer

Delta = dict[str, Any]


@dataclass(frozen=True)
class AnswerReading:
    """How answers of one request are read."""

    names: ParserNames
    tools: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)  # name -> schema of its arguments
    shown: tuple[int, ...] = ()  # special tokens that the text holds all the same, because they are markers
    max_calls: int | None = None  # calls beyond that are left out
    is_named: bool = False  # the client has named the function to be called


class MessageReader:
    """Makes deltas of one answer's text as it comes, token by token, so that no way of cutting it matters."""

    def __init__(self, tokenizer: Tokenizer | None, reading: AnswerReading, prompt_ids: Sequence[int]) -> None:
        self._reading = reading
        prompt = ""
        if tokenizer is not None:
            prompt = tokenizer.decode(prompt_ids[-PROMPT_TAIL:], skip_special_tokens=False)
        options = ToolOptions(frozenset(reading.tools), reading.tools)
        self._parser: AnswerParser = answer_parser(reading.names, prompt, options)
        self._has_calls = False
        self.num_reasoning_tokens = 0

    @property
    def reasons(self) -> bool:
        """Whether reasoning is told apart from the rest."""
        return self._reading.names.reasoning is not None

    def read(self, made: Piece, reason: str | None) -> tuple[list[Delta], str | None]:
        """Deltas, and why the answer ended, as OpenAI has it; `reason` is the engine's, None before the end."""
        if self._parser.is_plain:  # most answers: nothing to be told apart, and no need to go token by token
            return [{"content": made.text}] if made.text else [], reason
        begin = made.text_ends[-1] - len(made.text) if made.text_ends else 0
        events: list[Event] = []
        for start, end in pairwise([begin, *made.text_ends]):
            thought = self._parser.thinks
            events += self._parser.feed(made.text[start - begin : end - begin])
            self.num_reasoning_tokens += thought or self._parser.thinks
        if reason is not None:
            events += self._parser.finish()
        self._has_calls |= any(isinstance(event, ToolCallBegin) for event in events)
        deltas = [delta for delta in map(_delta, merged(filter(self._is_wanted, events))) if delta is not None]
        # OpenAI answers "stop" where the function was named by the client
        is_call = reason == "stop" and self._has_calls and not self._reading.is_named
        return deltas, "tool_calls" if is_call else reason

    def _is_wanted(self, event: Event) -> bool:
        most = self._reading.max_calls
        return most is None or isinstance(event, Text | Reasoning) or event.index < most


def message_of(deltas: Iterable[Delta]) -> dict[str, Any]:
    """The sum of all deltas."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for name in ("content", "reasoning_content", "reasoning"):
            if name in delta:
                message[name] = message.get(name, "") + delta[name]
        for call in delta.get("tool_calls", ()):
            known = calls.setdefault(call["index"], {"function": {"name": "", "arguments": ""}})
            known |= {name: call[name] for name in ("id", "type") if name in call}
            for name, text in call["function"].items():
                known["function"][name] += text
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
        message["content"] = message["content"] or None
    return message


def _delta(event: Event) -> Delta | None:
    if isinstance(event, Text):
        return {"content": event.text}
    if isinstance(event, Reasoning):
        return {"reasoning_content": event.text, "reasoning": event.text}  # the older name, and the newer
    if isinstance(event, ToolCallBegin):
        function = {"name": event.name, "arguments": ""}
        return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
    if isinstance(event, ToolArguments):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    return None
