"""Queue, deadline, disconnects, faults and drain: whatever happens to one request, the others go on."""

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from running import Running, Serve, wait_for

from outrider import LLM
from outrider.engine.request import Request
from outrider.server import engine_loop
from outrider.server.engine_client import QueueLimits
from outrider.server.engine_loop import EngineLoop

MESSAGES = [{"role": "user", "content": "Tell me about walking in nature."}]
LONG = {"messages": MESSAGES, "temperature": 0, "max_tokens": 1500, "ignore_eos": True}
SHORT = LONG | {"max_tokens": 10}
PATH = "/v1/chat/completions"


@contextlib.contextmanager
def streaming(running: Running, body: dict[str, Any]) -> Iterator[Iterator[str]]:
    """A stream that has begun."""
    with httpx.stream("POST", running.url + PATH, json=body | {"stream": True}, timeout=30) as response:
        assert response.status_code == 200
        lines = response.iter_lines()
        next(lines)
        yield lines


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]["message"]["content"]


def test_a_client_that_leaves_a_stream(running: Running, llm: LLM) -> None:
    with streaming(running, LONG):
        assert running.engine.num_sequences == 1
    running.wait_until_idle(3)
    assert not llm.engine.scheduler.running
    assert llm.engine.scheduler.pool.num_free == llm.engine.scheduler.pool.capacity


def test_a_client_that_does_not_wait_for_its_answer(running: Running) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(running.url + PATH, json=LONG, timeout=0.4)
    begin = time.monotonic()
    running.wait_until_idle(3)
    assert time.monotonic() - begin < 2


def test_a_full_queue(serve: Serve) -> None:
    with serve(QueueLimits(max_queue=1)) as running, contextlib.ExitStack() as stack:  # 4 run, 1 waits
        stack.enter_context(streaming(running, LONG | {"n": 4}))
        waiting = threading.Thread(target=lambda: running.post(PATH, LONG | {"timeout": 2}))
        waiting.start()
        wait_for(lambda: running.engine.num_sequences == 5)
        refused = running.post(PATH, SHORT)
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        assert refused.json()["error"]["code"] == "queue_full"
        assert running.post(PATH, SHORT | {"n": 6}).status_code == 400  # never fits
        assert running.get("/health/ready").status_code == 200
        stack.close()
        waiting.join()
        running.wait_until_idle()
        assert running.post(PATH, SHORT).status_code == 200


def test_a_deadline(running: Running) -> None:
    expired = running.post(PATH, LONG | {"timeout": 0.3})
    assert (expired.status_code, expired.json()["error"]["code"]) == (504, "deadline_exceeded")
    with streaming(running, LONG | {"timeout": 0.3}) as lines:
        rest = [line for line in lines if line]
    assert "deadline_exceeded" in rest[-2]
    assert rest[-1] == "data: [DONE]"


def _break_step_of(llm: LLM, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Steps raise while this request takes part."""
    honest = llm.engine.runner.pack

    def pack(plan: Any, shape: Any) -> Any:
        if any(work.request.seed == seed and work.request.num_outputs >= 3 for work in plan):
            raise RuntimeError("secret detail")
        return honest(plan, shape)

    monkeypatch.setattr(llm.engine.runner, "pack", pack)


def _break_commit_of(llm: LLM, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """Committing a token of this request raises half way."""
    honest = Request.remaining

    def remaining(request: Request, max_model_len: int) -> int:
        if request.seed == seed and request.num_outputs > len(request.draft_positions) >= 3:
            raise RuntimeError("secret detail")
        return honest(request, max_model_len)

    monkeypatch.setattr(Request, "remaining", remaining)


def _break_commit_once(llm: LLM, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    """The same, and then never again: the request is torn all the same."""
    _break_commit_of(llm, monkeypatch, seed)
    broken = Request.remaining

    def remaining(request: Request, max_model_len: int) -> int:
        try:
            return broken(request, max_model_len)
        except RuntimeError:
            request.seed = -1
            raise

    monkeypatch.setattr(Request, "remaining", remaining)


@pytest.mark.parametrize("break_it", [_break_step_of, _break_commit_of, _break_commit_once])
def test_one_bad_request_fails_alone(
    running: Running, llm: LLM, monkeypatch: pytest.MonkeyPatch, break_it: Any
) -> None:
    bodies = [SHORT | {"seed": seed, "temperature": 1, "max_tokens": 24} for seed in (1, 2, 666)]
    expected = [text_of(running.post(PATH, body)) for body in bodies]
    with monkeypatch.context() as patch, ThreadPoolExecutor() as pool:
        break_it(llm, patch, 666)
        answers = list(pool.map(lambda body: running.post(PATH, body), bodies))
        assert [text_of(answer) for answer in answers[:2]] == expected[:2]
        assert answers[2].status_code == 500
        assert "secret" not in answers[2].text
        assert "fault-" in answers[2].text
    running.wait_until_idle()
    assert llm.engine.scheduler.pool.num_free == llm.engine.scheduler.pool.capacity
    assert text_of(running.post(PATH, bodies[2])) == expected[2]
    assert running.get("/health/live").status_code == 200


@pytest.mark.parametrize("stream", [False, True])
def test_the_last_token_comes_while_the_guilty_are_sought(
    running: Running, llm: LLM, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """A step breaks for no reason that comes again: whoever ends while each is tried alone is told of it."""
    body = SHORT | {"max_tokens": 4, "speculative": {"enabled": False}, "timeout": 8}
    expected = text_of(running.post(PATH, body))
    honest, num_broken = llm.engine.runner.pack, 0

    def pack(plan: Any, shape: Any) -> Any:
        nonlocal num_broken
        if not num_broken and any(work.request.num_outputs == 3 for work in plan):
            num_broken += 1
            raise RuntimeError("secret detail")
        return honest(plan, shape)

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.runner, "pack", pack)
        answer = running.post(PATH, body | {"stream": stream})
    assert num_broken == 1
    if not stream:
        assert text_of(answer) == expected
        return
    chunks = [json.loads(line.removeprefix("data: ")) for line in answer.text.splitlines() if line[:7] == "data: {"]
    assert "".join(choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]) == expected
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_decoding_that_stands_still_is_unhealthy(serve: Serve, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    honest = llm.engine.step
    with serve(QueueLimits(stall=0.2)) as running:
        assert running.get("/health/decode").json()["status"] == "idle"
        with monkeypatch.context() as patch, ThreadPoolExecutor() as pool:
            patch.setattr(llm.engine, "step", lambda: (go_on.wait(10), honest())[1])
            answer = pool.submit(running.post, PATH, SHORT)
            wait_for(lambda: running.get("/health/decode").status_code == 503)
            assert running.get("/health/live").status_code == 200
            go_on.set()
            assert answer.result().status_code == 200
        running.wait_until_idle()
        assert running.get("/health/decode").status_code == 200


def test_drain_lets_running_requests_finish(serve: Serve) -> None:
    body = SHORT | {"max_tokens": 1000}  # still under way when it has been asked whether it is ready
    with serve(drain=60) as running, ThreadPoolExecutor() as pool:
        expected = text_of(running.post(PATH, body))
        with streaming(running, body) as lines:
            whole = pool.submit(running.post, PATH, body)
            wait_for(lambda: running.engine.num_sequences == 2)
            running.server.handle_exit(15, None)
            wait_for(lambda: running.engine.draining)
            assert running.get("/health/ready").status_code == 503
            refused = running.post(PATH, SHORT)
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert '"finish_reason":"length"' in rest[-2]
        assert text_of(whole.result()) == expected
        running.thread.join(10)
        assert not running.thread.is_alive()


def test_a_second_signal_ends_it_now(serve: Serve) -> None:
    with serve(drain=60) as running, streaming(running, LONG) as lines:
        running.server.handle_exit(15, None)
        wait_for(lambda: running.engine.draining)
        running.server.handle_exit(15, None)
        with contextlib.suppress(httpx.RemoteProtocolError):
            assert "shutting_down" in "".join(lines)
        running.thread.join(10)
        assert not running.thread.is_alive()


# the engine's thread ends


class Killed(BaseException):
    """Not an Exception: nothing that looks for those catches it."""


def _die_before_the_loop(patch: pytest.MonkeyPatch, llm: LLM) -> None:
    def killed(device: Any) -> None:
        raise Killed

    patch.setattr(engine_loop, "_make_current", killed)


def _die_in_the_loop(patch: pytest.MonkeyPatch, llm: LLM) -> None:
    def killed(self: EngineLoop) -> None:
        if self._sequences:
            raise Killed

    patch.setattr(EngineLoop, "_expire", killed)


def _die_while_jobs_are_taken(patch: pytest.MonkeyPatch, llm: LLM) -> None:
    def killed(self: EngineLoop, asked: Any, made: Any) -> None:
        raise Killed

    patch.setattr(EngineLoop, "_take", killed)


def _die_in_a_step(patch: pytest.MonkeyPatch, llm: LLM) -> None:
    honest, steps = llm.engine.step, iter(range(10**6))

    def killed() -> Any:
        if next(steps) > 2:
            raise Killed
        return honest()

    patch.setattr(llm.engine, "step", killed)


@pytest.mark.parametrize("kill", [_die_before_the_loop, _die_in_the_loop, _die_while_jobs_are_taken, _die_in_a_step])
def test_the_engine_ends(serve: Serve, llm: LLM, monkeypatch: pytest.MonkeyPatch, kill: Any) -> None:
    """Whoever waits is told within a second, and so is whoever comes later; health says so."""
    with monkeypatch.context() as patch, ThreadPoolExecutor() as pool:
        kill(patch, llm)
        with serve(exit_on_death=False) as running:
            answers = [pool.submit(running.post, PATH, LONG) for _ in range(6)]  # more than run at once
            wait_for(lambda: running.engine.is_dead)
            begin = time.monotonic()
            for answer in [*(each.result() for each in answers), running.post(PATH, SHORT)]:
                assert (answer.status_code, answer.json()["error"]["code"]) == (503, "engine_dead")
                assert "fault-" in answer.text
            assert time.monotonic() - begin < 1.5
            for path in ("/health/live", "/health/ready", "/health/decode"):
                assert running.get(path).status_code == 503
            assert running.engine.is_idle
    _leave_nothing(llm)


def test_the_process_ends_with_its_engine(serve: Serve, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch, serve(exit_on_death=True) as running:
        _die_in_a_step(patch, llm)
        with contextlib.suppress(httpx.HTTPError):
            running.post(PATH, SHORT)
        running.thread.join(10)
        assert not running.thread.is_alive()
        assert running.engine.is_dead
    _leave_nothing(llm)


def _leave_nothing(llm: LLM) -> None:
    """The next server has the same engine."""
    for request in list(llm.engine.scheduler.running) + list(llm.engine.scheduler.waiting):
        llm.engine.abort(request)


def test_a_step_that_fails_before_anyone_is_admitted(
    serve: Serve, llm: LLM, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The first in line is failed, not everybody; and a fault that stays ends the loop instead of filling the log."""
    honest = llm.engine.scheduler._admit

    def admit(request: Request, *rest: Any) -> Any:
        if request.seed == 666:
            raise RuntimeError("secret detail")
        return honest(request, *rest)

    with serve(exit_on_death=False) as running, monkeypatch.context() as patch, ThreadPoolExecutor() as pool:
        patch.setattr(llm.engine.scheduler, "_admit", admit)
        answers = list(pool.map(lambda seed: running.post(PATH, SHORT | {"seed": seed}), (666, 1, 2)))
        assert [answer.status_code for answer in answers] == [500, 200, 200]

        def broken(*_: Any, **__: Any) -> Any:
            raise RuntimeError("secret detail")

        patch.setattr(llm.engine.scheduler, "next", broken)
        codes = {running.post(PATH, SHORT).status_code for _ in range(engine_loop.BROKEN_AFTER + 1)}
        assert codes == {500, 503}
        assert running.engine.is_dead
    assert caplog.text.count("secret detail") < 4 * engine_loop.BROKEN_AFTER
