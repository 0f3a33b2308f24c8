"""Reasoning and tool calls in answers, whole and streamed. A grammar makes the model write them."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from running import Serve

from outrider.server.messages import message_of
from outrider.server.parsers import ParserNames

pytest.importorskip("xgrammar")

CALL = '<tool_call>\n{"name": "walk", "arguments": {"hours": [1]}}\n</tool_call>'
ANSWERS = {
    "reasoning and a call": f"<think>Where to?</think>So. {CALL}",
    "two calls": CALL + CALL,
    "neither": "Nature < tools",
    "a call that breaks off": CALL[:40],
}
TOOLS: Any = [{"type": "function", "function": {"name": "walk", "parameters": {"type": "object"}}}]


def ask(client: openai.OpenAI, answer: str, **options: Any) -> Any:
    return client.chat.completions.create(
        model="default",
        messages=[{"role": "user", "content": "Walk."}],
        tools=TOOLS,
        temperature=0,
        extra_body={"guided_choice": [answer]} | options.pop("extra_body", {}),
        **options,
    )


def plain(call: Any) -> dict[str, Any]:
    """Without its id, which is a new one every time."""
    return {name: value for name, value in call.items() if name != "id"}


def test_calls_and_reasoning(serve: Serve) -> None:
    with serve(parsers=ParserNames("hermes", "think")) as running:
        client = running.openai()
        for name, answer in ANSWERS.items():
            with ThreadPoolExecutor() as pool:
                variants = ({}, {"stream": True}, {"extra_body": {"speculative": {"enabled": False}}})
                whole, stream, off = pool.map(
                    lambda options: ask(client, options.pop("answer"), **options),
                    [{"answer": answer, **options} for options in variants],
                )
                chunks = list(stream)
            choice = whole.choices[0].model_dump(exclude_none=True)
            message = choice["message"]
            deltas = [chunk.choices[0].delta.model_dump(exclude_none=True) for chunk in chunks]
            streamed = message_of(deltas)
            assert streamed.get("content") == message.get("content"), name
            assert streamed.get("reasoning_content") == message.get("reasoning_content")
            calls = message.get("tool_calls", [])
            assert [plain(call) for call in streamed.get("tool_calls", [])] == [plain(call) for call in calls]
            assert chunks[-1].choices[0].finish_reason == choice["finish_reason"]
            assert off.choices[0].message.content == message.get("content")
            assert choice["finish_reason"] == ("tool_calls" if calls else "stop")
            if name == "reasoning and a call":
                assert (message["reasoning_content"], message["content"]) == ("Where to?", "So. ")
                assert json.loads(calls[0]["function"]["arguments"]) == {"hours": [1]}
                assert calls[0]["function"]["name"] == "walk"
            if name == "two calls":
                assert len(calls) == 2
        unread = ask(client, CALL, tool_choice="none").choices[0]
        assert unread.message.content == CALL
        assert unread.finish_reason == "stop"


def test_tools_need_a_parser(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="--tool-call-parser"):
        ask(client, CALL)
