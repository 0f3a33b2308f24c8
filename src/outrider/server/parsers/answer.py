"""From the text of an answer to its events: reasoning first, then calls in what is left.
Which parsers to use is named by the user, or read from the checkpoint's chat template and special tokens."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.registry import Registry
from outrider.server.parsers.base import Event, Parser, Text
from outrider.server.parsers.reasoning import ReasoningParser, reasoning_parsers
from outrider.server.parsers.tool_calls import ToolOptions, tool_parsers
from outrider.tokenizer import Tokenizer

AUTO, NONE = "auto", "none"
# what a chat template that asks for the form holds
TOOL_MARKS = {
    "hermes": ("<tool_call>",),
    "llama3": ("<|python_tag|>", '{"name": function name, "parameters":'),
    "mistral": ("[TOOL_CALLS]",),
    "deepseek": ("<｜tool▁calls▁begin｜>",),
    "qwen3_coder": ("<function=",),
    "harmony": ("<|channel|>",),
}
REASONING_MARKS = {
    "think": ("<think>", "</think>"),
    "mistral": ("[THINK]", "[/THINK]"),
    "harmony": ("<|channel|>",),
}
REFINED = {"qwen3_coder": "hermes"}  # shares the marker of the other, and is meant where both are found
# forms that share a marker with one of ours and are not understood: XML of GLM, DSML of DeepSeek V3.2
FOREIGN_MARKS = ("<arg_key>", "｜DSML｜")


@dataclass(frozen=True)
class ParserNames:
    """None: the answer is left as it is."""

    tools: str | None = None
    reasoning: str | None = None


@dataclass(frozen=True)
class ParserChoice:
    """A parser, or none, and why."""

    name: str | None
    reason: str


def choose(names: ParserNames, tokenizer: Tokenizer | None) -> tuple[ParserChoice, ParserChoice]:
    """The parsers of tool calls and of reasoning: those asked for, or for "auto" what the checkpoint tells."""
    return _tools(names.tools, tokenizer), _reasoning(names.reasoning, tokenizer)


def _tools(name: str | None, tokenizer: Tokenizer | None) -> ParserChoice:
    if name != AUTO:
        return _named(name, tool_parsers)
    template = tokenizer.template_text(tools=True) if tokenizer is not None else None
    if template is None or tokenizer is None:
        return ParserChoice(None, "there is no chat template")
    foreign = [mark for mark in FOREIGN_MARKS if mark in template]
    if foreign:
        return ParserChoice(None, f"the chat template holds {foreign[0]}, which no parser reads")
    choice = _by_marks(TOOL_MARKS, template, "the chat template")
    if choice.name is None and "tools" in template:  # the form may be left to the model: its special tokens show it
        tokens = " ".join(mark for marks in TOOL_MARKS.values() for mark in marks if tokenizer.special_id(mark))
        return _by_marks(TOOL_MARKS, tokens, "the vocabulary") if tokens else choice
    return choice


def _reasoning(name: str | None, tokenizer: Tokenizer | None) -> ParserChoice:
    """A vocabulary does not tell whether a checkpoint reasons: only the template does."""
    if name != AUTO:
        return _named(name, reasoning_parsers)
    template = tokenizer.template_text() if tokenizer is not None else None
    if template is None:
        return ParserChoice(None, "there is no chat template")
    return _by_marks(REASONING_MARKS, template, "the chat template")


def _named(name: str | None, known: Registry[Any]) -> ParserChoice:
    if name is None or name == NONE:
        return ParserChoice(None, "none was asked for")
    known[name]  # an unknown name is refused with the known ones
    return ParserChoice(name, "it was asked for")


def _by_marks(known: Mapping[str, Sequence[str]], text: str, where: str) -> ParserChoice:
    found = {name: mark for name, marks in known.items() for mark in reversed(marks) if mark in text}
    for refined, other in REFINED.items():
        if refined in found:
            found.pop(other, None)
    if not found:
        return ParserChoice(None, f"{where} holds no marker that is known")
    if len(found) > 1:
        return ParserChoice(None, f"{where} fits several: {', '.join(sorted(found))}; name one of them")
    ((name, mark),) = found.items()
    return ParserChoice(name, f"{where} holds {mark}")


class AnswerParser:
    """One answer's text through its reasoning parser and its tool parser; either may be missing."""

    def __init__(self, reasoning: ReasoningParser | None = None, tools: Parser | None = None) -> None:
        self._reasoning = reasoning
        self._tools = tools

    @property
    def is_plain(self) -> bool:
        """Whether text comes out as it goes in."""
        return self._reasoning is None and self._tools is None

    @property
    def thinks(self) -> bool:
        """Whether what was fed last is reasoning."""
        return self._reasoning is not None and self._reasoning.thinks

    def feed(self, text: str) -> list[Event]:
        if self._reasoning is not None:
            return self._through_tools(self._reasoning.feed(text))
        return self._through_tools([Text(text)] if text else [])

    def finish(self) -> list[Event]:
        events = [] if self._reasoning is None else self._through_tools(self._reasoning.finish())
        return events if self._tools is None else events + self._tools.finish()

    def _through_tools(self, events: list[Event]) -> list[Event]:
        if self._tools is None:
            return events
        parsed: list[Event] = []
        for event in events:
            parsed += self._tools.feed(event.text) if isinstance(event, Text) else [event]
        return parsed


def answer_parser(names: ParserNames, prompt: str = "", options: ToolOptions | None = None) -> AnswerParser:
    """A fresh parser for one answer to a prompt (its text or the end of it, which may have opened the reasoning)."""
    reasoning = tools = None
    if names.reasoning is not None:
        kind = reasoning_parsers[names.reasoning]
        reasoning = kind(opened=kind.opened_by(prompt))
    if names.tools is not None:
        tools = tool_parsers[names.tools](options)
    return AnswerParser(reasoning, tools)
