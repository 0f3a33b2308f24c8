"""Streaming parsers for reasoning and tool calls: text in any pieces to events. Importing the package registers
every form; `answer_parser` makes the parser of one answer, `choose` reads from a checkpoint which forms it uses."""

from outrider.server.parsers import deepseek, hermes, llama3, mistral  # noqa: F401  (they register themselves)
from outrider.server.parsers.answer import AnswerParser, ParserNames, answer_parser, choose
from outrider.server.parsers.base import (
    Event,
    Parser,
    Reasoning,
    Text,
    ToolArguments,
    ToolCallBegin,
    ToolCallEnd,
)
from outrider.server.parsers.reasoning import reasoning_parsers
from outrider.server.parsers.tool_calls import ToolOptions, tool_parsers

__all__ = [
    "AnswerParser",
    "Event",
    "Parser",
    "ParserNames",
    "Reasoning",
    "Text",
    "ToolArguments",
    "ToolCallBegin",
    "ToolCallEnd",
    "ToolOptions",
    "answer_parser",
    "choose",
    "reasoning_parsers",
    "tool_parsers",
]
