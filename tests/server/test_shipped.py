"""`outrider serve` as it is shipped: HTTP in one process, the engine in another. Whatever happens to either, nobody is
left waiting and nothing is left behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from processes import family, have_ended, named
from running import wait_for

import outrider
from outrider import LLM, Guided, SamplingParams
from outrider.bench.load.server_process import _free_port
from outrider.server.engine_host import Opening, ProcessHost

pytestmark = pytest.mark.slow
LONG = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 1900, "ignore_eos": True}
SHORT = LONG | {"max_tokens": 8}
PATH = "/v1/completions"


class Shipped:
    """The command, in a process group of its own."""

    def __init__(self, *arguments: str) -> None:
        self.port = _free_port()
        command = [sys.executable, "-m", "outrider", "serve", "--port", str(self.port), "--threads", "1", *arguments]
        environment = {name: value for name, value in os.environ.items() if name != "OUTRIDER_API_KEY"}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            env=environment,
            start_new_session=True,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # whoever runs the tests may ignore it
        )
        self.family: list[psutil.Process] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def wait_until_ready(self) -> None:
        def ready() -> bool:
            assert self.process.poll() is None, self.said()
            with contextlib.suppress(httpx.TransportError):
                return httpx.get(f"{self.url}/health/ready").status_code == 200
            return False

        wait_for(ready, 60)
        self.look()

    def look(self) -> list[psutil.Process]:
        """All processes that it has started so far."""
        self.family = family(self.process.pid) or self.family
        return self.family

    @property
    def engine(self) -> psutil.Process:
        wait_for(lambda: bool(named(self.look(), "spawn_main")), 30)
        return named(self.family, "spawn_main")[0]

    def leaves_nothing(self, seconds: float = 5.0) -> bool:
        """Whether all its processes are gone soon."""
        return have_ended(self.family, seconds)

    def said(self) -> str:
        assert self.process.stderr is not None
        return self.process.stderr.read().decode()

    def post(self, body: dict[str, Any], path: str = PATH) -> httpx.Response:
        return httpx.post(self.url + path, json=body, timeout=60)

    def figure(self, name: str) -> float:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + "{"))

    @contextlib.contextmanager
    def streaming(self, body: dict[str, Any]) -> Iterator[Iterator[str]]:
        """A stream that has begun."""
        with httpx.stream("POST", self.url + PATH, json=body | {"stream": True}, timeout=60) as response:
            assert response.status_code == 200
            lines = (line for line in response.iter_lines() if line)
            next(lines)
            yield lines


@contextlib.contextmanager
def shipped(*arguments: str, ready: bool = True) -> Iterator[Shipped]:
    server = Shipped(*arguments)
    try:
        if ready:
            server.wait_until_ready()
        yield server
    finally:
        for each in [*server.look()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        server.process.kill()
        server.process.wait()


@pytest.fixture(scope="module")
def server() -> Iterator[Shipped]:
    with shipped("--max-num-seqs", "4", "--tool-call-parser", "hermes", "--no-adaptive") as server:
        yield server


def chunks(lines: Iterator[str]) -> list[dict[str, Any]]:
    return [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]


# answers


def test_answers_are_those_of_the_engine_alone(server: Shipped, llm: LLM) -> None:
    """Several at once, in one answer or streamed, with log-probabilities and a grammar: token for token."""
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    asked: list[tuple[dict[str, Any], SamplingParams]] = [
        ({"n": 3, "temperature": 0.9, "seed": 5}, SamplingParams(n=3, temperature=0.9, seed=5, max_tokens=24)),
        ({"logprobs": 2, "temperature": 0}, SamplingParams(logprobs=2, temperature=0, max_tokens=24)),
        (
            {"guided_json": schema, "temperature": 0},
            SamplingParams(guided=Guided(json_schema=schema), temperature=0, max_tokens=24),
        ),
        (
            {"bad_words": ["the"], "temperature": 0, "prediction": {"type": "content", "content": ", there was a dog"}},
            SamplingParams(bad_words=["the"], temperature=0, max_tokens=24),
        ),
    ]
    bodies = [{"prompt": "Once upon a time", "max_tokens": 24, "return_token_ids": True, **each} for each, _ in asked]
    expected = [llm.generate("Once upon a time", params)[0].outputs for _, params in asked]
    with ThreadPoolExecutor() as pool:
        answers = list(pool.map(server.post, bodies))
    for answer, outputs in zip(answers, expected, strict=True):
        assert answer.status_code == 200, answer.text
        choices = answer.json()["choices"]
        assert [choice["token_ids"] for choice in choices] == [output.token_ids for output in outputs]
        assert [choice["text"] for choice in choices] == [output.text for output in outputs]
    found, wanted = answers[1].json()["choices"][0]["logprobs"], expected[1][0]
    assert wanted.logprobs is not None
    rows = zip(wanted.token_ids, wanted.logprobs, strict=True)
    assert found["token_logprobs"] == [pytest.approx(row[token].logprob, abs=1e-6) for token, row in rows]
    for body, outputs in zip(bodies, expected, strict=True):
        with server.streaming(body) as lines:
            rest = chunks(lines)
        texts = {output.index: output.text for output in outputs}
        for chunk in rest:
            for choice in chunk["choices"]:  # the first chunk was taken already: what is left is the end of each text
                assert choice["text"] in texts[choice["index"]]
        assert {choice["finish_reason"] for chunk in rest for choice in chunk["choices"]} >= {
            output.finish_reason for output in outputs
        }


def test_what_the_engine_refuses_is_a_client_error(server: Shipped) -> None:
    """Also what is found out in its process, with the messages that users of Python get."""
    for change, message in (
        ({"guided_regex": "(?=a)b"}, "lookahead"),
        ({"prompt": "word " * 4000}, "maximum context length is 2048 tokens"),
        ({"prompt": [10**7]}, "which is no token id"),
        ({"guided_grammar": "root ::= missing"}, "grammar cannot be used"),
    ):
        answer = server.post(SHORT | change)
        assert answer.status_code == 400, answer.text
        assert message in answer.json()["error"]["message"]
    assert server.post(SHORT).status_code == 200


def test_echo_and_usage_cross_over(server: Shipped, llm: LLM) -> None:
    (scored,) = llm.score(["The sun is warm and the sky"])
    body = {"prompt": "The sun is warm and the sky", "echo": True, "logprobs": 0, "max_tokens": 1, "temperature": 0}
    answer = server.post(body).json()
    rows = [row for row in scored.prompt_logprobs or [] if row is not None]
    wanted = [row[token].logprob for token, row in zip(scored.prompt_token_ids[1:], rows, strict=True)]
    assert answer["choices"][0]["logprobs"]["token_logprobs"][1:-1] == pytest.approx(wanted, abs=1e-5)
    prompt = "A story about a very small dog who lived with a very old man near the sea, and who was " * 2
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, "stream": True}
    body |= {"stream_options": {"include_usage": True, "continuous_usage_stats": True}}
    cached = []
    for _ in range(2):
        with server.streaming(body) as lines:
            cached.append([chunk["usage"]["prompt_tokens_details"]["cached_tokens"] for chunk in chunks(lines)])
    assert set(cached[0]) == {0}
    assert len(set(cached[1])) == 1
    assert cached[1][0] > 0


def test_a_client_that_leaves(server: Shipped) -> None:
    with server.streaming(LONG):
        assert server.figure("vllm:num_requests_running") == 1
    wait_for(lambda: server.figure("vllm:num_requests_running") == 0, 3)
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(server.url + PATH, json=LONG, timeout=0.4)
    wait_for(lambda: server.figure("vllm:num_requests_running") == 0, 3)
    assert server.figure("vllm:kv_cache_usage_perc") == 0


def test_a_deadline(server: Shipped) -> None:
    expired = server.post(LONG | {"timeout": 0.3})
    assert (expired.status_code, expired.json()["error"]["code"]) == (504, "deadline_exceeded")


def test_the_front_does_without_torch(server: Shipped) -> None:
    assert "libtorch" in Path(f"/proc/{server.engine.pid}/maps").read_text()
    assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()


# the end


def test_a_second_signal_ends_it_now() -> None:
    with shipped() as server, server.streaming(LONG) as lines:
        server.process.send_signal(signal.SIGTERM)
        wait_for(lambda: httpx.get(f"{server.url}/health/ready").status_code == 503)
        assert httpx.post(server.url + PATH, json=SHORT).status_code == 503
        begin = time.monotonic()
        server.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(httpx.RemoteProtocolError):
            assert "shutting_down" in "".join(lines)
        assert server.process.wait(10) == 0
        assert time.monotonic() - begin < 5
        assert server.leaves_nothing()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_to_everybody_drains(number: int) -> None:
    """A terminal, or whoever ends a service, sends it to all processes at once."""
    with shipped() as server, server.streaming(LONG | {"max_tokens": 300}) as lines:
        os.killpg(server.process.pid, number)
        rest = list(lines)
        assert '"finish_reason":"length"' in rest[-2]
        assert server.process.wait(20) == 0
        assert server.leaves_nothing()


def test_the_engine_is_killed() -> None:
    """Whoever waits is told within a second; the process ends with status 1, and says why."""
    with shipped("--max-num-seqs", "2") as server, ThreadPoolExecutor() as pool:
        answers = [pool.submit(server.post, LONG) for _ in range(4)]  # more than run at once
        wait_for(lambda: server.figure("vllm:num_requests_running") + server.figure("vllm:num_requests_waiting") == 4)
        begin = time.monotonic()
        server.engine.kill()
        for answer in answers:
            with contextlib.suppress(httpx.RemoteProtocolError, httpx.ReadError):
                found = answer.result()
                assert (found.status_code, found.json()["error"]["code"]) == (503, "engine_dead")
        assert time.monotonic() - begin < 1
        assert server.process.wait(10) == 1
        assert server.leaves_nothing()
        said = server.said()
        assert "ended by SIGKILL" in said
        assert '"event": "exiting"' in said


def test_the_engine_is_killed_and_the_server_stays() -> None:
    with shipped("--no-exit-on-engine-death") as server, server.streaming(LONG) as lines:
        server.engine.kill()
        begin = time.monotonic()
        assert "engine_dead" in "".join(lines)
        assert time.monotonic() - begin < 1
        refused = server.post(SHORT)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "engine_dead")
        for path in ("/health/live", "/health/ready", "/health/decode"):
            assert httpx.get(server.url + path).status_code == 503
        assert 'requests_refused_total{model_name="default",reason="engine_dead"} 1.0' in httpx.get(
            f"{server.url}/metrics"
        ).text.replace("'", '"')
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(10) == 1


def test_the_front_is_killed() -> None:
    """The engine ends with it, also in the middle of a round, and so does whatever renders templates."""
    with shipped() as server:
        chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
        assert server.post(chat, "/v1/chat/completions").status_code == 200
        with server.streaming(LONG):
            assert len(server.look()) >= 3
            server.process.kill()
            assert server.leaves_nothing()


# the start


def test_the_engine_is_killed_while_it_loads() -> None:
    with shipped(ready=False) as server:
        server.engine.kill()
        assert server.process.wait(20) == 2
        assert server.leaves_nothing()
        said = server.said()
        assert said.startswith("error: the engine's process was ended by SIGKILL while it was loading")


def test_an_interrupt_while_it_loads() -> None:
    with shipped(ready=False) as server:
        _ = server.engine
        os.killpg(server.process.pid, signal.SIGINT)
        assert server.process.wait(20) == 130
        assert server.leaves_nothing()
        assert "Traceback" not in server.said()


SLOW = """
import time
from outrider.server.engine_host import Opening, ProcessHost

class Slow(Opening):
    def config(self):
        print("loading", flush=True)
        time.sleep(60)

if __name__ == "__main__":
    from slow import Slow
    ProcessHost(Slow(None, {}, True, "m")).opened(None, print)
"""


def test_the_front_is_killed_while_it_loads(tmp_path: Path) -> None:
    """It takes minutes, and the engine does not finish first."""
    (tmp_path / "slow.py").write_text(SLOW)
    environment = os.environ | {"PYTHONPATH": str(Path(outrider.__file__).parent.parent)}
    front = subprocess.Popen([sys.executable, "slow.py"], cwd=tmp_path, stdout=subprocess.PIPE, env=environment)
    assert front.stdout is not None
    assert front.stdout.readline() == b"loading\n"
    processes = family(front.pid)
    assert processes
    front.kill()
    front.wait()
    assert have_ended(processes, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--model", "/no/such/place"), "error: /no/such/place does not exist"),
        (("--draft", "nonsense"), "error: the drafter nonsense is neither a method"),
        (("--max-model-len", "100000000"), "is beyond the 2048 positions"),
        (("--kv-cache-memory-bytes", "1000"), "error: "),
    ],
)
def test_what_cannot_be_opened(arguments: tuple[str, ...], message: str) -> None:
    with shipped(*arguments, ready=False) as server:
        assert server.process.wait(60) == 2
        said = server.said()
        assert message in said
        assert said.count("\n") == 1, said


def test_a_fault_of_our_own(capfd: pytest.CaptureFixture[str]) -> None:
    """Where it happened is shown, as if there were one process."""
    with pytest.raises(SystemExit) as ended, ProcessHost(Opening(None, {}, True, "m")) as host:  # type: ignore[arg-type]
        host.opened(None, lambda path: None)
    assert ended.value.code == 1
    assert not host.process.is_alive()
    assert "AttributeError" in capfd.readouterr().err
