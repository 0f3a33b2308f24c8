"""The official client, as people use it: what it returns is typed, and the same streamed, whole, drafted and plain."""

import json
from typing import Any

import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel
from running import Running, Serve

from outrider.server.parsers import ParserNames

ASKED: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Tell me about walking."}]
PLAIN = {"speculative": {"enabled": False}}
TOOL: Any = {
    "type": "function",
    "function": {
        "name": "walk",
        "description": "Go somewhere",
        "parameters": {"type": "object", "properties": {"hours": {"type": "integer"}}, "required": ["hours"]},
    },
}
CALL = '<tool_call>\n{"name": "walk", "arguments": {"hours": 2}}\n</tool_call>'


class Step(BaseModel):
    place: str
    hours: int


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["default"]
    assert client.models.retrieve("default").object == "model"


def test_a_chat(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(model="default", messages=ASKED, max_completion_tokens=20, temperature=0)
    assert isinstance(answer, ChatCompletion)
    ChatCompletion.model_validate(answer.model_dump(), strict=True)
    assert answer.choices[0].message.content
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 20
    assert answer.usage.prompt_tokens_details is not None


def test_a_stream(client: openai.OpenAI) -> None:
    options: Any = {"model": "default", "messages": ASKED, "max_tokens": 40, "temperature": 0}
    whole = client.chat.completions.create(**options)
    with client.chat.completions.stream(**options, stream_options={"include_usage": True}) as stream:
        events = list(stream)
        final = stream.get_final_completion()
    chunks = [event.chunk for event in events if event.type == "chunk"]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.model_dump(), strict=True)
    assert final.choices[0].message.content == whole.choices[0].message.content
    assert final.choices[0].finish_reason == whole.choices[0].finish_reason
    assert final.usage is not None
    assert whole.usage is not None
    assert final.usage.completion_tokens == whole.usage.completion_tokens > 20
    assert len(chunks) < 20  # accepted runs come in one chunk


def test_seeds(client: openai.OpenAI) -> None:
    def ask(seed: int, **options: Any) -> str | None:
        answer = client.chat.completions.create(
            model="default", messages=ASKED, max_tokens=25, temperature=1.0, seed=seed, **options
        )
        return answer.choices[0].message.content

    assert ask(1) == ask(1) == ask(1, extra_body=PLAIN)
    assert ask(1) != ask(2)


def test_logprobs(client: openai.OpenAI) -> None:
    options: Any = {"model": "default", "messages": ASKED, "max_tokens": 12, "temperature": 0}
    answer = client.chat.completions.create(**options, logprobs=True, top_logprobs=4)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert "".join(row.token for row in found.content) == answer.choices[0].message.content
    for row in found.content:
        assert [top.logprob for top in row.top_logprobs] == sorted(
            (top.logprob for top in row.top_logprobs), reverse=True
        )
        assert row.logprob <= 0


def test_a_schema_from_a_class(client: openai.OpenAI) -> None:
    pytest.importorskip("xgrammar")
    schema = Step.model_json_schema() | {"additionalProperties": False}
    schema["properties"]["place"] = {"enum": ["wood", "hill"]}
    schema["properties"]["hours"] = {"type": "integer", "minimum": 1, "maximum": 9}
    form: Any = {"type": "json_schema", "json_schema": {"name": "step", "schema": schema, "strict": True}}
    texts = set()
    for extra in ({}, PLAIN):
        answer = client.chat.completions.create(
            model="default", messages=ASKED, max_tokens=200, temperature=0, response_format=form, extra_body=extra
        )
        assert answer.choices[0].finish_reason == "stop"
        assert Step.model_validate_json(answer.choices[0].message.content or "").hours > 0
        texts.add(answer.choices[0].message.content)
    assert len(texts) == 1
    answer = client.chat.completions.create(
        model="default", messages=ASKED, max_tokens=300, seed=1, response_format={"type": "json_object"}
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


def test_tools(serve: Serve) -> None:
    """A grammar makes the model write the call; the conversation then goes on with the result."""
    pytest.importorskip("xgrammar")
    with serve(parsers=ParserNames("hermes", None)) as running:
        client = running.openai()
        options: Any = {"model": "default", "messages": ASKED, "tools": [TOOL], "temperature": 0}
        extra = {"guided_choice": [CALL]}
        answer = client.chat.completions.create(**options, extra_body=extra)
        choice = answer.choices[0]
        assert choice.finish_reason == "tool_calls"
        assert choice.message.tool_calls is not None
        call = choice.message.tool_calls[0]
        assert call.type == "function"
        assert (call.function.name, json.loads(call.function.arguments)) == ("walk", {"hours": 2})
        with client.chat.completions.stream(**options, extra_body=extra) as stream:
            streamed = stream.get_final_completion().choices[0].message.tool_calls
        assert streamed is not None
        assert streamed[0].function.arguments == call.function.arguments
        result = {"role": "tool", "tool_call_id": call.id, "content": "two hours later"}
        after = [*ASKED, choice.message.model_dump(exclude_none=True), result]
        answer = client.chat.completions.create(model="default", messages=after, tools=[TOOL], max_tokens=8)
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 8


def test_echo_with_logprobs(client: openai.OpenAI, running: Running) -> None:
    """What programs that score texts ask for: the prompt's own log-probabilities."""
    prompt = "Walking in nature is a way to be calm — 散歩."
    options: Any = {"model": "default", "prompt": prompt, "max_tokens": 5, "temperature": 0, "logprobs": 2}
    options["extra_body"] = {"ignore_eos": True}
    plain = client.completions.create(**options).choices[0]
    echoed = client.completions.create(**options, echo=True).choices[0]
    assert echoed.text == prompt + plain.text
    found, rest = echoed.logprobs, plain.logprobs
    assert found is not None
    assert rest is not None
    assert found.tokens is not None and found.text_offset is not None and rest.text_offset is not None  # noqa: PT018
    assert found.token_logprobs is not None and found.top_logprobs is not None  # noqa: PT018
    assert found.tokens[-5:] == rest.tokens
    assert [offset - len(prompt) for offset in found.text_offset[-5:]] == rest.text_offset
    assert found.text_offset[:-5] == sorted(found.text_offset[:-5])
    assert found.token_logprobs[0] is None
    assert all(value is not None and value <= 0 for value in found.token_logprobs[1:])
    assert all(2 <= len(row or {}) <= 3 for row in found.top_logprobs[1:])
    tokens = running.post("/tokenize", {"prompt": prompt}).json()["tokens"]
    assert len(found.tokens) == len(tokens) + 5
    # the same figures as when the text had been generated: each prefix asked for by itself
    for place in (3, len(tokens) - 1):
        one = client.completions.create(
            model="default",
            prompt=tokens[:place],
            max_tokens=1,
            logprobs=1,
            extra_body={"allowed_token_ids": [tokens[place]]},
        )
        assert one.choices[0].logprobs is not None
        assert one.choices[0].logprobs.token_logprobs is not None
        assert one.choices[0].logprobs.token_logprobs[0] == pytest.approx(found.token_logprobs[place], abs=1e-3)
    chunks = list(client.completions.create(**options, echo=True, stream=True))
    parts = [chunk.choices[0].logprobs for chunk in chunks]
    for name in ("tokens", "text_offset"):
        assert [value for part in parts if part for value in getattr(part, name)] == getattr(found, name)
    streamed = [value for part in parts if part for value in part.token_logprobs or []]
    assert streamed[1:] == pytest.approx(found.token_logprobs[1:], abs=1e-4)


def test_errors_are_the_clients_own_kinds(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.chat.completions.create(model="default", messages=ASKED, temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError) as missing:
        client.chat.completions.create(model="gpt-0", messages=ASKED)
    assert missing.value.code == "model_not_found"
