"""An answer that was begun elsewhere goes on as if nothing had happened, wherever it was cut."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from running import Running, Serve

from outrider.server.messages import message_of
from outrider.server.parsers import ParserNames

PROMPT = "Once upon a time there was a little dog"
CHAT = [{"role": "user", "content": "Tell me a story about a dog."}]
SEEDED = {"temperature": 0.9, "seed": 11, "presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.1}
WALK = {
    "type": "object",
    "properties": {"where": {"enum": ["hills", "woods"]}, "hours": {"type": "integer"}},
    "required": ["where", "hours"],
    "additionalProperties": False,
}
TOOL = {"type": "function", "function": {"name": "walk", "parameters": WALK}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "walk", "schema": WALK}}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("completions", {"temperature": 0, "max_tokens": 30}),
    "stop": ("completions", {**SEEDED, "max_tokens": 60, "stop": [" and", "the d"], "min_tokens": 12}),
    "logprobs": ("completions", {**SEEDED, "max_tokens": 20, "logprobs": 2, "echo": True}),
    "several": ("completions", {**SEEDED, "prompt": [PROMPT, "The cat"], "n": 2, "max_tokens": 12}),
    "chat": ("chat/completions", {**SEEDED, "max_tokens": 24, "logprobs": True, "top_logprobs": 2}),
    "schema": ("chat/completions", {**SEEDED, "max_tokens": 60, "response_format": SCHEMA}),
    "closed": ("chat/completions", {"temperature": 0, "max_tokens": 24, "response_format": {"type": "json_object"}}),
    "tools": ("chat/completions", {**SEEDED, "max_tokens": 80, "tools": [TOOL], "tool_choice": "required"}),
}


@pytest.fixture(scope="module")
def server(serve: Serve) -> Iterator[Running]:
    with serve(parsers=ParserNames("hermes")) as running:
        yield running


def streamed(server: Running, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    asked = {"stream": True, "return_token_ids": True, "stream_options": {"include_usage": True}, **body}
    answer = server.post(f"/v1/{route}", asked)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert not any("error" in chunk for chunk in chunks), chunks
    return chunks


def joined(chunks: list[dict[str, Any]], index: int) -> dict[str, Any]:
    """All that a client has of one answer."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    message = message_of(choice["delta"] for choice in choices if "delta" in choice)
    for call in message.get("tool_calls", ()):
        call.pop("id", None)  # is made up anew every time
    rows: list[Any] = []
    for found in (choice["logprobs"] for choice in choices if choice.get("logprobs")):
        names = [name for name in found if found[name] is not None]
        rows += zip(*(found[name] for name in names), strict=True)
    return {
        "text": "".join(choice.get("text", "") for choice in choices),
        "message": message,
        "logprobs": rows,
        "tokens": [token for choice in choices for token in choice.get("token_ids", ())],
        "ends": [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        "stops": [choice["stop_reason"] for choice in choices if choice["finish_reason"]],
    }


def same(left: Any, right: Any) -> None:
    """Log-probabilities may differ in their last bits: the rows of a prompt and of a round are not of one pass."""
    assert {**left, "logprobs": 0} == {**right, "logprobs": 0}
    assert json.loads(json.dumps(left["logprobs"]), parse_float=lambda _: 0) == json.loads(
        json.dumps(right["logprobs"]), parse_float=lambda _: 0
    )


@pytest.mark.parametrize("name", CASES)
def test_a_stream_goes_on_where_it_was_cut(server: Running, name: str) -> None:
    route, options = CASES[name]
    given = {"messages": CHAT} if route.startswith("chat") else {"prompt": PROMPT}
    body = {**given, **options}
    for _ in range(20):  # a server that has fallen behind sends what it has as one piece
        undisturbed = streamed(server, route, body)
        places = [at for at, chunk in enumerate(undisturbed) if any(c.get("token_ids") for c in chunk["choices"])]
        if len(places) > 2:
            break
    groups = [at + chunk_count(undisturbed[at]) for at in places]
    assert len(groups) > 2
    num_answers = 1 + max(choice["index"] for chunk in undisturbed for choice in chunk["choices"])
    whole = [joined(undisturbed, index) for index in range(num_answers)]
    for cut in {groups[0], groups[len(groups) // 2], groups[-1 if num_answers == 1 else -2]}:
        before = undisturbed[:cut]
        begun = [joined(before, index)["tokens"] for index in range(num_answers)]
        asked = {**body, "continuation": begun}
        after = streamed(server, route, asked)
        ended = {c["index"] for chunk in before for c in chunk["choices"] if c["finish_reason"]}
        for index in range(num_answers):
            rest = [{"choices": [c for c in chunk["choices"] if c["index"] == index]} for chunk in after]
            if index not in ended:
                same(joined(before + rest, index), whole[index])
        assert after[-1]["usage"]["completion_tokens"] == undisturbed[-1]["usage"]["completion_tokens"]
        assert after[-1]["usage"]["prompt_tokens"] == undisturbed[-1]["usage"]["prompt_tokens"]
        plain = server.post(f"/v1/{route}", {**asked, "return_token_ids": True}).json()
        for choice in plain["choices"]:
            if choice["index"] not in ended:
                streamed_rest = joined(after, choice["index"])
                assert choice.get("text", "") == streamed_rest["text"]
                assert choice["token_ids"] == streamed_rest["tokens"]
                assert choice["finish_reason"] == streamed_rest["ends"][-1]
        assert plain["usage"]["completion_tokens"] == undisturbed[-1]["usage"]["completion_tokens"]


def chunk_count(chunk: dict[str, Any]) -> int:
    return max(choice.get("num_chunks", 1) for choice in chunk["choices"])


def test_what_no_answer_can_have_begun_with_is_refused(server: Running) -> None:
    tokens = server.llm.tokenizer.encode(" A story", add_special_tokens=False)
    end = next(iter(server.llm.end_ids))
    for continuation, options, said in (
        ([tokens, tokens], {}, "each of 1 answers"),
        ([tokens], {"temperature": 1.0}, "needs the seed"),
        ([[end, *tokens]], {}, "after its end"),
        ([tokens], {"max_tokens": len(tokens) - 1}, "after its end"),
        ([tokens], {"guided_regex": "[0-9]+"}, "against the grammar"),
        ([[10**6]], {}, "no token id"),
        ([tokens], {"prompt_logprobs": 1}, "leave out continuation"),
    ):
        body = {"prompt": PROMPT, "temperature": 0, "continuation": continuation, **options}
        answer = server.post("/v1/completions", body)
        assert answer.status_code == 400, answer.text
        assert said in answer.json()["error"]["message"]


def test_what_the_tokens_stand_in_is_found_again(server: Running) -> None:
    """A continuation is a prompt like any other: pages of prompt and answer are reused, and only the prompt's count."""
    body = {"prompt": PROMPT * 4, "temperature": 0, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
    tokens = server.post("/v1/completions", body).json()["choices"][0]["token_ids"]
    usage = server.post("/v1/completions", {**body, "continuation": [tokens[:35]]}).json()["usage"]
    assert 0 < usage["prompt_tokens_details"]["cached_tokens"] <= usage["prompt_tokens"]
    assert usage["completion_tokens"] == 40


def test_reasoning_that_was_begun_goes_on(serve: Serve) -> None:
    """The parser has read the tokens so far: what comes is reasoning, and all of it is counted."""
    with serve(parsers=ParserNames(None, "think")) as server:
        begun = server.llm.tokenizer.encode("<think>The dog is", add_special_tokens=False)
        body = {"messages": CHAT, "temperature": 0, "max_tokens": len(begun) + 5, "ignore_eos": True}
        answer = server.post("/v1/chat/completions", {**body, "continuation": [begun]}).json()
        message = answer["choices"][0]["message"]
        assert message["content"] == ""
        assert message["reasoning_content"]
        assert "think" not in message["reasoning_content"]
        details = answer["usage"]["completion_tokens_details"]
        assert details["reasoning_tokens"] == len(begun) + 5 - (len(server.llm.tokenizer.encode("<think>")) - 1)
        deltas = [
            chunk["choices"][0]["delta"]
            for chunk in streamed(server, "chat/completions", {**body, "continuation": [begun]})[:-1]
        ]
        assert message_of(deltas) == message
