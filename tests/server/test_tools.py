"""Calls that a client forces, in every form: they follow the tool's schema, whole, streamed and without speculation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jsonschema
import openai
import pytest
import tokenizers
from running import Running, Serve
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from outrider.grammar.guide import Grammars
from outrider.grammar.masks import fill_masks
from outrider.sampling_params import Guided
from outrider.server.messages import message_of
from outrider.server.parsers import (
    ParserNames,
    ToolCallBegin,
    ToolOptions,
    WantedCalls,
    answer_parser,
    special_ids,
    tool_parsers,
)
from outrider.server.parsers.base import Steps
from outrider.server.parsers.forced import Format, json_call, tag
from outrider.server.parsers.tool_calls import ToolParser
from outrider.tokenizer import Tokenizer

pytest.importorskip("xgrammar")

WALK = {
    "type": "object",
    "description": "How to walk. " * 20,
    "properties": {"where": {"enum": ["hills", "woods"]}},
    "required": ["where"],
    "additionalProperties": False,
}
REST = {"type": "object", "properties": {}, "additionalProperties": False}


def tool(name: str, parameters: Any = None) -> Any:
    return {"type": "function", "function": {"name": name, "parameters": parameters}}


TOOLS = [tool("walk", WALK), tool("rest", REST)]
NAMED: Any = {"type": "function", "function": {"name": "walk"}}
FORMS = ("hermes", "special")  # the others are too long in the embedded vocabulary; their grammars are tried below
CALL = '<tool_call>\n{"name": "walk", "arguments": {"hours": [1]}}\n</tool_call>'


@tool_parsers.register("special")
class SpecialParser(ToolParser):
    """Markers that are special tokens of the embedded vocabulary."""

    markers = ("<|system|>",)
    marks = ("<|system|>", "<|user|>")

    @classmethod
    def forced(cls, wanted: WantedCalls) -> Format:
        calls = (json_call(wanted, name, "arguments") for name in wanted.tools)
        return wanted.listed([tag(wanted.mark(cls.marks[0]), call, wanted.mark(cls.marks[1])) for call in calls], "")

    def calls(self, marker: str) -> Steps:
        yield from self.envelope()
        if (yield from self.expect("<|user|>")):
            self.drop()


@pytest.fixture(scope="module", params=FORMS)
def form(request: pytest.FixtureRequest, serve: Serve) -> Iterator[Running]:
    with serve(parsers=ParserNames(request.param)) as running:
        yield running


@pytest.fixture(scope="module")
def hermes(serve: Serve) -> Iterator[Running]:
    with serve(parsers=ParserNames("hermes")) as running:
        yield running


def ask(running: Running, **options: Any) -> Any:
    body = {"model": "default", "messages": [{"role": "user", "content": "Walk."}], "temperature": 0}
    tokenizer = running.llm.tokenizer
    assert tokenizer is not None
    spaces = {str(id): -100 for id in range(4096) if tokenizer.token(id).isspace()}  # the model loves empty lines
    settings = {"tools": TOOLS, "max_tokens": 120, "logit_bias": spaces, **options}
    return running.openai().chat.completions.create(**{**body, **settings})


def calls_of(message: dict[str, Any]) -> list[tuple[str, Any]]:
    for call in message["tool_calls"]:
        assert call["type"] == "function"
        assert call["id"]
    return [(call["function"]["name"], json.loads(call["function"]["arguments"])) for call in message["tool_calls"]]


def everywhere(running: Running, **options: Any) -> tuple[dict[str, Any], str]:
    """The message and why it ended: the same streamed, and without speculation."""
    whole = ask(running, **options)
    message, reason = whole.choices[0].message.model_dump(), whole.choices[0].finish_reason
    chunks = list(ask(running, stream=True, **options))
    streamed = message_of(chunk.choices[0].delta.model_dump(exclude_none=True) for chunk in chunks)
    assert calls_of(streamed) == calls_of(message)
    assert streamed["content"] == message["content"]
    assert chunks[-1].choices[0].finish_reason == reason
    plain = ask(running, **options, extra_body={"speculative": {"enabled": False}})
    assert calls_of(plain.choices[0].message.model_dump()) == calls_of(message)
    assert plain.usage.completion_tokens == whole.usage.completion_tokens
    return message, reason


def test_one_call_must_come(form: Running) -> None:
    message, reason = everywhere(form, tool_choice="required", parallel_tool_calls=False)
    ((name, arguments),) = calls_of(message)
    jsonschema.validate(arguments, {"walk": WALK, "rest": REST}[name])
    assert message["content"] is None
    assert reason == "tool_calls"


def test_this_call_must_come(form: Running) -> None:
    message, reason = everywhere(form, tool_choice=NAMED)
    ((called, arguments),) = calls_of(message)
    assert called == "walk"
    jsonschema.validate(arguments, WALK)
    assert message["content"] is None
    assert reason == "stop", "as OpenAI has it"


def test_some_calls_must_come(form: Running) -> None:
    """As many as the model likes."""
    choice = ask(form, tool_choice="required", temperature=1.5, seed=1, max_tokens=60).choices[0]
    calls = choice.message.tool_calls
    if choice.finish_reason == "length":
        calls = calls[:-1]
    else:
        assert (choice.finish_reason, choice.message.content) == ("tool_calls", None)
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), {"walk": WALK, "rest": REST}[call.function.name])


def test_a_forced_call_that_is_cut_off(hermes: Running) -> None:
    choice = ask(hermes, tool_choice=NAMED, max_tokens=24).choices[0]
    assert choice.finish_reason == "length"


def test_tools_without_parameters_take_any_object(hermes: Running) -> None:
    for parameters in (None, {}, {"description": "no type"}):
        answer = ask(hermes, tools=[tool("walk", parameters)], tool_choice=NAMED, max_tokens=80).choices[0]
        assert answer.message.tool_calls[0].function.arguments.startswith("{")


def test_only_one_call_where_others_are_not_wanted(hermes: Running) -> None:
    """With tool_choice auto nothing binds the answer: what comes after the first call is left out."""
    options = {"parallel_tool_calls": False, "extra_body": {"guided_choice": [CALL + CALL]}, "logit_bias": {}}
    whole = ask(hermes, **options).choices[0].message
    assert len(whole.tool_calls) == 1
    deltas = [chunk.choices[0].delta.model_dump(exclude_none=True) for chunk in ask(hermes, **options, stream=True)]
    assert calls_of(message_of(deltas)) == calls_of(whole.model_dump())


def test_calls_are_read_only_where_there_are_tools(hermes: Running) -> None:
    forced = {"guided_choice": [CALL], "logit_bias": {}}
    assert ask(hermes, extra_body=forced).choices[0].finish_reason == "tool_calls"
    unread = ask(hermes, extra_body=forced, tool_choice="none").choices[0]
    assert (unread.message.content, unread.finish_reason) == (CALL, "stop")
    without = ask(hermes, extra_body=forced, tools=openai.omit).choices[0]
    assert (without.message.content, without.message.tool_calls) == (CALL, None)


def test_what_cannot_be_forced_is_refused(hermes: Running, client: openai.OpenAI, running: Running) -> None:
    refused = [
        ({"tools": openai.omit, "tool_choice": "required"}, "no tools to call"),
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "not among the tools"),
        ({"tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "something else"),
        ({"tool_choice": "required", "tools": [tool("walk up", WALK)]}, "tool name"),
        ({"tool_choice": "required", "tools": [tool("walk", {"not": {}})]}, "not is not supported"),
        ({"tool_choice": "required", "tools": [tool("walk", {"type": 3})]}, "cannot be used"),
        ({"tool_choice": "required", "tools": [tool(f"t{n}", {"enum": ["y" * 999]}) for n in range(99)]}, "at most"),
    ]
    for options, message in refused:
        with pytest.raises(openai.BadRequestError, match=message):
            ask(hermes, **options)
    for choice in ("auto", "required", NAMED):
        with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
            ask(running, tool_choice=choice)
    assert ask(hermes, tool_choice=NAMED).choices[0].message.tool_calls, "the server goes on"


def test_templates_are_told_only_what_is_known(hermes: Running) -> None:
    plain = ask(hermes, max_tokens=5).choices[0].message.content
    told = ask(hermes, max_tokens=5, extra_body={"chat_template_kwargs": {"enable_thinking": False}})
    assert told.choices[0].message.content == plain
    for name, value in (("tokenize", True), ("chat_template", "{{ 1 }}"), ("messages", []), ("enable_thinking", "x")):
        with pytest.raises(openai.BadRequestError, match="chat_template_kwargs"):
            ask(hermes, extra_body={"chat_template_kwargs": {name: value}})


SPECIAL = ("[TOOL_CALLS]", "[ARGS]", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<tool_call>")
# form, special tokens, template, one call, two calls
SPELT = [
    (
        "hermes",
        SPECIAL,
        "",
        '<tool_call>\n{"name": "walk", "arguments": {"where": "hills"}}\n</tool_call>',
        '\n<tool_call>\n{"name": "rest", "arguments": {}}\n</tool_call>',
    ),
    ("hermes", (), "", '<tool_call>\n{"name": "rest", "arguments": {}}\n</tool_call>', None),
    ("llama3", (), "", '{"name": "walk", "parameters": {"where": "hills"}}', '; {"name": "rest", "parameters": {}}'),
    ("mistral", SPECIAL, "", '[TOOL_CALLS]walk[ARGS]{"where": "hills"}', "[TOOL_CALLS]rest[ARGS]{}"),
    ("mistral", (), "", '[TOOL_CALLS][{"name": "walk", "arguments": {"where": "hills"}}]', None),
    (
        "qwen3_coder",
        SPECIAL,
        "",
        "<tool_call>\n<function=walk>\n<parameter=where>\nhills\n</parameter>\n</function>\n</tool_call>",
        "\n<tool_call>\n<function=rest>\n\n</function>\n</tool_call>",
    ),
    (
        "deepseek",
        SPECIAL,
        "```json",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>rest\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        None,
    ),
    (
        "deepseek",
        SPECIAL,
        "",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>rest<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        None,
    ),
]


def bytes_and(special: tuple[str, ...]) -> Tokenizer:
    """Single bytes, and special tokens."""
    alphabet = {character: id for id, character in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = tokenizers.Tokenizer(models.BPE(alphabet, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True) for token in (*special, "</s>")])
    return Tokenizer(backend, special_tokens={"eos_token": "</s>"})


def is_matched(guided: Guided, tokenizer: Tokenizer, text: str) -> bool:
    """Whether an answer of just this text, special tokens as such, is allowed, and its end with it."""
    assert tokenizer.eos_token_id is not None
    grammars = Grammars(tokenizer, tokenizer.vocab_size, frozenset([tokenizer.eos_token_id]))
    guide = grammars.guide(guided)
    for token in (*tokenizer.encode(text), tokenizer.eos_token_id):
        ((_, mask),) = guide.masks([])
        (bits,) = fill_masks([mask])
        allowed = bool(bits[token // 32] >> (token % 32) & 1)
        assert guide.accept(token) == allowed
        if not allowed:
            return False
    return True


@pytest.mark.parametrize(("form", "special", "template", "one", "more"), SPELT)
def test_forms_are_forced_as_they_are_read(
    form: str, special: tuple[str, ...], template: str, one: str, more: str | None
) -> None:
    tokenizer = bytes_and(special)
    tools = {"walk": WALK, "rest": REST}
    marks = special_ids(tokenizer, tool_parsers[form].marks)
    single, several = (
        Guided(structural_tag=tool_parsers[form].forced(WantedCalls(tools, many, marks, template)))
        for many in (False, True)
    )
    for guided in (single, several):
        assert is_matched(guided, tokenizer, one)
        assert not is_matched(guided, tokenizer, "")
        assert not is_matched(guided, tokenizer, "So. " + one)
        assert not is_matched(guided, tokenizer, one.replace("walk", "swim").replace("rest", "swim"))
        assert not is_matched(guided, tokenizer, one.replace("{}", '{"a": 1}').replace("hills", "seas"))
    if more is not None:
        assert is_matched(several, tokenizer, one + more)
        assert not is_matched(single, tokenizer, one + more)
    parser = answer_parser(ParserNames(form), "", ToolOptions(frozenset(tools)))
    calls = [event.name for event in parser.feed(one) + parser.finish() if isinstance(event, ToolCallBegin)]
    assert calls == (["walk"] if "walk" in one else ["rest"])


def test_a_marker_is_no_part_of_a_text() -> None:
    """As a special token it would end what it stands in."""
    tokenizer = bytes_and(SPECIAL)
    tools = {"walk": {"type": "object", "properties": {"where": {"type": "string"}}}}
    marks = special_ids(tokenizer, tool_parsers["mistral"].marks)
    guided = Guided(structural_tag=tool_parsers["mistral"].forced(WantedCalls(tools, True, marks, "")))
    assert is_matched(guided, tokenizer, '[TOOL_CALLS]walk[ARGS]{"where": "there"}')
    for marker in ("[TOOL_CALLS]", "<tool_call>"):
        assert tokenizer.special_id(marker) is not None
        assert not is_matched(guided, tokenizer, f'[TOOL_CALLS]walk[ARGS]{{"where": "{marker}"}}')
