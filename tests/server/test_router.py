"""One address in front of two servers: nothing is lost where one goes, and conversations find their pages again."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
import threading
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest
from cutting import Cutting
from running import Running, Serve, wait_for
from test_continuation import CASES, CHAT, PROMPT, joined, same

from outrider import LLM
from outrider.server.errors import ApiError
from outrider.server.parsers import ParserNames
from outrider.server.router.affinity import SPREAD, Affinity, names_of
from outrider.server.router.app import RouterApplication
from outrider.server.router.fleet import Asked, HttpFleet
from outrider.server.router.relay import Figures, Relay
from outrider.server.router.replay import Replayed
from outrider.server.router.stream import Resumable
from outrider.server.security import access_for
from outrider.server.serving import Server


@dataclass
class Routed:
    url: str
    replicas: list[Cutting]
    cuts: deque[int]
    servers: list[Running]  # behind them

    @property
    def first(self) -> Running:
        """To be asked without the router."""
        return self.servers[0]

    @property
    def num_cut(self) -> int:
        return sum(each.num_cut for each in self.replicas)


@pytest.fixture(scope="module")
def routed(serve: Serve, llm: LLM) -> Iterator[Routed]:
    cuts: deque[int] = deque()
    with LLM.from_config(llm.config) as other, contextlib.ExitStack() as stack:
        parsers = ParserNames("hermes")
        servers = [stack.enter_context(serve(parsers=parsers, other=each)) for each in (llm, other)]
        proxies = [Cutting(server.port, cuts) for server in servers]
        url = stack.enter_context(running_router([each.url for each in proxies]))
        yield Routed(url, proxies, cuts, servers)
        for each in proxies:
            each.close()


@contextlib.contextmanager
def running_router(urls: list[str], patience: float = 10.0) -> Iterator[str]:
    application = RouterApplication(HttpFleet(urls, patience, interval=0.05), access_for("127.0.0.1"))
    server = Server(application, "127.0.0.1", 0, 5.0)
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_for(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.handle_exit(15, None)
        server.handle_exit(15, None)
        thread.join(20)
        assert not thread.is_alive()


def body_of(name: str) -> tuple[str, dict[str, Any]]:
    route, options = CASES[name]
    return f"/v1/{route}", {**({"messages": CHAT} if "chat" in route else {"prompt": PROMPT}), **options}


def stream_of(url: str, route: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    options = {"stream": True, "stream_options": {"include_usage": True}}
    answer = httpx.post(url + route, json={**body, **options}, timeout=60)
    assert answer.status_code == 200, answer.text
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.mark.parametrize("name", ["stop", "logprobs", "several", "chat"])
def test_a_stream_that_breaks_goes_on_elsewhere(routed: Routed, name: str) -> None:
    """Wherever it breaks: among headers, inside an event, twice."""
    route, body = body_of(name)
    undisturbed = stream_of(routed.first.url, route, body)
    num_answers = 1 + max(choice["index"] for chunk in undisturbed for choice in chunk["choices"])
    size = sum(len(json.dumps(chunk)) for chunk in undisturbed)
    for cuts in ([40], [size // 3], [size // 2, size // 4]):
        before = routed.num_cut
        routed.cuts.extend(cuts)
        wait_for(lambda: httpx.get(f"{routed.url}/health").json()["replicas"] == 2)
        chunks = stream_of(routed.url, route, body)
        routed.cuts.clear()
        assert routed.num_cut > before
        for index in range(num_answers):
            same(joined(chunks, index), joined(undisturbed, index))
        assert chunks[-1]["usage"]["completion_tokens"] == undisturbed[-1]["usage"]["completion_tokens"]
        assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1, "it is one stream"
        assert not any("token_ids" in choice for chunk in chunks for choice in chunk["choices"])


def test_a_response_that_breaks_goes_on_elsewhere(routed: Routed) -> None:
    """Events and names of items are those of one response."""
    body = {"input": "Tell me a story about a dog.", "max_output_tokens": 60, "seed": 5, "temperature": 0.9}
    body |= {"top_logprobs": 1, "stream": True}

    def events_of(url: str) -> list[dict[str, Any]]:
        answer = httpx.post(f"{url}/v1/responses", json=body, timeout=60).text
        return [json.loads(line.partition("data: ")[2]) for line in answer.split("\n\n") if line]

    def told(events: list[dict[str, Any]]) -> Any:
        """What a client makes of them, with names in the order in which they came."""
        names = list(dict.fromkeys(event["item"]["id"] for event in events if "item" in event))
        deltas = "".join(event["delta"] for event in events if "delta" in event)
        rows = [row["token"] for event in events for row in event.get("logprobs", ()) if "delta" in event]
        text = json.dumps([event | {"sequence_number": 0, "response": 0} for event in events if "delta" not in event])
        for number, name in enumerate(names):
            text = text.replace(name, f"name-{number}")
        output = events[-1]["response"]["output"]
        return deltas, rows, re.sub(r'("(log|top_log)probs?": )([^]]*])+|-[0-9.]+', "", text), len(output)

    undisturbed = events_of(routed.first.url)
    size = sum(len(json.dumps(event)) for event in undisturbed)
    for cuts in ([size // 4], [size // 2, size // 3]):
        wait_for(lambda: httpx.get(f"{routed.url}/health").json()["replicas"] == 2)
        before = routed.num_cut
        routed.cuts.extend(cuts)
        events = events_of(routed.url)
        routed.cuts.clear()
        assert routed.num_cut > before
        assert told(events) == told(undisturbed)
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        last = events[-1]["response"]
        assert {item["id"] for item in last["output"]} == {e["item"]["id"] for e in events if "item" in e}
        assert len({event["response"]["id"] for event in events if "response" in event}) == 1


def test_a_stream_without_a_seed_goes_on_as_it_was(routed: Routed) -> None:
    body = {"prompt": PROMPT, "temperature": 1.0, "max_tokens": 40, "ignore_eos": True, "return_token_ids": True}
    routed.cuts.append(2500)
    before = routed.num_cut
    chunks = stream_of(routed.url, "/v1/completions", body)
    assert routed.num_cut == before + 1
    told = joined(chunks, 0)
    assert len(told["tokens"]) == 40
    assert told["text"] == routed.first.llm.tokenizer.decode(told["tokens"])[: len(told["text"])]


def test_whole_answers_are_asked_for_again(routed: Routed) -> None:
    client = openai.OpenAI(base_url=f"{routed.url}/v1", api_key="none", max_retries=0, timeout=30)
    asked: Any = {"model": "default", "messages": CHAT, "temperature": 0, "max_tokens": 20}
    expected = client.chat.completions.create(**asked).choices[0].message.content
    wait_for(lambda: httpx.get(f"{routed.url}/health").json()["replicas"] == 2)
    routed.cuts.extend([60, 400])
    before = routed.num_cut
    assert client.chat.completions.create(**asked).choices[0].message.content == expected
    assert routed.num_cut == before + 2
    assert "outrider:router_lost_total" in httpx.get(f"{routed.url}/metrics").text


def test_what_ends_replica_after_replica_is_given_up(routed: Routed) -> None:
    routed.cuts.extend([40] * 3)
    answer = httpx.post(f"{routed.url}/v1/completions", json={"prompt": PROMPT, "max_tokens": 4}, timeout=30)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "replica_lost")
    assert not routed.cuts


def test_who_leaves_is_not_worked_for(routed: Routed) -> None:
    wait_for(lambda: httpx.get(f"{routed.url}/health").json()["replicas"] == 2)
    body = {"prompt": PROMPT, "max_tokens": 1500, "ignore_eos": True, "temperature": 0}
    with httpx.stream("POST", f"{routed.url}/v1/completions", json={**body, "stream": True}, timeout=30) as answer:
        next(answer.iter_bytes())
        assert not all(each.engine.is_idle for each in routed.servers)
    for each in routed.servers:
        each.wait_until_idle(2.0)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{routed.url}/v1/completions", json=body, timeout=0.5)
    for each in routed.servers:
        each.wait_until_idle(2.0)


def test_errors_and_other_routes_are_passed_on(routed: Routed) -> None:
    wait_for(lambda: httpx.get(f"{routed.url}/health").json()["replicas"] == 2)
    assert httpx.get(f"{routed.url}/v1/models").json()["data"][0]["id"] == "default"
    for body in ({"prompt": PROMPT, "wibble": 1}, {"prompt": PROMPT, "stream": True, "wibble": 1}, [1]):
        direct, answer = (httpx.post(f"{url}/v1/completions", json=body) for url in (routed.first.url, routed.url))
        assert (answer.status_code, answer.json()) == (direct.status_code, direct.json())
        assert answer.headers["x-request-id"]
    assert httpx.post(f"{routed.url}/v1/completions", content=b"{").status_code == 400
    assert httpx.get(f"{routed.url}/v1/models", headers={"Host": "evil.example"}).status_code == 403
    with running_router(["http://127.0.0.1:9"], patience=0.1) as alone:
        assert httpx.get(f"{alone}/health/ready").status_code == 503
        answer = httpx.post(f"{alone}/v1/completions", json={"prompt": PROMPT})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_replica")


def test_a_path_cannot_name_another_host(routed: Routed) -> None:
    """http://replica + @elsewhere/... would be asked of elsewhere."""
    heard: list[bytes] = []
    with socket.create_server(("127.0.0.1", 0)) as elsewhere:
        elsewhere.settimeout(0.5)
        port = elsewhere.getsockname()[1]
        address = httpx.URL(routed.url)
        for target in (f"@127.0.0.1:{port}/v1/models", f"nobody@127.0.0.1:{port}/v1/models"):
            with socket.create_connection((address.host, address.port or 80), timeout=10) as client:
                client.sendall(f"GET {target} HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: close\r\n\r\n".encode())
                heard.append(client.recv(100))
        with pytest.raises(TimeoutError):
            elsewhere.accept()
    assert all(re.match(rb"HTTP/1.1 4\d\d ", answer) for answer in heard), heard


def talk(url: str, number: int) -> list[int]:
    """A chat of two turns: cached tokens of each prompt. Questions are long and answers short, so that no drafts are
    worth reading a prompt again for."""
    messages, cached = [], []
    for turn in range(2):
        asked = f"Tell me about animal {number}, part {turn}, in some words. " + "It has four legs and a tail. " * 12
        messages.append({"role": "user", "content": asked})
        body = {"messages": messages, "temperature": 0, "max_tokens": 6}
        answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60).json()
        messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"]})
        cached.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
    return cached


def test_chats_find_their_pages_again(routed: Routed) -> None:
    wait_for(lambda: httpx.get(f"{routed.url}/health").json()["replicas"] == 2)
    counts = [each.num_asked for each in routed.replicas]
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda number: talk(routed.url, 100 + number), range(8)))
        alone = list(pool.map(lambda number: talk(routed.first.url, 300 + number), range(8)))
    assert sum(map(sum, found)) >= 0.9 * sum(map(sum, alone)) > 0
    shares = [each.num_asked - before for each, before in zip(routed.replicas, counts, strict=True)]
    assert min(shares) >= 5, f"both are at work: {shares}"


# without servers


def chat(*texts: str, **more: Any) -> list[bytes]:
    """The user's messages in turn, each with an answer that is written down in some way."""
    said = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": text, "n": len(texts)}] for text in texts
    ]
    return names_of({"messages": [message for pair in said for message in pair], **more})


def test_a_prompt_goes_where_most_of_it_is_known() -> None:
    affinity = Affinity()
    affinity.sent("a", chat("hello"))
    affinity.sent("b", chat("good morning " * 20))
    for replica in "ab":
        affinity.ended(replica)
    assert affinity.ranked(chat("hello", "and more"), "ab") == ["a", "b"]
    assert affinity.ranked(chat("good morning " * 20, "x"), "ab") == ["b", "a"]
    assert affinity.ranked(chat("something new"), "ab") == ["a", "b"], "the one that has seen less"
    assert affinity.ranked(chat("good morning " * 20, cache_salt="mine"), "ab") == ["a", "b"], "shares nothing"
    for _ in range(SPREAD + 1):
        affinity.sent("b", [])
    assert affinity.ranked(chat("good morning " * 20, "x"), "ab") == ["a", "b"], "too busy"
    affinity.forget("b")
    for _ in range(SPREAD + 1):
        affinity.ended("b")
    assert affinity.ranked(chat("good morning " * 20, "x"), "ab") == ["b", "a"], "knows nothing now, and is as idle"


def test_what_belongs_together_is_passed_on_together() -> None:
    """Several chunks may stand for the same tokens: a client that had some of them would get the others twice."""

    def chunk(delta: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {"id": "1", "created": 2, "choices": [{"index": 0, "delta": delta, "finish_reason": None, **more}]}

    stream = Resumable({"messages": [], "stream": True}, seed=7)
    assert list(stream.take(chunk({"role": "assistant"}))) == [chunk({"role": "assistant"})]
    assert json.loads(stream.body) == {"messages": [], "stream": True, "return_token_ids": True, "seed": 7}
    assert list(stream.take(chunk({"content": "a"}, token_ids=[3, 4], num_chunks=2))) == []
    assert "continuation" not in json.loads(stream.body)
    stream.begin_again()
    assert list(stream.take(chunk({"role": "assistant"}))) == []
    assert list(stream.take(chunk({"content": "a"}, token_ids=[3, 4], num_chunks=2))) == []
    assert list(stream.take(chunk({"tool_calls": []}))) == [chunk({"content": "a"}), chunk({"tool_calls": []})]
    assert list(stream.take(chunk({}, token_ids=[5]))) == [], "part of a character"
    assert json.loads(stream.body)["continuation"] == [[3, 4, 5]]


@dataclass
class Said:
    """What a made-up replica answers."""

    replica: str
    status: int
    code: str | None = None
    headers: list[tuple[str, str]] = field(default_factory=lambda: [("retry-after", "7")])

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        yield json.dumps({"error": {"message": self.replica, "code": self.code}}).encode()

    async def close(self) -> None:
        pass


class Scripted:
    """Replicas that answer as a script says; `ask` of those that are not avoided, in turn."""

    def __init__(self, num_ready: int, *script: tuple[int, str | None]) -> None:
        self.num_ready, self.script, self.asked = num_ready, deque(script), []

    async def ask(self, asked: Asked, names: Any, avoided: Any) -> Said:
        name = next(name for name in "abc" if name not in avoided)
        self.asked.append(name)
        return Said(name, *self.script.popleft())


def told(fleet: Scripted) -> tuple[int, str]:
    relay = Relay(fleet, Asked("POST", "/v1/completions", [], b'{"prompt": "x"}'), Figures())
    try:
        whole = asyncio.run(relay.opened())
        assert whole is not None
        return whole.status, json.loads(whole.body)["error"]["message"]
    except ApiError as error:
        return error.status, error.message


def test_who_is_too_busy_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("outrider.server.router.relay.PAUSE", 0.0)
    busy, dead = (429, "queue_full"), (503, "engine_dead")
    assert told(Scripted(2, busy, (200, None))) == (200, "b")
    assert told(Scripted(2, busy, busy)) == (429, "b"), "all are"
    assert told(Scripted(1, busy)) == (429, "a")
    fleet = Scripted(2, dead, dead, dead, (200, None))
    assert told(fleet) == (200, "b"), "one of them has begun again"
    assert fleet.asked == ["a", "b", "a", "b"]
    assert told(Scripted(1, (500, None))) == (500, "a"), "a fault is not tried again"


def test_a_call_has_the_name_that_the_client_knows() -> None:
    """Two replicas tell of the same call, by other names and in other pieces."""

    def events(name: str, *pieces: str) -> list[dict[str, Any]]:
        item = {"type": "function_call", "id": f"fc_{name}", "call_id": f"call_{name}"}
        kind = "response.function_call_arguments"
        return [
            {"type": "response.created", "response": {"id": "r", "created_at": len(name)}},
            {"type": "response.output_item.added", "output_index": 0, "item": item},
            *({"type": f"{kind}.delta", "output_index": 0, "item_id": item["id"], "delta": each} for each in pieces),
            {"type": f"{kind}.done", "output_index": 0, "item_id": item["id"]},
            {"type": "response.completed", "response": {"id": "r", "created_at": len(name), "output": [item]}},
        ]

    replayed = Replayed({"input": "x", "stream": True}, seed=3)
    assert json.loads(replayed.body)["seed"] == 3
    first = [each for event in events("one", "ab", "cd", "e")[:4] for each in replayed.take(event)]
    replayed.begin_again()
    rest = [each for event in events("other", "a", "bcde", "f") for each in replayed.take(event)]
    told = [*first, *rest]
    assert [event.get("delta") for event in told] == [None, None, "ab", "cd", "e", "f", None, None]
    assert [event["sequence_number"] for event in told] == list(range(8))
    assert told[-1]["response"] == events("one")[-1]["response"]
    assert {event["item_id"] for event in told if "item_id" in event} == {"fc_one"}
    assert replayed.is_last(told[-1])
    assert not replayed.is_last(told[-2])
