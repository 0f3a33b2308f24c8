"""From the text of an answer to the assistant's message: content, reasoning, tool calls.
A whole message is the sum of its deltas, so streamed and whole answers cannot differ."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.engine.request import Request
from outrider.llm import LLM
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
)
from outrider.server.parsers.answer import REASONING_MARKS, TOOL_MARKS
from outrider.tokenizer import Tokenizer

Delta = dict[str, Any]
_TAIL = 16  # tokens at the end of a prompt that show whether it has opened the reasoning


@dataclass(frozen=True)
class Reading:
    """How answers of one request are read."""

    names: ParserNames
    tool_names: frozenset[str]
    marked: bool  # the text holds special tokens, because a parser's markers are some

    @classmethod
    def of(cls, tokenizer: Tokenizer | None, names: ParserNames, tool_names: Iterable[str]) -> Reading:
        tool_names = frozenset(tool_names)
        names = names if tool_names else ParserNames(None, names.reasoning)
        marks = [*TOOL_MARKS.get(names.tools or "", ()), *REASONING_MARKS.get(names.reasoning or "", ())]
        marked = tokenizer is not None and any(_is_special(tokenizer, mark) for mark in marks)
        return cls(names, tool_names, marked)


class MessageReader:
    """Makes deltas of one answer's text as it comes."""

    def __init__(self, llm: LLM, reading: Reading, request: Request) -> None:
        self._tokenizer, self._end_ids = llm.tokenizer, llm.end_ids
        self._marked = reading.marked
        prompt = ""
        if llm.tokenizer is not None:
            prompt = llm.tokenizer.decode(request.prompt[-_TAIL:], skip_special_tokens=False)
        options = ToolOptions(reading.tool_names)
        self._parser: AnswerParser = answer_parser(reading.names, prompt, options)
        self._has_calls = False

    def read(self, text: str, token_ids: Sequence[int], reason: str | None) -> tuple[list[Delta], str | None]:
        """Deltas, and why the answer ended, as OpenAI has it; `reason` is the engine's, None before the end."""
        if reason is not None:
            text = self._without_end(text, token_ids)
        events = self._parser.feed(text)
        if reason is not None:
            events += self._parser.finish()
        self._has_calls |= any(isinstance(event, ToolCallBegin) for event in events)
        deltas = [delta for delta in map(_delta, events) if delta is not None]
        return deltas, "tool_calls" if reason == "stop" and self._has_calls else reason

    def _without_end(self, text: str, token_ids: Sequence[int]) -> str:
        """Where special tokens are kept for a parser's sake, the one that ends the text is kept too."""
        if not self._marked or not token_ids or token_ids[-1] not in self._end_ids:
            return text
        assert self._tokenizer is not None
        return text.removesuffix(self._tokenizer.token(token_ids[-1]))


def message_of(deltas: Iterable[Delta]) -> dict[str, Any]:
    """The sum of all deltas."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: dict[int, dict[str, Any]] = {}
    for delta in deltas:
        for name in ("content", "reasoning_content"):
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
        return {"reasoning_content": event.text}
    if isinstance(event, ToolCallBegin):
        function = {"name": event.name, "arguments": ""}
        return {"tool_calls": [{"index": event.index, "id": event.id, "type": "function", "function": function}]}
    if isinstance(event, ToolArguments):
        return {"tool_calls": [{"index": event.index, "function": {"arguments": event.text}}]}
    return None


def _is_special(tokenizer: Tokenizer, mark: str) -> bool:
    ids = tokenizer.encode(mark, add_special_tokens=False)
    return any(tokenizer.is_silent(token, skip_special_tokens=True) for token in ids)
