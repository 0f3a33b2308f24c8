"""Accepted runs that fuse what parsers, stop strings and limits must tell apart: through the server, whole and
streamed, the answer is that of plain decoding, and `draft_positions` show that the run did span the boundary."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import httpx
import pytest
from running import Running, Serve
from scripted import MAX_DRAFT, Script, Scripted

from outrider.server.messages import message_of
from outrider.server.parsers import ParserNames

pytest.importorskip("xgrammar")

END = "<|end|>"
TOOLS: Any = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}} for name in ("walk", "rest")
]
WALK, REST = '{"name": "walk", "arguments": {"hours": 2}}', '{"name": "rest", "arguments": {}}'


@pytest.fixture(scope="module")
def told() -> Iterator[Scripted]:
    with Scripted(max_num_seqs=4) as made:
        yield made


@pytest.fixture(scope="module")
def server(serve: Serve, told: Scripted) -> Iterator[Running]:
    with serve(parsers=ParserNames("hermes", "think"), other=told) as running:
        yield running


@dataclass
class Case:
    """An answer in pieces; a run ends before and after `fused`, given as numbers of pieces."""

    pieces: list[str]
    fused: tuple[int, int]
    content: str | None
    calls: list[str]
    reasoning: str | None = None
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "end of reasoning + start of call": Case(
        ["<think>", "hm", "</think>", "<tool_call>", WALK, "</tool_call>", END], (2, 4), None, ["walk"], "hm"
    ),
    "name + arguments": Case(
        ["<tool_call>", '{"name": "walk', '", "arguments": {"hours"', ": 2}}", "</tool_call>", END],
        (1, 3),
        None,
        ["walk"],
    ),
    "end of call + start of next call": Case(
        ["<tool_call>", WALK, "</tool_call>", "<tool_call>", REST, "</tool_call>", END], (2, 4), None, ["walk", "rest"]
    ),
    "end of call + end token": Case(["<tool_call>", WALK, "</tool_call>", END], (2, 4), None, ["walk"]),
    "content + opening marker": Case(
        ["Off", " we go. ", "<tool_call>", WALK, "</tool_call>", END], (1, 3), "Off we go. ", ["walk"]
    ),
    "opening marker split over rounds, the rest fused": Case(
        ["Go", "<too", 'l_call>{"name": "walk", ', '"arguments": {"hours": 2}}', "</tool_call>", END],
        (2, 4),
        "Go",
        ["walk"],
    ),
    "whole call in one run": Case(["So", "<tool_call>", WALK, "</tool_call>", "!", END], (1, 4), "So!", ["walk"]),
}


def script_of(told: Scripted, case: Case) -> Script:
    sizes = [len(told.tokens(piece)) for piece in case.pieces]
    places = [0, *accumulate(sizes)]
    script = Script(told.tokens(*case.pieces), [place for place in map(places.__getitem__, case.fused) if place > 1])
    assert max(script.draft_positions) < MAX_DRAFT
    return script


def body_of(**options: Any) -> dict[str, Any]:
    asked = [{"role": "user", "content": "Walk."}]
    return {"messages": asked, "temperature": 0, "return_token_ids": True, **options}


def post(server: Running, body: dict[str, Any]) -> dict[str, Any]:
    answer = server.post("/v1/chat/completions", body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def stream(server: Running, body: dict[str, Any]) -> list[dict[str, Any]]:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    with httpx.stream("POST", f"{server.url}/v1/chat/completions", json={**body, **options}, timeout=30) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def plain_of(message: dict[str, Any]) -> dict[str, Any]:
    """Without the ids of its calls, which are new ones every time."""
    return {**message, "tool_calls": [call["function"] for call in message.get("tool_calls", [])]}


@dataclass
class Answer:
    message: dict[str, Any]
    token_ids: list[int]
    draft_positions: list[int]
    finish: tuple[str, Any]
    usage: dict[str, Any]


def whole(server: Running, body: dict[str, Any]) -> Answer:
    answer = post(server, body)
    (choice,) = answer["choices"]
    finish = choice["finish_reason"], choice["stop_reason"]
    return Answer(
        plain_of(choice["message"]), choice["token_ids"], choice["draft_positions"], finish, _counts(answer["usage"])
    )


def streamed(server: Running, body: dict[str, Any]) -> Answer:
    *chunks, last = stream(server, body)
    choices = [chunk["choices"][0] for chunk in chunks]
    assert all(choice["finish_reason"] is None for choice in choices[:-1])
    tokens = [token for choice in choices for token in choice.get("token_ids", [])]
    positions = [place for choice in choices for place in choice.get("draft_positions", [])]
    message = message_of(choice["delta"] for choice in choices)
    finish = choices[-1]["finish_reason"], choices[-1]["stop_reason"]
    return Answer(plain_of(message), tokens, positions, finish, _counts(last["usage"]))


def _counts(usage: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in usage.items() if name != "prompt_tokens_details"}


def alike(server: Running, body: dict[str, Any]) -> Answer:
    """The answer, which is the same in all ways of asking."""
    plain = whole(server, {**body, "speculative": {"enabled": False}})
    assert not any(plain.draft_positions)
    fast = whole(server, body)
    assert max(fast.draft_positions) > 0, "nothing was accepted"
    for other in (fast, streamed(server, body)):
        assert other.draft_positions == fast.draft_positions
        plain.draft_positions = fast.draft_positions
        assert other == plain
    return fast


@pytest.mark.parametrize("name", CASES)
def test_fused_tool_calls(name: str, server: Running, told: Scripted) -> None:
    case = CASES[name]
    told.script = script_of(told, case)
    answer = alike(server, body_of(tools=TOOLS, **case.options))
    assert answer.token_ids == told.script.tokens
    assert answer.draft_positions == told.script.draft_positions, "the run does not span what it should"
    assert answer.message["content"] == case.content
    assert answer.message.get("reasoning_content") == case.reasoning
    assert [call["name"] for call in answer.message["tool_calls"]] == case.calls
    assert json.loads(answer.message["tool_calls"][0]["arguments"]) == {"hours": 2}
    assert answer.finish == ("tool_calls", None)
    assert answer.usage["completion_tokens"] == len(told.script.tokens)
    thought = sum(len(told.tokens(piece)) for piece in case.pieces[:3]) if case.reasoning else 0
    opening = len(told.tokens("<think>")) - 1 if case.reasoning else 0  # it is reasoning once the marker is complete
    assert answer.usage["completion_tokens_details"]["reasoning_tokens"] == thought - opening


def test_every_way_to_cut_one_answer(server: Running, told: Scripted) -> None:
    """The same bytes wherever one run ends and the next begins."""
    pieces = ["<think>a", "b</think>\n", "é😀<tool_call>", WALK, "</tool_call>", END]
    tokens = told.tokens(*pieces)
    told.script = Script(tokens, range(1, len(tokens)))  # one at a time
    expected = streamed(server, body_of(tools=TOOLS))
    assert not any(expected.draft_positions)
    for place in range(2, len(tokens), 3):
        told.script = Script(tokens, [place])
        answer = streamed(server, body_of(tools=TOOLS))
        assert answer.draft_positions == told.script.draft_positions
        expected.draft_positions = answer.draft_positions
        assert answer == expected


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("gamma", "alpha beta "),  # all of it in the run
        ("beta gamma d", "alpha "),  # begun before the run, which completes it
        ("a gamm", "alpha bet"),
        ("ta ga", "alpha be"),
    ],
)
@pytest.mark.parametrize("include", [False, True])
def test_stop_strings_inside_a_run(stop: str, text: str, include: bool, server: Running, told: Scripted) -> None:
    pieces = ["alpha", " beta", " gamma", " delta", " epsilon", END]
    before = len(told.tokens(*pieces[:2]))
    told.script = Script(told.tokens(*pieces), [before])
    answer = alike(server, body_of(stop=[stop, "never"], include_stop_str_in_output=include))
    assert answer.message["content"] == text + (stop if include else "")
    assert answer.finish == ("stop", stop)
    assert before < len(answer.token_ids) < len(told.script.tokens) - 1
    assert answer.draft_positions[before] == 1, "the stop string is not in the run"
    assert answer.token_ids == told.script.tokens[: len(answer.token_ids)]
    assert answer.usage["completion_tokens"] == len(answer.token_ids)


def test_max_tokens_inside_a_run(server: Running, told: Scripted) -> None:
    tokens = told.tokens("Off. ", "<tool_call>", REST, "</tool_call>", END)
    told.script = Script(tokens, [3])
    for most in (1, 2, 5, 11, len(tokens) - 1, len(tokens)):
        plain = whole(server, body_of(tools=TOOLS, max_tokens=most, speculative={"enabled": False}))
        for ask in (whole, streamed):
            answer = ask(server, body_of(tools=TOOLS, max_tokens=most))
            plain.draft_positions = answer.draft_positions
            assert answer == plain
        assert answer.usage["completion_tokens"] == len(answer.token_ids) == most
        assert answer.finish == ("tool_calls" if most == len(tokens) else "length", None)
        if most > 5:
            assert max(answer.draft_positions[3:]) == most - 4, "the limit is not in the run"


def test_an_end_token_inside_a_draft(server: Running, told: Scripted) -> None:
    told.script = Script(told.tokens("So it", " is.", END), [2], overdraft=6)
    answer = alike(server, body_of())
    assert answer.token_ids == told.script.tokens
    assert answer.draft_positions[-1] > 0, "the end was not drafted"
    assert answer.message["content"] == "So it is."
    assert answer.finish == ("stop", None)
    assert answer.usage["completion_tokens"] == len(told.script.tokens)


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("include", [True, False])
def test_end_tokens_are_no_text(skip: bool, include: bool, server: Running, told: Scripted) -> None:
    """What was held back as the beginning of a stop string comes before the end token, or in its place."""
    pieces = ["So", " it is: ", "never", END]
    told.script = Script(told.tokens(*pieces), [2], overdraft=3)
    settings = {"skip_special_tokens": skip, "include_stop_str_in_output": include, "stop": ["nevermore"]}
    answer = alike(server, body_of(**settings))
    assert answer.message["content"] == "So it is: never" + (END if include and not skip else "")
    assert answer.finish == ("stop", None)
    assert whole(server, body_of(**settings | {"stop": [END], "include_stop_str_in_output": False})).finish[1] is None
    stop_token = told.tokens(END)[0]
    ended = whole(server, body_of(**settings, ignore_eos=True, stop_token_ids=[stop_token]))
    assert ended.message["content"] == answer.message["content"]
    assert ended.finish == ("stop", stop_token)


SCHEMA = {
    "type": "object",
    "properties": {"hours": {"enum": [1, 2, 3]}},
    "required": ["hours"],
    "additionalProperties": False,
}
FORM = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


@pytest.mark.parametrize("split", [True, False])
def test_a_schema_begins_where_the_reasoning_ends_inside_a_draft(split: bool, server: Running, told: Scripted) -> None:
    pieces = ["<think>", "A {walk}.", "</think>", '{"hours":', " 2}", END]
    places = [0, *accumulate(len(told.tokens(piece)) for piece in pieces)]
    cuts = [places[2] + 1, places[4]] if split else [places[2], places[4]]
    told.script = Script(told.tokens(*pieces), cuts)
    answer = alike(server, body_of(response_format=FORM))
    assert answer.draft_positions == told.script.draft_positions
    assert (answer.message["reasoning_content"], answer.message["content"]) == ("A {walk}.", '{"hours": 2}')
    assert answer.finish == ("stop", None)
    assert answer.usage["completion_tokens_details"]["reasoning_tokens"] < answer.usage["completion_tokens"]


def test_after_the_reasoning_the_grammar_rules(server: Running, told: Scripted) -> None:
    """The script ends with the marker; a draft that goes on against the schema is not accepted."""
    tokens = told.tokens("<think>", "hm", "</think>")
    told.script = Script(tokens, [2], overdraft=4)
    answer = alike(server, body_of(response_format=FORM, max_tokens=160))
    assert answer.finish == ("stop", None)
    assert json.loads(answer.message["content"]).keys() == {"hours"}
    assert answer.token_ids[: len(tokens)] == tokens


def test_without_reasoning_the_grammar_rules_from_the_start(server: Running, told: Scripted) -> None:
    told.script = None
    opening = {token: -100 for token in range(4096) if told.vocabulary.token_bytes[token].startswith(b"<")}
    answer = whole(server, body_of(response_format=FORM, max_tokens=160, logit_bias=opening))
    assert "reasoning_content" not in answer.message
    assert json.loads(answer.message["content"]).keys() == {"hours"}
    assert answer.usage["completion_tokens_details"]["reasoning_tokens"] == 0


def test_reasoning_that_is_never_closed(server: Running, told: Scripted) -> None:
    told.script = Script(told.tokens("<think>", "on and", " on", END), [2])
    answer = alike(server, body_of(response_format=FORM))
    assert (answer.message["reasoning_content"], answer.message["content"]) == ("on and on", "")
    details = answer.usage["completion_tokens_details"]
    assert 0 < details["reasoning_tokens"] <= answer.usage["completion_tokens"]
