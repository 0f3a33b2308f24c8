"""From the text of an answer to its events: reasoning first, then calls in what is left.
Which parsers to use is named by the user, or read from the checkpoint's chat template and architecture."""

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.server.parsers.base import Event, Parser, Text
from outrider.server.parsers.reasoning import reasoning_parsers
from outrider.server.parsers.tool_calls import ToolOptions, tool_parsers

# what a chat template that asks for the form holds
TOOL_MARKS = {
    "hermes": ("<tool_call>",),
    "llama3": ("<|python_tag|>", '{"name": function name, "parameters":'),
    "mistral": ("[TOOL_CALLS]",),
    "deepseek": ("<｜tool▁calls▁begin｜>",),
}
# forms that share a marker with one of ours and are not understood: XML of Qwen3-Coder and GLM, DSML of DeepSeek V3.2
FOREIGN_MARKS = ("<function=", "<arg_key>", "｜DSML｜")
# how the names of architectures begin
ARCHITECTURES = {
    "Qwen": "hermes",
    "Llama": "llama3",
    "Mistral": "mistral",
    "Ministral": "mistral",
    "Deepseek": "deepseek",
}
REASONING_MARKS = {"think": ("<think>", "</think>"), "mistral": ("[THINK]", "[/THINK]")}


@dataclass(frozen=True)
class ParserNames:
    """None: the answer is left as it is."""

    tools: str | None = None
    reasoning: str | None = None


def choose_tools(template: str | None, architectures: Sequence[str] = ()) -> str | None:
    """The form a template speaks of; without a template, the form usual for the architecture."""
    if template is None:
        found = {form for start, form in ARCHITECTURES.items() for name in architectures if name.startswith(start)}
    elif any(mark in template for mark in FOREIGN_MARKS):
        return None
    else:
        found = {form for form, marks in TOOL_MARKS.items() if any(mark in template for mark in marks)}
    return _only(found, "tool parser")


def choose_reasoning(template: str | None) -> str | None:
    """An architecture does not tell whether a checkpoint reasons: only the template does."""
    found = {name for name, marks in REASONING_MARKS.items() if any(mark in (template or "") for mark in marks)}
    return _only(found, "reasoning parser")


def _only(found: set[str], kind: str) -> str | None:
    if len(found) > 1:
        raise ValueError(f"the checkpoint fits more than one {kind} ({', '.join(sorted(found))}); name one of them")
    return next(iter(found), None)


def choose(names: ParserNames, template: str | None, architectures: Sequence[str] = ()) -> ParserNames:
    """Puts the checkpoint's own parsers where "auto" was asked for, and refuses unknown names."""
    tools = choose_tools(template, architectures) if names.tools == "auto" else names.tools
    reasoning = choose_reasoning(template) if names.reasoning == "auto" else names.reasoning
    if tools is not None:
        tool_parsers[tools]  # an unknown name is refused with the known ones
    if reasoning is not None:
        reasoning_parsers[reasoning]
    return ParserNames(tools, reasoning)


class AnswerParser:
    """One answer's text through its reasoning parser and its tool parser; either may be missing."""

    def __init__(self, reasoning: Parser | None = None, tools: Parser | None = None) -> None:
        self._reasoning = reasoning
        self._tools = tools

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
    """A fresh parser for one answer to a prompt (its rendered text, which may have opened the reasoning)."""
    reasoning = tools = None
    if names.reasoning is not None:
        kind = reasoning_parsers[names.reasoning]
        reasoning = kind(opened=kind.opened_by(prompt))
    if names.tools is not None:
        tools = tool_parsers[names.tools](options)
    return AnswerParser(reasoning, tools)
