"""/v1/responses through the official client: items, events, tools, schemas; and what would have to be stored."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter
from running import Running, Serve

from outrider.server.parsers import ParserNames
from outrider.server.response_output import ResponseOutput

ASKED: Any = "Tell me about walking."
GREEDY: Any = {"model": "default", "temperature": 0}
HOURS = {"type": "integer", "minimum": 1, "maximum": 9}
WALK: Any = {
    "type": "function",
    "name": "walk",
    "description": "Go somewhere",
    "parameters": {"type": "object", "properties": {"hours": HOURS}, "required": ["hours"]},
    "strict": True,
}


class Step(BaseModel):
    hours: int


@pytest.fixture(scope="module")
def hermes(serve: Serve) -> Iterator[Running]:
    with serve(parsers=ParserNames("hermes", None)) as running:
        yield running


def test_text_is_the_same_whole_streamed_and_as_a_chat(client: openai.OpenAI) -> None:
    whole = client.responses.create(**GREEDY, input=ASKED, instructions="Be brief.", max_output_tokens=20)
    Response.model_validate(whole.model_dump(), strict=True)
    assert (whole.status, whole.incomplete_details.reason) == ("incomplete", "max_output_tokens")  # type: ignore[union-attr]
    assert whole.usage is not None
    assert whole.usage.output_tokens == 20
    messages: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": ASKED}]
    chat = client.chat.completions.create(**GREEDY, messages=messages, max_tokens=20)
    assert whole.output_text == chat.choices[0].message.content
    assert whole.usage.input_tokens == chat.usage.prompt_tokens  # type: ignore[union-attr]
    with client.responses.stream(**GREEDY, input=ASKED, instructions="Be brief.", max_output_tokens=20) as stream:
        events = list(stream)
    final = events[-1].response  # type: ignore[union-attr]
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    assert kinds[-4:] == [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert [event.sequence_number for event in events] == sorted({event.sequence_number for event in events})
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert [item.content[0].text for item in final.output] == [whole.output_text]
    assert final.usage == whole.usage


def test_logprobs(client: openai.OpenAI) -> None:
    answer = client.responses.create(**GREEDY, input=ASKED, max_output_tokens=8, top_logprobs=2)
    content: Any = answer.output[0].content  # type: ignore[union-attr]
    assert "".join(row.token for row in content[0].logprobs) == answer.output_text
    assert all(len(row.top_logprobs) == 2 for row in content[0].logprobs)


def test_a_schema(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": {"hours": HOURS}, "required": ["hours"], "additionalProperties": False}
    form: Any = {"format": {"type": "json_schema", "name": "step", "schema": schema, "strict": True}}
    answer = client.responses.create(**GREEDY, input=ASKED, text=form, max_output_tokens=100)
    assert answer.status == "completed"
    assert Step.model_validate_json(answer.output_text).hours > 0
    parsed = client.responses.parse(**GREEDY, input=ASKED, text_format=Step, max_output_tokens=100)
    assert isinstance(parsed.output_parsed, Step)


def test_a_call_and_the_conversation_after_it(hermes: Running) -> None:
    client = hermes.openai()
    options = GREEDY | {"tools": [WALK], "max_output_tokens": 100}
    answer = client.responses.create(**options, input=ASKED, tool_choice="required", parallel_tool_calls=False)
    (call,) = answer.output
    assert call.type == "function_call"
    assert (call.name, call.status) == ("walk", "completed")
    assert Step.model_validate_json(call.arguments).hours > 0
    with client.responses.stream(**options, input=ASKED, tool_choice={"type": "function", "name": "walk"}) as stream:
        events = list(stream)
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    done = [event for event in events if event.type == "response.function_call_arguments.done"]
    assert "".join(deltas) == done[0].arguments == call.arguments
    assert events[-1].type == "response.completed"
    after: Any = [
        {"role": "user", "content": [{"type": "input_text", "text": ASKED}]},
        *[item.model_dump() for item in answer.output],
        {"type": "function_call_output", "call_id": call.call_id, "output": "two hours later"},
    ]
    second = client.responses.create(**options, input=after, tool_choice="none")
    assert second.output_text
    messages: Any = [
        {"role": "user", "content": ASKED},
        {"role": "assistant", "tool_calls": [_as_chat(call)]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "two hours later"},
    ]
    chat = client.chat.completions.create(**GREEDY, messages=messages, max_tokens=100)
    assert second.output_text == chat.choices[0].message.content


def _as_chat(call: Any) -> dict[str, Any]:
    return {"id": call.call_id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def test_items_and_events_of_an_answer_that_has_everything() -> None:
    """Each event is one that the client knows; and what they add up to is what a whole response holds."""
    output, adapter = ResponseOutput(), TypeAdapter(ResponseStreamEvent)
    function = {"name": "walk", "arguments": ""}
    events = output.read([{"reasoning_content": "H"}, {"reasoning_content": "m."}, {"content": "Two "}])
    events += output.read(
        [{"content": "walks."}], [{"token": "walks", "logprob": -1.0, "bytes": [1], "top_logprobs": []}]
    )
    events += output.read([{"tool_calls": [{"index": 0, "id": "call_1", "type": "function", "function": function}]}])
    events += output.read([{"tool_calls": [{"index": 0, "function": {"arguments": '{"hours":'}}]}])
    events += output.read([{"tool_calls": [{"index": 0, "function": {"arguments": " 2}"}}]}])
    events += output.read([{"tool_calls": [{"index": 1, "id": "call_2", "type": "function", "function": function}]}])
    events += output.finish(complete=False)
    for number, event in enumerate(events):
        known = adapter.validate_python({**event, "sequence_number": number})
        assert known.type == event["type"]
    kinds = [item["type"] for item in output.items]
    assert kinds == ["reasoning", "message", "function_call", "function_call"]
    assert [item["status"] for item in output.items] == ["completed"] * 3 + ["incomplete"]
    assert output.items[0]["content"][0]["text"] == "Hm."
    assert output.items[1]["content"][0]["text"] == "Two walks."
    assert [row["token"] for row in output.items[1]["content"][0]["logprobs"]] == ["walks"]
    assert output.items[2]["arguments"] == '{"hours": 2}'
    done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
    assert done == output.items
    added = [event["item"]["status"] for event in events if event["type"] == "response.output_item.added"]
    assert added == ["in_progress"] * 4


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("previous_response_id", "resp_1", "nothing is stored"),
        ("conversation", "conv_1", "nothing is stored"),
        ("background", True, "nothing is stored"),
        ("prompt", {"id": "pmpt_1"}, "no prompts are stored"),
        ("tools", [{"type": "web_search"}], "tools.0.type"),
        ("wibble", 1, "wibble"),
        ("return_token_ids", True, "return_token_ids has no place"),
        ("input", [], "input"),
        ("input", [{"role": "user", "content": [{"type": "input_image", "image_url": "http://x/"}]}], "data: URL"),
        ("input", [{"type": "item_reference", "id": "x"}], "item_reference"),
    ],
)
def test_what_is_refused(running: Running, field: str, value: Any, said: str) -> None:
    answer = running.post("/v1/responses", {"input": ASKED, field: value, "max_output_tokens": 4})
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]
    if field != "return_token_ids":  # which contradicts the route, not another field
        assert answer.json()["error"]["param"].startswith(field)


def test_what_has_no_effect(client: openai.OpenAI) -> None:
    same = {"store": True, "truncation": "auto", "user": "me", "metadata": {"a": "b"}, "service_tier": "auto"}
    plain = client.responses.create(**GREEDY, input=ASKED, max_output_tokens=6)
    answer = client.responses.create(**GREEDY, input=ASKED, max_output_tokens=6, **same)  # type: ignore[call-overload]
    assert answer.output_text == plain.output_text
    assert (answer.metadata, answer.store) == ({"a": "b"}, False)


def test_stored_ones_are_not_to_be_had(client: openai.OpenAI) -> None:
    for ask in (client.responses.retrieve, client.responses.cancel, client.responses.delete):
        with pytest.raises(openai.NotFoundError, match=r"nothing is stored|closes the connection"):
            ask("resp_1")


def test_an_error_in_a_stream_is_an_event(running: Running) -> None:
    body = {"input": ASKED, "stream": True, "timeout": 0.01, "ignore_eos": True, "max_output_tokens": 500}
    text = running.post("/v1/responses", body).text
    if text.startswith("event: "):
        last = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line.startswith("data: ")][-1]
        assert (last["type"], last["code"]) == ("error", "deadline_exceeded")
    else:  # it was too late from the start
        assert json.loads(text)["error"]["code"] == "deadline_exceeded"
