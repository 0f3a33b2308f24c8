"""JSON over HTTP: closed in time, told by stop_reason, and both options of the request do something."""

import json
from typing import Any

import pytest
from running import Running

ASKED = {"messages": [{"role": "user", "content": "Tell me a story."}], "temperature": 0, "max_tokens": 40}
LIST = {"type": "object", "properties": {"a": {"type": "array", "items": {"type": "string"}}}, "required": ["a"]}
FORMS: dict[str, dict[str, Any]] = {
    "json_object": {"response_format": {"type": "json_object"}},
    "json_schema": {"response_format": {"type": "json_schema", "json_schema": {"name": "list", "schema": LIST}}},
    "guided_json": {"guided_json": LIST},
}


@pytest.mark.parametrize("form", FORMS)
def test_json_is_closed_or_cut(form: str, running: Running) -> None:
    def choice(**options: Any) -> dict[str, Any]:
        answer = running.post("/v1/chat/completions", ASKED | FORMS[form] | options)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]

    closed, cut = choice(), choice(guided_close=False)
    assert isinstance(json.loads(closed["message"]["content"]), dict)
    assert (closed["finish_reason"], closed["stop_reason"]) == ("stop", "max_tokens")
    assert (cut["finish_reason"], cut["stop_reason"]) == ("length", None)
    if form == "guided_json":  # the model would write nothing but line ends
        assert "\n\n" in choice(guided_max_whitespace=24)["message"]["content"]
    assert "\n\n" not in closed["message"]["content"]


@pytest.mark.parametrize("option", [{"guided_close": True}, {"guided_max_whitespace": 3}])
def test_options_without_json_are_refused(option: dict[str, Any], running: Running) -> None:
    answer = running.post("/v1/chat/completions", ASKED | option)
    assert answer.status_code == 400
    assert next(iter(option)) in answer.json()["error"]["message"]


def test_a_pattern_that_cannot_be_kept_is_a_400(running: Running) -> None:
    schema = {"type": "object", "properties": {"code": {"type": "string", "pattern": "^(?=.*x)[a-z]+$"}}}
    for body in ({"guided_json": schema}, {"guided_regex": "^(?=.*x)[a-z]+$"}):
        answer = running.post("/v1/chat/completions", ASKED | body)
        assert answer.status_code == 400
        assert "a lookahead, (?= at character 2" in answer.json()["error"]["message"]
