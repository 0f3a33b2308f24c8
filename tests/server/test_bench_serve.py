"""`outrider bench serve`: on our own server, on servers that behave otherwise, and by hand-made records."""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import uvicorn
from running import Running, Serve, wait_for
from typer.testing import CliRunner

from outrider.bench.load.serve_client import Answered, Asking, StreamReader, events, kind_of
from outrider.bench.load.serve_load import Load, LoadOutcome, connect, run_load
from outrider.bench.load.serve_metrics import drafting_from, drafting_of
from outrider.bench.load.serve_report import LatencyFigures, parse_goals, summarise, to_dict, within
from outrider.bench.prompts import PromptText
from outrider.cli import app
from outrider.server.security import access_for

QUICK = ("--num-prompts", "4", "--num-warmups", "1", "--max-tokens", "16", "--concurrency", "2")


def bench(url: str, *options: str) -> tuple[int, dict[str, Any], str]:
    """Status, the JSON line that comes last (if one does), and everything that was said."""
    result = CliRunner().invoke(app, ["bench", "serve", "--base-url", url, *options], env={"OPENAI_API_KEY": None})
    last = result.stdout.rstrip().rpartition("\n")[2]
    return result.exit_code, json.loads(last) if last.startswith("{") else {}, result.stdout + result.stderr


# our own server


def test_figures_of_our_server(running: Running, tmp_path: Path) -> None:
    file = tmp_path / "result.json"
    goals = ("--goodput", "ttft:600000", "tpot:600000")
    status, report, said = bench(running.url, *QUICK, "--ignore-eos", "--save", str(file), *goals)
    assert status == 0
    assert (report["completed"], report["failed"], report["model_id"]) == (4, 0, "default")
    assert report["total_output_tokens"] == 4 * 16
    assert report["output_throughput"] == pytest.approx(64 / report["duration"])
    assert report["request_goodput"] == pytest.approx(4 / report["duration"])
    for name in ("ttft", "tpot", "itl_chunk", "itl_token", "e2el"):
        assert 0 < report[f"median_{name}_ms"] <= report[f"p90_{name}_ms"] <= report[f"p99_{name}_ms"]
    assert 1 < report["spec_decode_acceptance_length"] <= 6
    assert report["spec_decode_source"] == "the server's counters"
    rates = report["spec_decode_per_position_acceptance_rates"]
    assert rates == sorted(rates, reverse=True)
    assert sum(rates) == pytest.approx(report["spec_decode_acceptance_length"] - 1)
    for label in ("Successful requests:", "Mean TPOT (ms):", "Acceptance length:", "Serving Benchmark Result"):
        assert label in said
    saved = json.loads(file.read_text())
    assert [request["num_tokens"] for request in saved.pop("requests")] == [16] * 4
    assert saved == report


def test_counters_and_answers_agree(running: Running) -> None:
    """The two sources of acceptance are the same rounds, counted twice."""
    asking = Asking("default", True, 24, 0.0, 0)
    prompts = [PromptText("Tell me about walking in nature."), PromptText("How does a refrigerator keep food cold?")]
    outcome = asyncio.run(_measured(running.url, asking, prompts))
    answers = drafting_of(answer.speculation for answer in outcome.answers)
    assert outcome.drafting is not None
    assert answers is not None
    assert (answers.num_drafts, answers.num_accepted) == (outcome.drafting.num_drafts, outcome.drafting.num_accepted)
    assert answers.acceptance_per_position == outcome.drafting.acceptance_per_position[: len(answers.accepted_at)]
    for answer in outcome.answers:  # tokens between chunks, the first chunk aside, are all tokens but the first's
        assert answer.num_tokens is not None
        assert 0 < sum(count for _, count in answer.token_gaps) < answer.num_tokens
        assert sum(gap for gap, _ in answer.token_gaps) == pytest.approx(sum(answer.chunk_gaps))


def test_what_is_asked_for() -> None:
    prompt = PromptText("Hello")
    assert Asking("m", False, 8, 0.0, 3).body(prompt, 2)["seed"] == 5
    body = Asking("m", False, 8, 0.8, 3, top_p=0.9, sends_seed=False).body(prompt, 2)
    assert (body["temperature"], body["top_p"], "seed" in body) == (0.8, 0.9, False)


async def _measured(url: str, asking: Asking, prompts: list[PromptText]) -> LoadOutcome:
    from outrider.bench.load.serve import LoadedServer, measure

    return await measure(LoadedServer(url, None, None, 30.0), asking, prompts, Load(4, 0, 2, None, 3))


def test_clients_think_before_they_send(running: Running) -> None:
    load = Load(4, 0, 1, None, 5, think_seconds=0.05)
    prompts, asking = [PromptText("Hello")], Asking("default", False, 4, 0.0, 0)

    async def measured() -> LoadOutcome:
        async with connect(running.url, None, 60.0) as client:
            return await run_load(client, asking, prompts, load, None)

    answers = asyncio.run(measured()).answers
    for (before, after), wait in zip(pairwise(answers), load.thinking()[1:], strict=True):
        assert after.sent - (before.sent + before.seconds) > 0.9 * wait


def test_poisson_completions_from_a_file(running: Running, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "Once upon a time"}\n{"prompt_token_ids": [5, 6, 7]}\n')
    options = ("--prompts", str(file), "--endpoint", "completions", "--request-rate", "40", "--json")
    status, report, said = bench(running.url + "/v1", *QUICK[:-2], *options)
    assert (status, report["completed"], report["max_concurrency"]) == (0, 4, None)
    assert said.count("\n") == 1
    status, _, said = bench(running.url, *QUICK, "--prompts", str(file))
    assert status != 0
    assert "--endpoint completions" in said


def test_what_is_wrong_is_said(serve: Serve, running: Running) -> None:
    assert "only default" in bench(running.url, "--model", "other")[2]
    assert "is the server running" in bench("http://127.0.0.1:1")[2]
    assert "http://" in bench("127.0.0.1:8000")[2]
    assert "'tpot:x'" in bench(running.url, "--goodput", "ttft:3 tpot:x")[2]
    assert "unexpected argument" in bench(running.url, "tpot:3")[2]
    with serve(access=access_for("127.0.0.1", ["key-for-a-test"])) as guarded:
        assert "--api-key" in bench(guarded.url)[2]
        assert bench(guarded.url, *QUICK, "--api-key", "key-for-a-test")[0] == 0


# servers that behave otherwise


Send = Callable[[dict[str, Any]], Any]


@contextlib.contextmanager
def foreign(answer: Callable[[dict[str, Any], Send], Any]) -> Iterator[str]:
    """A server of which only the answer to a completion is given."""

    async def served(scope: dict[str, Any], receive: Any, send: Send) -> None:
        if scope["type"] != "http":
            return
        if scope["path"] == "/v1/models":
            await send({"type": "http.response.start", "status": 200, "headers": []})
            await send({"type": "http.response.body", "body": b'{"data": [{"id": "foreign"}]}'})
        elif scope["path"] == "/metrics":
            await send({"type": "http.response.start", "status": 404, "headers": []})
            await send({"type": "http.response.body", "body": b""})
        else:
            body = b""
            while (message := await receive()).get("more_body"):
                body += message["body"]
            await answer(json.loads(body + message["body"]), send)

    server = uvicorn.Server(uvicorn.Config(served, port=0, log_config=None, lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_for(lambda: server.started)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join(10)


def chunk(text: str, **more: Any) -> bytes:
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    return b"data: " + json.dumps({"choices": [choice], **more}, ensure_ascii=False).encode() + b"\n\n"


async def stream(send: Send, *parts: bytes) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    for part in parts:
        await send({"type": "http.response.body", "body": part, "more_body": True})
        await asyncio.sleep(0.002)
    await send({"type": "http.response.body", "body": b""})


def test_a_server_that_counts_no_tokens() -> None:
    """And that refuses the options that would make it count."""

    async def answer(body: dict[str, Any], send: Send) -> None:
        if "stream_options" in body:
            await send({"type": "http.response.start", "status": 400, "headers": []})
            await send({"type": "http.response.body", "body": b'{"error": {"code": "unknown_field"}}'})
        else:
            await stream(send, chunk("One"), chunk("\u2028two three"), chunk(" four"), b"data: [DONE]\n\n")

    with foreign(answer) as url:
        status, report, said = bench(url, *QUICK)
    assert (status, report["completed"]) == (0, 4)
    assert report["total_output_tokens"] is report["output_throughput"] is None
    assert report["mean_itl_chunk_ms"] > 0
    assert "mean_tpot_ms" not in report
    assert "mean_itl_token_ms" not in report
    assert "chunks are not tokens" in said


@pytest.mark.parametrize(
    ("parts", "kind"),
    [
        ([chunk("One"), b'data: {"error": {"message": "out of memory", "code": "oom"}}\n\n'], "stream: oom"),
        ([chunk("One"), b'error: {"code": 500, "message": "out of memory"}\n\n'], "stream: out of memory"),
        ([chunk("One")], "the stream ended early"),
        ([chunk("One"), b"data: {\n\n"], "no JSON"),
    ],
)
def test_streams_that_end_badly(parts: list[bytes], kind: str) -> None:
    """The first request is well, or nothing would be sent; of the others every second one is not."""
    count = iter(range(100))
    well = [chunk("One"), chunk("two", usage={"prompt_tokens": 3, "completion_tokens": 7}), b"data: [DONE]\n\n"]

    async def answer(body: dict[str, Any], send: Send) -> None:
        await stream(send, *(parts if next(count) % 2 else well))

    with foreign(answer) as url:
        status, report, said = bench(url, *QUICK, "--num-warmups", "0", "--concurrency", "1")
    assert (status, report["completed"], report["failed"]) == (0, 2, 2)
    assert report["total_output_tokens"] == 14
    assert [kind in found for found in report["errors"]] == [True]
    assert kind in said


def test_connections_that_break_and_servers_that_only_fail() -> None:
    count = iter(range(100))

    async def breaks(body: dict[str, Any], send: Send) -> None:
        if next(count) == 0:
            await stream(send, chunk("One"), b"data: [DONE]\n\n")
            return
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": chunk("One"), "more_body": True})
        raise RuntimeError("dies in the middle of an answer")

    with foreign(breaks) as url:
        status, report, _ = bench(url, *QUICK, "--num-warmups", "0")
    assert (status, report["completed"], report["errors"]) == (1, 0, {"the connection broke": 4})

    async def refuses(body: dict[str, Any], send: Send) -> None:
        await send({"type": "http.response.start", "status": 503, "headers": []})
        await send({"type": "http.response.body", "body": b"no"})

    with foreign(refuses) as url:
        status, report, said = bench(url, *QUICK)
    assert status == 2
    assert "HTTP 503" in said


# parts


def test_events_however_the_bytes_are_cut() -> None:
    text = b': hello\r\n\r\ndata: {"a":\r\ndata: 1}\r\n\r\nevent: x\ndata:two \xe2\x80\xa8 lines\n\n\n\ndata: [DONE]'

    async def parts(size: int) -> AsyncIterator[bytes]:
        for begin in range(0, len(text), size):
            yield text[begin : begin + size]

    async def collect(size: int) -> list[str]:
        return [event async for event in events(parts(size))]

    for size in (1, 2, 3, 7, 1000):
        assert asyncio.run(collect(size)) == ['{"a":\n1}', "two \u2028 lines", "[DONE]"]


def test_times_are_per_token_and_not_per_chunk() -> None:
    answered = Answered(0, 0.0)
    reader = StreamReader(answered)
    role = {"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}}]}

    def text(count: int) -> dict[str, Any]:
        return {"choices": [{"delta": {"content": "x"}}], "usage": {"prompt_tokens": 9, "completion_tokens": count}}

    ended = {"choices": [{"delta": {}, "finish_reason": "stop"}], "usage": {"completion_tokens": 8}}
    for now, content in ((0.1, role), (0.3, text(1)), (0.5, text(5)), (0.9, text(7)), (0.95, ended)):
        assert reader.read(content, now) is None
    assert reader.verdict(is_done=False) is None
    assert answered.first == 0.3  # not the chunk that holds the role alone
    assert answered.chunk_gaps == pytest.approx([0.2, 0.4])
    assert [count for _, count in answered.token_gaps] == [4, 2]
    assert answered.token_seconds == pytest.approx((0.9 - 0.3) / 7)
    summary = summarise(outcome([answered]), {})
    assert summary.figures["itl_token"].mean == pytest.approx(600 / 6)
    assert summary.figures["itl_token"].median == pytest.approx(50)  # four of 50 ms, two of 200
    assert summary.figures["itl_chunk"].mean == pytest.approx(300)


def outcome(answers: list[Answered], seconds: float = 2.0) -> LoadOutcome:
    return LoadOutcome(answers, seconds, Asking("m", True, 16, 0.0, 0), None)


def test_percentiles_and_goodput() -> None:
    seconds = [number / 1000 for number in range(1, 102)]  # 1 to 101 ms
    assert LatencyFigures.of(seconds) == LatencyFigures(mean=51.0, median=51.0, p90=91.0, p99=100.0)
    assert LatencyFigures.of([]) is None
    answers = [
        Answered(0, 0.0, first=0.1, seconds=0.4, num_prompt_tokens=5, num_tokens=11),  # 30 ms a token
        Answered(1, 0.0, first=0.3, seconds=0.6, num_prompt_tokens=5, num_tokens=11),  # too late
        Answered(2, 0.0, first=0.1, seconds=1.2, num_prompt_tokens=5, num_tokens=11),  # too slow
        Answered(3, 0.0, first=0.1, seconds=0.1, num_prompt_tokens=5, num_tokens=1),  # no second token
        Answered(4, 0.0, first=0.1, seconds=0.2, error="timeout"),
    ]
    goals = parse_goals(["ttft:200 tpot:50"])
    assert goals == parse_goals(["ttft:200", "tpot:50"]) == {"ttft": 200, "tpot": 50}
    assert [within(answer, goals) for answer in answers] == [True, False, False, True, False]
    assert not within(answers[2], {"e2el": 1000})
    summary = summarise(outcome(answers), goals)
    report = to_dict(summary, outcome(answers), Load(5, 0, 1, None, 0), goals)
    assert (report["completed"], report["failed"], report["errors"]) == (4, 1, {"timeout": 1})
    assert (report["request_goodput"], report["request_throughput"]) == (1.0, 2.0)
    assert (report["output_throughput"], report["total_token_throughput"]) == (17.0, 27.0)
    assert report["mean_tpot_ms"] == pytest.approx((30 + 30 + 110) / 3)


def test_arrivals_are_poisson_and_seeded() -> None:
    load = Load(4000, 0, None, 50.0, 7)
    times = load.arrivals()
    gaps = [later - sooner for sooner, later in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(1 / 50, rel=0.1)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) == pytest.approx(mean**2, rel=0.15)  # exponential
    assert times == load.arrivals() != Load(4000, 0, None, 50.0, 8).arrivals()
    prompts = [PromptText(str(number)) for number in range(3)]
    chosen, others = Load(7, 0, None, None, 1).choose(prompts)
    assert set(chosen[:3]) == set(chosen[3:6]) == set(prompts)
    assert not others


def test_a_server_is_not_warmed_up_with_what_is_counted() -> None:
    prompts = [PromptText(str(number)) for number in range(9)]
    chosen, others = Load(5, 4, None, None, 1).choose(prompts)
    assert (len(chosen), len(others)) == (5, 4)
    assert not set(chosen) & set(others)


def test_counters_of_other_servers() -> None:
    def text(drafts: int, accepted: int, first: int) -> str:
        return (
            "# HELP vllm:spec_decode_num_drafts_total x\n"
            f'vllm:spec_decode_num_drafts_total{{engine="0",model_name="m"}} {drafts}.0\n'
            f'vllm:spec_decode_num_drafts_total{{engine="1",model_name="m"}} 4.0\n'
            f"spec_decode_num_draft_tokens_total {drafts * 2}\n"
            f"llamacpp:spec_decode_num_accepted_tokens_total {accepted}\n"
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="0"}} {first}\n'
            f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{position="1"}} {accepted - first}\n'
        )

    made = drafting_from(text(10, 6, 5), text(30, 26, 20))
    assert made is not None
    assert (made.num_drafts, made.num_draft_tokens, made.num_accepted) == (20, 40, 20)
    assert (made.accept_length, made.acceptance_rate, made.acceptance_per_position) == (2.0, 0.5, [0.75, 0.25])
    assert drafting_from(text(10, 6, 5), text(10, 6, 5)) is None
    assert drafting_from("", "") is None
    assert drafting_of([None]) is None
    figures = {"num_spec_steps": 4, "num_draft_tokens": 8, "num_accepted_draft_tokens": 5}
    summed = drafting_of([figures | {"acceptance_histogram": [1, 1, 2]}, None])
    assert summed is not None
    assert (summed.accept_length, summed.accepted_at) == (2.25, (3, 2))


def test_names_of_errors() -> None:
    assert kind_of(429, b'{"error": {"code": "queue_full", "type": "x"}}') == "HTTP 429 queue_full"
    assert kind_of(404, b'{"object": "error", "message": "no such model"}') == "HTTP 404 no such model"
    assert kind_of(502, b"<html>") == "HTTP 502"
    assert kind_of(422, b'{"detail": [1]}') == "HTTP 422"
