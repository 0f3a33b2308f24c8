"""What a client must not send: it is told so, the server lives, and others do not notice."""

from typing import Any

import httpx
import pytest
from running import Running

from outrider.server.schema import ChatRequest, Generation

CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
EXTREMES = (-(2**63), -(2**63) - 1, -1, 0, 2**63 - 1, 2**63, 1e308, True, "7", None)
NUMBERS = ("n", "temperature", "top_p", "top_k", "min_p", "seed", "repetition_penalty", "presence_penalty")
NUMBERS += ("frequency_penalty", "max_tokens", "min_tokens", "top_logprobs", "timeout", "max_completion_tokens")
NESTED = b'{"a":' * 100_000
HEAD = b'{"max_tokens": 4, "messages": [{"role": "user", "content": "x"}], '
BAD: dict[str, bytes] = {
    "no JSON": b"{",
    "nothing": b"",
    "bad UTF-8": b'{"messages": [{"role": "user", "content": "\xff\xfe"}]}',
    "half a surrogate": rb'{"messages": [{"role": "user", "content": "\ud800"}]}',
    "a surrogate as a key": HEAD + rb'"\ud800": 1}',
    "deeply nested": NESTED,
    "deeply nested schema": HEAD + b'"guided_json": ' + b'{"items":' * 500 + b"{}" + b"}" * 501,
    "not a number": HEAD + b'"temperature": NaN}',
    "infinity": HEAD + b'"temperature": Infinity}',
    "a number of 10000 digits": HEAD + b'"seed": ' + b"9" * 10_000 + b"}",
    "500000 stop strings": HEAD + b'"stop": [' + b'"a",' * 499_999 + b'"a"]}',
    "an empty stop string": HEAD + b'"stop": ""}',
    "a list": b"[1, 2]",
    "no messages": b'{"messages": []}',
    "an unknown role": b'{"messages": [{"role": "root", "content": "x"}]}',
    "a file of the server": b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": '
    b'{"url": "/etc/passwd"}}]}]}',
    "a URL to fetch": b'{"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": '
    b'{"url": "http://127.0.0.1/"}}]}]}',
    "a template": HEAD + b'"chat_template": "{{ 1 }}"}',
    "too many biases": HEAD + b'"logit_bias": {' + b",".join(b'"%d": 1' % n for n in range(5000)) + b"}}",
    "a token that is none": HEAD + b'"logit_bias": {"99999999": 1}}',
    "stream_options without stream": HEAD + b'"stream_options": {"include_usage": true}}',
    "a deep tool call": b'{"max_tokens": 4, "messages": [{"role": "assistant", "tool_calls": ['
    + b'{"a":' * 3000
    + b"1"
    + b"}" * 3000
    + b"]}]}",
    "a tool call without JSON": b'{"max_tokens": 4, "messages": [{"role": "assistant", "tool_calls": [{"function": '
    b'{"arguments": "{"}}]}]}',
    "deep arguments": b'{"max_tokens": 4, "messages": [{"role": "assistant", "tool_calls": [{"function": '
    b'{"arguments": "' + b"[" * 100_000 + b'"}}]}]}',
    "no such grammar": HEAD + b'"guided_grammar": "root ::= ("}',
}


def check_error(response: httpx.Response) -> None:
    assert 400 <= response.status_code < 500, response.text
    assert set(response.json()) == {"error"}
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    for word in ("Traceback", "/src/", "outrider/", "site-packages"):
        assert word not in response.text
    assert len(response.text) < 1000


@pytest.fixture(scope="module")
def expected(shared: Running) -> str:
    return shared.post("/v1/chat/completions", CHAT | {"temperature": 0}).json()["choices"][0]["message"]["content"]


@pytest.mark.parametrize("name", BAD)
def test_bad_bodies(running: Running, expected: str, name: str) -> None:
    headers = {"Content-Type": "application/json"}
    check_error(running.post("/v1/chat/completions", content=BAD[name], headers=headers))
    answer = running.post("/v1/chat/completions", CHAT | {"temperature": 0}).json()
    assert answer["choices"][0]["message"]["content"] == expected
    assert running.get("/health/live").status_code == 200


def test_numbers_at_their_extremes(running: Running) -> None:
    statuses = set()
    with httpx.Client(timeout=30) as client:
        for name in NUMBERS:
            for value in EXTREMES:
                body: dict[str, Any] = CHAT | {name: value, "logprobs": name == "top_logprobs"}
                if name in ("max_tokens", "max_completion_tokens"):
                    body["stop_token_ids"] = list(range(64))
                    body["timeout"] = 2  # where the number is as good as none
                response = client.post(running.url + "/v1/chat/completions", json=body)
                statuses.add(response.status_code)
                if response.status_code not in (200, 504):
                    check_error(response)
    assert statuses <= {200, 400, 504}
    assert {200, 400} <= statuses


def test_text_parts_of_other_routes(running: Running) -> None:
    for path, body in (
        ("/v1/completions", {"prompt": ""}),
        ("/v1/completions", {"prompt": []}),
        ("/v1/completions", {"prompt": [-1]}),
        ("/v1/completions", {"prompt": [2**31 - 1]}),
        ("/v1/completions", {"prompt": ["x"] * 65}),
        ("/v1/completions", {"prompt": ["x"] * 60, "n": 60}),
        ("/tokenize", {}),
        ("/tokenize", {"prompt": "x", "messages": [{"role": "user", "content": "x"}]}),
        ("/detokenize", {"tokens": [-1]}),
        ("/detokenize", {"tokens": [2**40]}),
    ):
        check_error(running.post(path, body))
    check_error(running.get("/nowhere"))
    check_error(running.get("/v1/completions"))


def test_every_field_has_a_bound() -> None:
    """Numbers, texts, lists and maps; what is free inside (a schema, a tool) is bounded by the body's size."""

    def unbounded(schema: Any) -> bool:
        options = schema.get("anyOf", [schema])
        for option in options:
            kind = option.get("type")
            if kind in ("integer", "number") and not {"maximum", "exclusiveMaximum"} & set(option):
                return True
            if kind == "string" and not {"maxLength", "enum", "const"} & set(option):
                return True
            if kind == "array" and "maxItems" not in option:
                return True
        return False

    for model in (ChatRequest, Generation):
        properties = model.model_json_schema()["properties"]
        assert [name for name, schema in properties.items() if unbounded(schema)] == []
