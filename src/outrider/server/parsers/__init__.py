"""Streaming parsers for reasoning and tool calls: text in any pieces to events. Importing the package registers
every form; `answer_parser` makes the parser of one answer, `choose` reads from a checkpoint which forms it uses."""

# they register themselves
from outrider.server.parsers import deepseek, harmony, hermes, llama3, mistral, qwen_xml  # noqa: F401
from outrider.server.parsers.answer import AnswerParser, ParserChoice, ParserNames, answer_parser, choose
from outrider.server.parsers.base import (
    Event,
    Parser,
    Reasoning,
    Text,
    ToolArguments,
    ToolCallBegin,
    ToolCallEnd,
    merged,
)
from outrider.server.parsers.forced import WantedCalls, special_ids
from outrider.server.parsers.reasoning import reasoning_parsers
from outrider.server.parsers.tool_calls import ToolOptions, tool_parsers

__all__ = [
    "AnswerParser",
    "Event",
    "Parser",
    "ParserChoice",
    "ParserNames",
    "Reasoning",
    "Text",
    "ToolArguments",
    "ToolCallBegin",
    "ToolCallEnd",
    "ToolOptions",
    "WantedCalls",
    "answer_parser",
    "choose",
    "merged",
    "reasoning_parsers",
    "special_ids",
    "tool_parsers",
]
