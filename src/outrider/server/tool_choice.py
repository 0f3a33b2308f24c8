"""What a chat asks of tools: which may be called, which call must come, and how that binds the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from outrider.sampling_params import Guided, SamplingParams
from outrider.server.errors import bad_request
from outrider.server.messages import AnswerReading
from outrider.server.parsers import ParserNames, WantedCalls, reasoning_parsers, special_ids, tool_parsers
from outrider.server.schema import ChatRequest, NamedTool, Tool
from outrider.tokenizer import Tokenizer


def offered(body: ChatRequest) -> Sequence[Tool]:
    """The tools that the model is told of."""
    return (body.tools or []) if body.tool_choice != "none" else []


def reading_of(tokenizer: Tokenizer | None, parsers: ParserNames, body: ChatRequest) -> AnswerReading:
    tools = {tool.function.name: tool.function.parameters for tool in offered(body)}
    if not tools:
        parsers = ParserNames(None, parsers.reasoning)
    return AnswerReading(
        names=parsers,
        tools=tools,
        shown=tuple(special_ids(tokenizer, marks_of(parsers)).values()),
        max_calls=1 if body.parallel_tool_calls is False else None,
        is_named=isinstance(body.tool_choice, NamedTool),
    )


def marks_of(parsers: ParserNames) -> list[str]:
    """Every text that the parsers of an answer look for."""
    tools = tool_parsers[parsers.tools].marks if parsers.tools is not None else ()
    reasoning = reasoning_parsers[parsers.reasoning].marks() if parsers.reasoning is not None else ()
    return [*tools, *reasoning]


def check_tools(parsers: ParserNames, body: ChatRequest) -> None:
    """Raises ApiError where tools are asked for that cannot be had."""
    is_forced = body.tool_choice == "required" or isinstance(body.tool_choice, NamedTool)
    if is_forced and not body.tools:
        raise bad_request("tool_choice asks for a call, and there are no tools to call", "tool_choice")
    if offered(body) and parsers.tools is None:
        raise bad_request("no parser for this model's tool calls: start the server with --tool-call-parser", "tools")
    if isinstance(body.tool_choice, NamedTool):
        wanted = body.tool_choice.function.name
        if wanted not in {tool.function.name for tool in offered(body)}:
            raise bad_request(f"tool_choice names {wanted!r}, which is not among the tools", "tool_choice")


def bound(
    params: SamplingParams, tokenizer: Tokenizer | None, reading: AnswerReading, body: ChatRequest
) -> SamplingParams:
    """With the call that tool_choice asks for; whatever binds the answer begins after the reasoning."""
    guided = params.guided
    call = _forced_call(tokenizer, reading, body)
    if call is not None and guided is not None:
        raise bad_request("tool_choice asks for a call, and response_format or guided_... for something else")
    guided = call or guided
    if guided is not None and reading.names.reasoning is not None:
        reasoning = reasoning_parsers[reading.names.reasoning]
        guided = replace(guided, after=reasoning.close, opening=reasoning.open or None)
    return replace(params, guided=guided, shown_special_ids=reading.shown)


def _forced_call(tokenizer: Tokenizer | None, reading: AnswerReading, body: ChatRequest) -> Guided | None:
    choice = body.tool_choice
    if choice != "required" and not isinstance(choice, NamedTool):
        return None
    assert reading.names.tools is not None
    form = tool_parsers[reading.names.tools]
    several = choice == "required" and body.parallel_tool_calls is not False
    named = [choice.function.name] if isinstance(choice, NamedTool) else reading.tools
    tools = {name: reading.tools[name] for name in named}
    template = (tokenizer.template_text(tools=True) if tokenizer is not None else None) or ""
    try:
        wanted = WantedCalls(tools, several, special_ids(tokenizer, form.marks), template)
        return Guided(structural_tag=form.forced(wanted))
    except ValueError as error:
        raise bad_request(str(error), "tools") from error
