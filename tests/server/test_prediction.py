"""Predicted outputs and the watchdog over HTTP: the same answers, exact usage, and an alarm that can be seen."""

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import httpx
import openai
import pytest
import torch
from running import Running, Serve
from typer.testing import CliRunner

from outrider import LLM
from outrider.cli import app
from outrider.config import WatchdogConfig
from outrider.engine.watchdog import Watchdog
from outrider.sampling_params import MAX_PREDICTION
from outrider.server.engine_host import Opening, ProcessHost

ASKED: Any = [{"role": "user", "content": "Tell me about walking in nature."}]
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}


def ask(client: openai.OpenAI, prediction: str | list[str] | None = None, **options: Any) -> Any:
    if prediction is not None:
        parts = [{"type": "text", "text": part} for part in prediction]
        content = prediction if isinstance(prediction, str) else parts
        options["prediction"] = {"type": "content", "content": content}
    options = {"model": "default", "messages": ASKED, "max_tokens": 60, "temperature": 0} | options
    return client.chat.completions.create(**options)


def counted(usage: Any) -> tuple[int, int]:
    details = usage.completion_tokens_details
    return details.accepted_prediction_tokens, details.rejected_prediction_tokens


def test_a_right_prediction_is_accepted(client: openai.OpenAI) -> None:
    plain = ask(client)
    text = plain.choices[0].message.content
    assert counted(plain.usage) == (0, 0)
    answer = ask(client, text)
    assert answer.choices[0].message.content == text
    accepted, rejected = counted(answer.usage)
    assert rejected == 0
    assert accepted > 0.8 * answer.usage.completion_tokens
    assert ask(client, [text[:20], text[20:]]).usage == answer.usage, "in parts"
    steps = [each.metrics["speculative_decoding"]["num_spec_steps"] for each in (plain, answer)]
    assert steps[1] < steps[0] / 3


def test_usage_counts_what_was_drafted_from_the_prediction(
    client: openai.OpenAI, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counted twice: while the drafter is silent, all that is drafted is from the prediction."""
    assert llm.drafter is not None
    text = ask(client).choices[0].message.content
    propose = llm.drafter.propose
    silent = lambda *given: replace(propose(*given), count=torch.zeros_like(given[0].num_drafts))  # noqa: E731
    monkeypatch.setattr(llm.drafter, "propose", silent)
    found = []
    for prediction in (text, text[:60] + " quite another end of it all", "Nothing of the kind", text[40:], ""):
        answer = ask(client, prediction, extra_body={"return_token_ids": True})
        accepted, rejected = counted(answer.usage)
        assert answer.choices[0].message.content == text
        assert accepted == sum(position > 0 for position in answer.choices[0].draft_positions)
        drafted = answer.metrics["speculative_decoding"]["num_draft_tokens"] if answer.metrics else 0
        assert accepted + rejected == drafted
        streamed = list(ask(client, prediction, stream=True, stream_options={"include_usage": True}))
        assert counted(streamed[-1].usage) == (accepted, rejected)
        assert "".join(chunk.choices[0].delta.content or "" for chunk in streamed[:-1]) == text
        found.append((accepted > 0, rejected > 0))
    assert found == [(True, False), (True, True), (False, False), (True, False), (False, False)]


def test_whatever_else_is_asked_for(client: openai.OpenAI) -> None:
    text = ask(client).choices[0].message.content
    cases: list[dict[str, Any]] = [
        {"stop": text[40:44]},
        {"max_tokens": 7},
        {"n": 3, "temperature": 0.9, "seed": 4},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
        {"extra_body": {"guided_choice": [text[:25], "no"]}},
        {"logprobs": True, "top_logprobs": 2},
    ]
    for options in cases:
        plain = ask(client, **options)
        said = plain.choices[0].message.content
        for prediction in (said + text, '{"name": "x"}'):
            answer = ask(client, prediction, **options)
            for one, other in zip(answer.choices, plain.choices, strict=True):
                assert (one.message.content, one.finish_reason) == (other.message.content, other.finish_reason), options
            assert answer.usage.completion_tokens == plain.usage.completion_tokens
    several = ask(client, said, n=3, temperature=0)
    assert counted(several.usage)[0] == 3 * counted(ask(client, said).usage)[0] > 0


def test_speculation_may_be_off(client: openai.OpenAI) -> None:
    text = ask(client).choices[0].message.content
    answer = ask(client, text, extra_body={"speculative": {"enabled": False}})
    assert answer.choices[0].message.content == text
    assert answer.metrics is None
    assert counted(answer.usage) == (0, 0)


def test_completions_take_it_too(client: openai.OpenAI) -> None:
    def complete(**more: Any) -> Any:
        return client.completions.create(
            model="default", prompt=["The sun is", "The sun is"], max_tokens=30, temperature=0, extra_body=more
        )

    plain = complete()
    text = plain.choices[0].text
    answer = complete(prediction={"type": "content", "content": text})
    assert [choice.text for choice in answer.choices] == [text, text]
    accepted, rejected = counted(answer.usage)
    assert accepted > 40
    assert rejected == 0


@pytest.mark.parametrize(
    "prediction",
    [
        "text",
        {"type": "content"},
        {"type": "other", "content": "x"},
        {"type": "content", "content": "x", "more": 1},
        {"type": "content", "content": "x" * (MAX_PREDICTION + 1)},
        {"type": "content", "content": [{"type": "text", "text": "x" * (MAX_PREDICTION // 2 + 1)}] * 2},
        {"type": "content", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]},
        {"type": "content", "content": [{"type": "text", "text": "x"}] * 5000},
        {"type": "content", "content": [1, 2, 3]},
        {"type": "content", "content": None},
    ],
)
def test_what_is_refused(prediction: Any, running: Running) -> None:
    response = running.post("/v1/chat/completions", {"messages": ASKED, "max_tokens": 4, "prediction": prediction})
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith("prediction")
    assert len(response.text) < 1000


def test_half_a_surrogate_is_refused(running: Running) -> None:
    body = json.dumps({"messages": ASKED, "prediction": {"type": "content", "content": "\ud800"}})
    response = httpx.post(f"{running.url}/v1/chat/completions", content=body, timeout=30)
    assert response.status_code == 400


# the watchdog


@contextmanager
def babbling(llm: LLM) -> Iterator[None]:
    """The drafter drafts nonsense."""
    assert llm.drafter is not None
    propose = llm.drafter.propose

    def babble(*given: Any) -> Any:
        draft = propose(*given)
        return replace(draft, tokens=torch.full_like(draft.tokens, 1))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.drafter, "propose", babble)
        yield


def figures(running: Running) -> dict[str, float]:
    lines = [line.rsplit(" ", 1) for line in running.get("/metrics").text.splitlines() if not line.startswith("#")]
    return {name.split("{")[0]: float(value) for name, value in lines}


def test_dead_acceptance_is_told_and_outlived(
    serve: Serve, caplog: pytest.LogCaptureFixture, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, logger="outrider.server")
    options = {"max_tokens": 50, "extra_body": {"ignore_eos": True}}
    settings = WatchdogConfig(window=4, engine_window=16, pause=16)
    monkeypatch.setattr(llm.engine, "watchdog", Watchdog(settings, acts=True, rebuilds=True))
    with serve() as running:
        client = running.openai()
        expected = ask(client, **options | {"extra_body": {"ignore_eos": True, "speculative": {"enabled": False}}})
        assert running.get("/health/ready").json() == {"status": "ready"}
        with babbling(llm):
            for _ in range(5):
                answer = ask(client, **options)
                assert answer.choices[0].message.content == expected.choices[0].message.content
        assert running.get("/health/ready").status_code == 200
        assert running.get("/health/ready").json() == {"status": "ready", "speculation": "dead"}
        found = figures(running)
        assert found["outrider:spec_decode_dead"] == 1
        assert found["outrider:drafter_rebuilds_total"] == 3
        assert found["outrider:drafter_fallbacks_total"] == 5
        assert found["outrider:spec_decode_acceptance"] < 0.2
        events = [json.loads(record.message)["event"] for record in caplog.records if record.levelname == "WARNING"]
        assert events.count("acceptance_dead") == 1
        for _ in range(3):  # whatever it was, it is over
            ask(client, **options)
        assert figures(running)["outrider:spec_decode_dead"] == 0
        assert running.get("/health/ready").json() == {"status": "ready"}


def test_the_watchdog_can_be_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[Any] = []

    def start(host: ProcessHost, opening: Opening) -> None:
        given.append(opening.config().watchdog is not None)
        raise ValueError("enough")

    monkeypatch.setattr(ProcessHost, "__init__", start)
    for flags in ([], ["--no-watchdog"], ["--watchdog"]):
        CliRunner().invoke(app, ["serve", "--port", "0", *flags])
    assert given == [True, False, True]
    with LLM(watchdog=False) as llm:
        assert llm.engine.watchdog is None
