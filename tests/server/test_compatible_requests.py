"""Requests as clients of OpenAI and vLLM write them: what works, what has no effect, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from running import Running, Serve

from outrider import LLM
from outrider.compatibility.fields import CHAT, COMPLETION, RESPONSE
from outrider.compatibility.rules import Rules
from outrider.compatibility.table import replaced
from outrider.server.app import Application
from outrider.server.chat import messages_of
from outrider.server.compatibility import NOTES, ROUTES
from outrider.server.compatibility import server as server_part
from outrider.server.defaults import ServerDefaults, chosen_defaults
from outrider.server.engine_client import EngineClient, QueueLimits
from outrider.server.engine_host import ThreadHost
from outrider.server.responses_schema import ResponseRequest
from outrider.server.schema import ChatRequest, CompletionRequest, Message
from outrider.server.schema_base import own_names
from outrider.server.security import access_for

DOCUMENT = Path(__file__).parents[2] / "docs" / "compatibility.md"

ASKED = [{"role": "user", "content": "Tell me about walking."}]
CHAT_BODY: dict[str, Any] = {"messages": ASKED, "max_tokens": 6, "temperature": 0}
TEXT_BODY: dict[str, Any] = {"prompt": "Walking is", "max_tokens": 6, "temperature": 0}


def said(running: Running, **change: Any) -> str:
    answer = running.post("/v1/chat/completions", CHAT_BODY | change)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["message"]["content"]


def refused(running: Running, path: str = "/v1/chat/completions", **change: Any) -> dict[str, Any]:
    body = TEXT_BODY if path == "/v1/completions" else CHAT_BODY
    answer = running.post(path, body | change)
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def test_messages_of_other_clients(running: Running) -> None:
    """What openai-python and litellm make of an answer goes into the next request as it is."""
    call = {"id": "call_1", "type": "function", "function": {"name": "walk", "arguments": '{"hours": 2}'}}
    history = [
        {"role": "system", "content": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]},
        {"role": "user", "content": "Hello", "name": None},
        {
            "role": "assistant",
            "content": None,
            "refusal": None,
            "annotations": [],
            "audio": None,
            "function_call": None,
            "provider_specific_fields": {"a": 1},
            "tool_calls": [call | {"index": 0, "provider_specific_fields": None}],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "done"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}], "reasoning": "Hm."},
        *ASKED,
    ]
    assert said(running, messages=history)
    told = messages_of([Message.model_validate(each) for each in history])
    assert told[2] == {"role": "assistant", "content": "", "tool_calls": [call]}
    assert told[4]["content"] == [{"type": "text", "text": "No."}]
    assert told[4]["reasoning_content"] == "Hm."
    assert all("annotations" not in each and "reasoning" not in each for each in told)


def test_a_developer_is_the_system_where_no_template_knows_him(running: Running) -> None:
    def tokens(role: str) -> list[int]:
        messages = [{"role": role, "content": "Be brief."}, *ASKED]
        return running.post("/tokenize", {"messages": messages}).json()["tokens"]

    assert tokens("developer") == tokens("system") != tokens("assistant")


def test_null_is_the_same_as_nothing(running: Running) -> None:
    names = set(ChatRequest.model_fields) - {"messages", "max_tokens", "temperature"}
    assert said(running, **dict.fromkeys(names)) == said(running)
    for model in (ChatRequest, CompletionRequest, ResponseRequest):
        document = model.model_json_schema()
        optional = set(document["properties"]) - set(document["required"])
        assert all({"type": "null"} in document["properties"][name]["anyOf"] for name in optional)
    assert "messages" in refused(running, messages=None)["param"]


@pytest.mark.parametrize(
    ("path", "rules", "model"),
    [
        ("/v1/chat/completions", CHAT, ChatRequest),
        ("/v1/completions", COMPLETION, CompletionRequest),
        ("/v1/responses", RESPONSE, ResponseRequest),
    ],
)
def test_every_rule_holds(running: Running, path: str, rules: Rules, model: Any) -> None:
    body: dict[str, Any] = {
        "/v1/chat/completions": CHAT_BODY,
        "/v1/completions": TEXT_BODY,
        "/v1/responses": {"input": "Hello", "max_output_tokens": 2, "temperature": 0},
    }[path]
    idle = {name for group in rules.no_effect for name in group.names} - set(model.model_fields)
    assert running.post(path, body | dict.fromkeys(idle, "anything")).status_code == 200
    others = {name: {"x": 1} for group in rules.refused for name in group.names}
    for name, value in others.items():
        answer = running.post(path, body | {name: value})
        assert answer.status_code == 400, name
        assert answer.json()["error"]["param"] == name
        assert name in answer.json()["error"]["message"]


def test_unknown_fields_are_named_together(running: Running) -> None:
    error = refused(running, metadata={}, wibble=1, tempreature=2, functions=[{}])
    told = error["message"]
    assert error["param"] == "wibble"
    for word in ("wibble", "tempreature", "did you mean temperature", "functions", "use tools"):
        assert word in told
    assert "suffix" in refused(running, "/v1/completions", suffix="the end")["message"]


def test_the_offending_part_is_named(running: Running) -> None:
    def part(**fields: Any) -> list[dict[str, Any]]:
        return [{"role": "user", "content": [{"type": "text", "text": "x"}, fields]}]

    told = refused(running, messages=part(type="image_url", image_url={"url": "http://127.0.0.1/x.png"}))
    assert told["param"] == "messages.0.content.1.image_url.url"
    assert "data: URL" in told["message"]
    assert "constrained-str" not in told["message"]
    told = refused(running, messages=part(type="input_audio", input_audio={}))
    assert told["param"] == "messages.0.content.1"
    assert "input_audio" in told["message"]
    assert refused(running, stop=["a", ""])["param"] == "stop.1"
    assert refused(running, tools=[{"type": "function", "function": {}}])["param"] == "tools.0.function.name"


def test_the_context_is_exceeded(running: Running, client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length is") as told:
        client.chat.completions.create(model="default", messages=[{"role": "user", "content": "word " * 5000}])
    assert (told.value.code, told.value.param) == ("context_length_exceeded", "messages")
    told_text = refused(running, "/v1/completions", prompt="word " * 5000)
    assert (told_text["code"], told_text["param"]) == ("context_length_exceeded", "prompt")


def test_truncated_prompts(running: Running) -> None:
    long = "word " * 5000
    assert said(running, messages=[{"role": "user", "content": long}], truncate_prompt_tokens=-1) is not None
    tokens = running.post("/tokenize", {"prompt": "one two three four five six"}).json()["tokens"]
    cut = running.post("/v1/completions", TEXT_BODY | {"prompt": tokens, "truncate_prompt_tokens": 3}).json()
    assert cut["usage"]["prompt_tokens"] == 3
    whole = running.post("/v1/completions", TEXT_BODY | {"prompt": tokens[-3:]}).json()
    assert cut["choices"][0]["text"] == whole["choices"][0]["text"]


def test_prompt_logprobs(running: Running) -> None:
    """The same figures as echo gives, in vLLM's shape."""
    body = TEXT_BODY | {"prompt_logprobs": 2}
    (choice,) = running.post("/v1/completions", body).json()["choices"]
    echoed = running.post("/v1/completions", TEXT_BODY | {"echo": True, "logprobs": 2}).json()["choices"][0]["logprobs"]
    tokens = running.post("/tokenize", {"prompt": TEXT_BODY["prompt"]}).json()["tokens"]
    rows = choice["prompt_logprobs"]
    assert rows[0] is None
    assert len(rows) == len(tokens)
    for place, token in enumerate(tokens[1:], start=1):
        assert rows[place][str(token)]["logprob"] == pytest.approx(echoed["token_logprobs"][place], abs=1e-4)
        assert rows[place][str(token)]["decoded_token"] == echoed["tokens"][place]
        assert min(row["rank"] for row in rows[place].values()) == 1
    chat = running.post("/v1/chat/completions", CHAT_BODY | {"prompt_logprobs": 0}).json()
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert "stream" in refused(running, stream=True, prompt_logprobs=1)["message"]


@pytest.mark.parametrize("stream", [False, True])
def test_echo_without_an_answer(client: openai.OpenAI, stream: bool) -> None:
    """What programs that score texts send."""
    options: Any = {"model": "default", "prompt": "Walking is good.", "logprobs": 1, "echo": True, "temperature": 0}
    whole = client.completions.create(**options, max_tokens=1)
    scored: Any = client.completions.create(**options, max_tokens=0, stream=stream)
    choice = list(scored)[-1].choices[0] if stream else scored.choices[0]
    assert (choice.text, choice.finish_reason) == ("Walking is good.", "length")
    assert choice.logprobs.token_logprobs == whole.choices[0].logprobs.token_logprobs[:-1]  # type: ignore[union-attr, index]
    if not stream:
        assert scored.usage.completion_tokens == 0
    with pytest.raises(openai.BadRequestError, match="echo"):
        client.completions.create(model="default", prompt="x", max_tokens=0)


def test_structured_outputs(running: Running) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    room = {"max_tokens": 60}
    for given in ({"json": schema}, {"json": json.dumps(schema)}):
        assert json.loads(said(running, structured_outputs=given, **room))["a"] in (1, 2)
    assert said(running, structured_outputs={"choice": ["yes", "no"]}) in ("yes", "no")
    assert said(running, structured_outputs={"regex": "[ab]{3}"}) in {
        a + b + c for a in "ab" for b in "ab" for c in "ab"
    }
    assert said(running, structured_outputs={"grammar": 'root ::= "yes"'}) == "yes"
    assert isinstance(json.loads(said(running, structured_outputs={"json_object": True}, **room)), dict)
    for wrong in ({}, {"json": schema, "regex": "a"}, {"json": "{"}, {"whitespace_pattern": "x"}):
        assert refused(running, structured_outputs=wrong)


def test_effort_and_variables_reach_the_template(serve: Serve, llm: LLM) -> None:
    source = "{{ messages[0].content }}|{{ reasoning_effort }}|{{ enable_thinking }}|{{ mood }}|"
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    own = tokenizer._chat
    tokenizer.use_template(source)
    try:
        with serve() as running:

            def prompt(**change: Any) -> str:
                answer = running.post("/v1/chat/completions", CHAT_BODY | {"prompt_logprobs": 0} | change)
                assert answer.status_code == 200, answer.text
                rows = answer.json()["prompt_logprobs"][1:]
                return "".join(next(iter(row.values()))["decoded_token"] for row in rows)

            assert prompt(reasoning_effort="high").endswith("|high|||")
            assert prompt(reasoning_effort="none").endswith("||False||")
            assert prompt(chat_template_kwargs={"mood": "calm"}).endswith("|calm|")
            both = {"reasoning_effort": "low", "chat_template_kwargs": {"reasoning_effort": "high"}}
            assert prompt(**both).endswith("|high|||")
            for name in ("messages", "bos_token", "tokenize", "a b"):
                assert name in refused(running, chat_template_kwargs={name: "x"})["message"]
    finally:
        tokenizer._chat = own


def test_ids_fingerprints_and_reasoning(running: Running) -> None:
    answer = running.post("/v1/chat/completions", CHAT_BODY | {"request_id": "mine-7"})
    assert answer.json()["id"] == "chatcmpl-mine-7"
    assert answer.json()["system_fingerprint"].startswith("fp_")
    given = running.post("/v1/completions", TEXT_BODY, headers={"X-Request-Id": "from.header"})
    assert given.headers["x-request-id"] == "from.header"
    assert given.json()["id"] == "cmpl-from.header"
    assert given.json()["system_fingerprint"] == answer.json()["system_fingerprint"]
    bad = running.get("/nowhere", headers={"X-Request-Id": "no spaces please"})
    assert bad.status_code == 404
    assert len(bad.headers["x-request-id"]) == 24
    refused(running, request_id="no spaces please")


def test_other_routes(running: Running) -> None:
    assert running.get("/version").json()["version"]
    assert running.get("/ping").status_code == running.post("/ping").status_code == 200
    info = running.get("/tokenizer_info").json()
    assert info["vocab_size"] > 100
    assert info["chat_template"]
    for path in ("/v1/embeddings", "/v1/messages", "/v1/responses/resp_1"):
        answer = running.post(path, {})
        assert answer.status_code == 404
        assert len(answer.json()["error"]["message"]) > 30
        assert answer.json()["error"]["code"] == "unsupported_endpoint"


def test_names_of_a_model(llm: LLM, running: Running) -> None:
    origin = running.engine.model.origin
    assert running.post("/v1/chat/completions", CHAT_BODY | {"model": origin}).json()["model"] == "default"
    host = ThreadHost(llm, "first")
    try:
        engine = EngineClient(host.link, host.model, "first", QueueLimits(), host.why_ended)
        made = Application(engine, llm.tokenizer, "first", access_for("127.0.0.1"), other_names=["second"])
        service = made.service
        for name in ("first", "second", origin, None):
            service.check_model(name)
        with pytest.raises(Exception, match="only first, second"):
            service.check_model("third")
        assert service.model_name == "first"
    finally:
        host.close()


def test_all_pages_may_be_allowed(serve: Serve) -> None:
    """The request itself, and not only the preflight."""
    origin = {"Origin": "https://anywhere.example"}
    with serve(access=access_for("127.0.0.1", origins=["*"])) as running:
        preflight = {
            **origin,
            "Access-Control-Request-Method": "POST",
            "Access-Control-Request-Headers": "content-type",
        }
        answer = running.post("/v1/chat/completions", CHAT_BODY, headers=origin)
        assert answer.status_code == 200
        assert answer.headers["access-control-allow-origin"] == "*"
        options = httpx.options(running.url + "/v1/chat/completions", headers=preflight)
        assert options.status_code == 200
    with serve() as running:
        assert running.post("/v1/chat/completions", CHAT_BODY, headers=origin).status_code == 403


def test_defaults_of_the_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6, "top_k": 20, "max_new_tokens": 9}')
    found = chosen_defaults("auto", tmp_path, None, None)
    assert (found.sampling(), found.max_tokens) == ({"temperature": 0.6, "top_k": 20}, 9)
    assert chosen_defaults("vllm", tmp_path, None, None) == ServerDefaults()
    assert chosen_defaults(str(tmp_path), Path("/"), '{"top_k": 5, "temperature": null}', 1).settings["top_k"] == 5
    for source, override in (("/nowhere", None), ("auto", "{"), ("auto", '{"wibble": 1}'), ("auto", '{"top_p": 7}')):
        with pytest.raises(ValueError):
            chosen_defaults(source, tmp_path, override, None)


def test_defaults_hold_for_what_a_request_leaves_out(serve: Serve) -> None:
    greedy = {"messages": ASKED, "max_tokens": 12, "seed": 3}
    with serve() as running:
        expected = said(running, **greedy, temperature=0)
        random = [said(running, **greedy | {"seed": seed}, temperature=1.0) for seed in (1, 2)]
    with serve(defaults=ServerDefaults({"temperature": 0.0, "max_new_tokens": 5})) as running:
        unasked = running.post("/v1/chat/completions", greedy).json()
        assert unasked["choices"][0]["message"]["content"] == expected
        assert [said(running, **greedy | {"seed": seed}, temperature=1.0) for seed in (1, 2)] == random
        short = running.post("/v1/chat/completions", {"messages": ASKED, "ignore_eos": True}).json()
        assert short["usage"]["completion_tokens"] == 5
        text = running.post("/v1/completions", {"prompt": "x", "ignore_eos": True}).json()
        assert text["usage"]["completion_tokens"] == 16  # OpenAI's own default


def test_a_server_with_a_seed_says_the_same_after_every_start(serve: Serve) -> None:
    body = {"messages": ASKED, "max_tokens": 12, "temperature": 1.0}
    runs = []
    for _ in range(2):
        with serve(defaults=ServerDefaults(seed=7)) as running:
            runs.append([said(running, **body) for _ in range(2)])
    assert runs[0] == runs[1]
    assert runs[0][0] != runs[0][1]  # each request has a seed of its own


def test_the_document_says_what_the_server_does(running: Running) -> None:
    text = DOCUMENT.read_text()
    assert replaced(text, "server", server_part()) == text, "run scripts/make_compatibility.py"
    paths = running.get("/openapi.json").json()["paths"]
    routes = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert set(ROUTES) <= routes
    known = {name for model in (ChatRequest, CompletionRequest, ResponseRequest) for name in own_names(model)}
    assert set(NOTES) <= known
