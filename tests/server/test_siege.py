"""Nothing that one client sends may stop the others. Limits of time here have room for a busy machine of two cores;
`outrider bench siege` has the real ones."""

import asyncio
import base64
import contextlib
import io
import json
import logging
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import psutil
import pytest
import uvicorn
from running import Running, Serve, wait_for
from uvicorn.server import ServerState

from outrider import LLM, SamplingParams
from outrider.lanes import Lane
from outrider.overload import OverloadError
from outrider.prompts import Prompts
from outrider.server import app as app_module
from outrider.server import connections, engine_loop, preparation, request_preparation, serving
from outrider.server import log as log_module
from outrider.server.engine_client import QueueLimits
from outrider.server.log import LineHandler
from outrider.tokenizer import Tokenizer

PLAIN = {"prompt": "Once upon a time", "max_tokens": 4, "temperature": 0}
CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
MAX_PLAIN, MAX_HEALTH = 6.0, 4.0  # seconds; a quiet machine: 2 and 0.5


@contextlib.contextmanager
def others(running: Running) -> Iterator[None]:
    """They use the server meanwhile: all are answered, and nobody waits long."""
    ended = threading.Event()

    def ask(send: Callable[[], httpx.Response]) -> float:
        worst = 0.0
        while not ended.is_set() or not worst:
            begin = time.monotonic()
            assert send().status_code == 200
            worst = max(worst, time.monotonic() - begin)
        return worst

    with ThreadPoolExecutor(2) as pool:
        plain = pool.submit(ask, lambda: running.post(COMPLETIONS, PLAIN))
        health = pool.submit(ask, lambda: running.get("/health/live"))
        try:
            yield
        finally:
            ended.set()
        assert plain.result() < MAX_PLAIN
        assert health.result() < MAX_HEALTH


# grammars


def test_a_bomb_of_a_regex_is_refused_at_once(running: Running, llm: LLM) -> None:
    assert llm.engine.grammars  # their library takes seconds to import
    bomb = "((([a-z]{0,16384}){0,16384}){0,16384}){0,16384}"
    with others(running):
        begin = time.monotonic()
        answer = running.post(COMPLETIONS, PLAIN | {"guided_regex": bomb})
        assert time.monotonic() - begin < MAX_PLAIN
    assert answer.status_code == 400
    assert "repeats repetitions" in answer.text


def test_grammars_have_a_queue_of_their_own(serve: Serve, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """More of them than can be compiled: the last are told to come again, and nobody else notices."""
    go_on = threading.Event()
    monkeypatch.setattr(request_preparation, "MAX_GRAMMARS", 1)
    known = PLAIN | {"guided_regex": "[cd]+"}
    with serve() as running:
        assert running.post(COMPLETIONS, known).status_code == 200
    honest = llm.engine.grammars.trial.check
    monkeypatch.setattr(
        llm.engine.grammars.trial,
        "check",
        lambda guided: go_on.wait(60) if guided.regex == "(ab|siege)+" else honest(guided),
    )
    with serve() as running, ThreadPoolExecutor(8) as pool, others(running):
        asked = [pool.submit(running.post, COMPLETIONS, PLAIN | {"guided_regex": "(ab|siege)+"}) for _ in range(6)]
        wait_for(lambda: sum(each.done() for each in asked) == 3, 30)  # two are compiled, one waits
        refused = [each.result() for each in asked if each.done()]
        assert {answer.status_code for answer in refused} == {503}
        assert all(int(answer.headers["retry-after"]) > 0 for answer in refused)
        assert refused[0].json()["error"]["code"] == "overloaded"
        assert running.post(COMPLETIONS, known).status_code == 200  # whoever asks for what is known does not wait
        go_on.set()
        assert sorted(each.result().status_code for each in asked) == [200] * 3 + [503] * 3
        running.wait_until_idle()


def test_a_lane_ends() -> None:
    lane, go_on = Lane("test", 1, 1, max_wait=0.1), threading.Event()
    first, second = lane.submit(lambda: go_on.wait(10)), lane.submit(lambda: True)
    with pytest.raises(OverloadError):
        lane.submit(lambda: True)
    time.sleep(0.2)
    go_on.set()
    assert first.result()
    with pytest.raises(OverloadError):  # it has waited for too long
        second.result()
    wait_for(lambda: lane._count == 0)
    assert lane.submit(lambda: 3).result() == 3
    lane.close()


# texts


def test_a_text_that_cannot_fit_is_not_encoded(running: Running, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    longest, honest = llm.max_model_len * tokenizer.longest, Tokenizer.encode

    def encode(self: Tokenizer, text: str, **options: Any) -> list[int]:
        assert len(text) <= longest
        return honest(self, text, **options)

    monkeypatch.setattr(Tokenizer, "encode", encode)
    long = "Hello there. " * (longest // 10)
    with others(running):
        for path, body in (
            (COMPLETIONS, PLAIN | {"prompt": long}),
            (CHATS, CHAT | {"messages": [{"role": "user", "content": long}]}),
        ):
            answer = running.post(path, body)
            assert answer.status_code == 400
            assert "characters" in answer.text


def test_as_many_characters_as_tokens_can_hold(llm: LLM) -> None:
    tokenizer = llm.tokenizer
    assert tokenizer is not None
    prompts = Prompts(tokenizer, 4096, 8, "this model")
    longest = max(range(tokenizer.vocab_size), key=lambda id: len(tokenizer.token_bytes(id)))
    text = tokenizer.decode([longest], skip_special_tokens=False) * 8
    prompts.check_text(text, "it")
    with pytest.raises(ValueError, match="characters"):
        prompts.check_text("a" * (8 * tokenizer.longest + 1), "it")


def test_long_texts_keep_nobody_waiting(running: Running) -> None:
    """Each takes seconds to encode; others' prompts go another way, and the interpreter is not held."""
    text = "Hello there, my old friend. " * 15_000
    with others(running), ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda _: running.post("/tokenize", {"prompt": text}), range(4)))
    assert {answer.status_code for answer in answers} <= {200, 503}
    assert 200 in {answer.status_code for answer in answers}


def test_a_tokenizer_that_panics(running: Running, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class PanicException(BaseException):
        """As the library raises it: not an Exception."""

    class Backend:
        def encode(self, *given: Any, **options: Any) -> Any:
            raise PanicException("attempt to add with overflow")

    assert llm.tokenizer is not None
    with monkeypatch.context() as patch:
        patch.setattr(llm.tokenizer, "_backend", Backend())
        answer = running.post(COMPLETIONS, PLAIN)
    assert answer.status_code == 400
    assert "tokenizer" in answer.json()["error"]["message"]
    assert running.post(COMPLETIONS, PLAIN).status_code == 200


def test_a_chat_template_that_is_busy(running: Running, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    assert llm.tokenizer is not None
    assert running.post(CHATS, CHAT).status_code == 200
    templates = llm.tokenizer._chat._own
    monkeypatch.setattr(templates, "_seconds", 0.2)
    with templates._lock:
        answer = running.post(CHATS, CHAT)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
    assert "retry-after" in answer.headers


def test_long_chats_have_templates_of_their_own(running: Running, llm: LLM) -> None:
    assert llm.tokenizer is not None
    assert running.post(CHATS, CHAT).status_code == 200
    long = [{"role": ("user", "assistant")[turn % 2], "content": "Hi"} for turn in range(301)]
    with llm.tokenizer._chat._own._lock:  # short ones wait; a long one does not
        assert running.post(CHATS, CHAT | {"messages": long}).status_code in (200, 400)


def test_prompts_that_nobody_has_time_for(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Overload is not the client's fault."""
    monkeypatch.setattr(preparation, "SECONDS", 0.3)
    go_on = threading.Event()
    lane = running.application.service.preparation._short
    held = [lane.submit(lambda: go_on.wait(10)) for _ in range(4)]
    answer = running.post(COMPLETIONS, PLAIN)
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "overloaded")
    assert "retry-after" in answer.headers
    go_on.set()
    assert all(each.result() for each in held)


def test_long_prompts_have_a_thread_of_their_own(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever short ones do, and the other way round."""
    monkeypatch.setattr(preparation, "SECONDS", 0.5)
    monkeypatch.setattr(preparation, "LONG", 100)
    lanes = running.application.service.preparation
    long = PLAIN | {"prompt": "word " * 40}
    for lane, passes, waits in ((lanes._short, long, PLAIN), (lanes._long, PLAIN, long)):
        go_on = threading.Event()
        held = [lane.submit(lambda event=go_on: event.wait(10)) for _ in range(4)]
        assert running.post(COMPLETIONS, passes).status_code == 200
        assert running.post(COMPLETIONS, waits).status_code == 503
        go_on.set()
        assert all(each.result() for each in held)


def test_a_body_of_very_many_values(running: Running) -> None:
    body = b'{"prompt": [' + b"5," * 2**21 + b"5]}"
    with others(running):
        answer = httpx.post(running.url + COMPLETIONS, content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 413
    assert "values" in answer.json()["error"]["message"]


# images


def one_bit(side: int) -> bytes:
    image = pytest.importorskip("PIL.Image")
    file = io.BytesIO()
    image.new("1", (side, side)).save(file, format="PNG")
    return file.getvalue()


def test_images_are_bounded_before_they_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    image = pytest.importorskip("PIL.Image")
    from outrider import vision

    def convert(self: Any, mode: str) -> Any:
        raise AssertionError("an image was decoded")

    picture = one_bit(4000)  # sixteen of them are 256 million pixels, in some kilobytes
    assert len(picture) < 10_000
    url = "data:image/png;base64," + base64.b64encode(picture).decode()
    before = psutil.Process().memory_info().rss
    with monkeypatch.context() as patch:
        patch.setattr(image.Image, "convert", convert)
        for pictures, reason in (
            ([url] * 16, "pixels"),
            ([picture] * 5, "pixels"),
            ([one_bit(8)] * 17, "17 images"),
            ([one_bit(20_000)], "cannot be read|pixels"),
        ):
            with pytest.raises(ValueError, match=reason):
                vision.open_pictures(pictures)
    assert psutil.Process().memory_info().rss - before < 100 * 2**20
    assert [each.size for each in vision.open_pictures([url, one_bit(8)])] == [(4000, 4000), (8, 8)]


def test_formats_that_are_not_read() -> None:
    pytest.importorskip("PIL")
    from outrider import vision

    for content in (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", b"II*\0" + b"\0" * 64):
        with pytest.raises(ValueError, match="cannot be read"):
            vision.open_pictures([content])


def test_many_images_over_http(running: Running) -> None:
    part = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    answer = running.post(CHATS, CHAT | {"messages": [{"role": "user", "content": [part] * 17}]})
    assert answer.status_code == 400
    assert "17 images" in answer.text


# fields


def test_allowed_ids_are_taken_once(running: Running, llm: LLM) -> None:
    params = llm.prompts.settled(SamplingParams(allowed_token_ids=[7, 5, 5, 7] * 1000), [1])
    assert list(params.allowed_token_ids or ()) == [5, 7]
    body = PLAIN | {"allowed_token_ids": [5] * 2**18, "n": 64, "max_tokens": 1, "return_token_ids": True}
    with others(running):
        answer = running.post(COMPLETIONS, body)
        assert running.post(COMPLETIONS, body | {"allowed_token_ids": [5] * (2**18 + 1)}).status_code == 400
    assert answer.status_code == 200
    assert {tuple(choice["token_ids"]) for choice in answer.json()["choices"]} == {(5,)}


def test_log_probabilities_of_a_prompt_are_spread_over_rounds(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider.engine import scheduler

    params = SamplingParams(max_tokens=2, temperature=0, prompt_logprobs=20, n=3)
    prompt = list(range(100, 300))
    monkeypatch.setattr(scheduler, "MAX_FIGURES", 2**30)
    (whole,) = llm.generate([prompt], params)
    monkeypatch.setattr(scheduler, "MAX_FIGURES", 2**10)
    requests = llm.make_requests(prompt, llm.prompts.settled(params, prompt))
    for request in requests:
        llm.engine.add(request)
    made, before = [], 0
    while llm.engine.has_work:
        llm.engine.step()
        now = sum(len(request.prompt_logprobs) for request in requests)
        made.append(now - before)
        before = now
    assert max(made) * 21 <= 2**10 + 3 * 2 * 21  # everybody moves by a row at least
    assert requests[0].prompt_logprobs == whole.prompt_logprobs
    assert [request.outputs for request in requests] == [output.token_ids for output in whole.outputs]


def test_echo_with_very_many_log_probabilities(running: Running) -> None:
    body = PLAIN | {"prompt": [5] * 500, "echo": True, "logprobs": 100, "n": 5, "max_tokens": 1}
    with others(running):
        answer = running.post(COMPLETIONS, body)
    assert answer.status_code == 200
    assert len(answer.json()["choices"][4]["logprobs"]["top_logprobs"][499]) >= 99
    assert running.post(COMPLETIONS, body | {"prompt": [5] * 1000}).status_code == 400


# readers and connections


def test_a_reader_who_never_reads_is_given_up(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "READ_SECONDS", 0.5)
    monkeypatch.setattr(connections, "_give_up_on_silence", lambda transport: None)  # the system would do it too, later
    body = json.dumps(PLAIN | {"max_tokens": 1000, "ignore_eos": True, "stream": True, "logprobs": 100}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    with serve() as running, socket.socket() as deaf:
        deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        deaf.connect(("127.0.0.1", running.port))
        deaf.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        wait_for(lambda: _streams(running), 20)
        with others(running):
            wait_for(lambda: not _streams(running), 15)
        running.wait_until_idle()


def _streams(running: Running) -> bool:
    """Whether somebody's answer is under way who is not read."""
    return any(each.flow.write_paused for each in list(running.server.server_state.connections))


def test_a_slow_reader_is_waited_for(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "READ_SECONDS", 0.5)
    body = PLAIN | {"prompt": [5] * 400, "max_tokens": 2, "echo": True, "logprobs": 100, "n": 5}
    request = json.dumps(body).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nConnection: close\r\n"
    with serve() as running, socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2**17)
        slow.connect(("127.0.0.1", running.port))
        slow.sendall(f"{head}Content-Length: {len(request)}\r\n\r\n".encode() + request)
        slow.settimeout(20)
        received = b""
        while part := slow.recv(2**18):
            received += part
            time.sleep(0.05)
        content = received.partition(b"\r\n\r\n")[2]
        assert len(content) > 2**20
        assert len(json.loads(content)["choices"]) == 5


def test_a_reader_must_have_read_so_much() -> None:
    """And whoever has is waited for as long again."""

    class Transport:
        size, is_aborted = 10 * connections.READ_BYTES, False

        def get_write_buffer_size(self) -> int:
            return self.size

        def abort(self) -> None:
            self.is_aborted = True

    async def main() -> None:
        transport, reader = Transport(), connections.PatientProtocol.__new__(connections.PatientProtocol)
        reader.transport, reader.loop = transport, asyncio.get_running_loop()  # type: ignore[assignment]
        reader._await_reader()
        for _ in range(3):
            transport.size -= connections.READ_BYTES
            timer = reader._read_timer
            reader._check_reader()
            assert not transport.is_aborted
            assert reader._read_timer is not timer
        transport.size -= connections.READ_BYTES - 1
        reader._check_reader()
        assert transport.is_aborted
        reader._stop_reading_timer()

    asyncio.run(main())


def test_idle_connections_go_first(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "connection_limit", lambda wanted: 24)
    with serve() as running, contextlib.ExitStack() as stack:
        with httpx.stream(
            "POST", running.url + COMPLETIONS, json=PLAIN | {"max_tokens": 300, "stream": True}
        ) as stream:
            idle = [stack.enter_context(socket.create_connection(("127.0.0.1", running.port))) for _ in range(60)]
            with others(running):
                time.sleep(0.5)
            assert "[DONE]" in "".join(stream.iter_lines())  # who is served stays
        assert len(running.server.server_state.connections) <= 26
        for connection in idle[:20]:  # the oldest
            connection.settimeout(5)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""


def test_of_connections_that_came_at_once_the_first_goes_first() -> None:
    """The loop may say the same time to all of them."""

    class Still(asyncio.SelectorEventLoop):
        def time(self) -> float:
            return 1.0

    class Ended(asyncio.Transport):
        ended = False

        def abort(self) -> None:
            self.ended = True

        def is_closing(self) -> bool:
            return self.ended

    async def application(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError("nobody asks for anything")

    loop, config, state = Still(), uvicorn.Config(application, log_config=None), ServerState()
    protocol = connections.PatientProtocol.with_room_for(20)
    transports = [Ended() for _ in range(40)]
    for number, transport in enumerate(transports):
        protocol(config, state, {}, _loop=loop).connection_made(transport)
        num_gone = max(number + 1 - 20, 0)
        assert [each.ended for each in transports] == [True] * num_gone + [False] * (40 - num_gone)
    loop.close()


def test_health_when_there_are_too_many_requests(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app_module, "SPARE_REQUESTS", -3)
    with serve(QueueLimits(max_queue=0)) as running, contextlib.ExitStack() as stack:  # 4 sequences, but 1 request
        body = PLAIN | {"max_tokens": 1500, "ignore_eos": True, "stream": True}
        stack.enter_context(httpx.stream("POST", running.url + COMPLETIONS, json=body, timeout=30))
        refused = running.post(COMPLETIONS, PLAIN)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "overloaded")
        assert "retry-after" in refused.headers
        assert running.get("/health/live").status_code == 200
        stack.close()
        running.wait_until_idle()
        assert running.post(COMPLETIONS, PLAIN).status_code == 200


def test_streams_that_are_left_are_closed_in_order(
    running: Running, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    """At any moment: no generator is closed by whoever comes along (test_events.py says so of each)."""
    body = json.dumps(PLAIN | {"max_tokens": 200, "ignore_eos": True, "stream": True, "logprobs": 20}).encode()
    head = f"POST {COMPLETIONS} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    for number in range(24):
        with socket.create_connection(("127.0.0.1", running.port)) as connection:
            connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            if number % 3:
                connection.recv(64 * number)
            time.sleep(0.01 * (number % 4))
    running.wait_until_idle()
    assert running.post(COMPLETIONS, PLAIN).status_code == 200
    said = caplog.text + capsys.readouterr().err
    for word in ("athrow", "aclose", "asynchronous generator", "Exception in ASGI"):
        assert word not in said


# the engine


def test_whoever_prepares_may_fail_in_any_way(running: Running, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Panic(BaseException):
        pass

    def panic(guided: Any) -> None:
        raise Panic

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.grammars.trial, "check", panic)
        answer = running.post(COMPLETIONS, PLAIN | {"guided_regex": "(ab|siege)+"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (500, "internal_error")
    assert running.post(COMPLETIONS, PLAIN).status_code == 200


def test_a_job_that_cannot_be_taken_fails_alone(
    serve: Serve, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And so do not those behind it; but where none can be taken any more, the engine has ended."""
    honest = engine_loop.EngineLoop._take

    def take(self: Any, asked: Any, made: Any) -> None:
        if asked.params[0].seed == 666:
            raise RuntimeError("secret detail")
        honest(self, asked, made)

    monkeypatch.setattr(engine_loop.EngineLoop, "_take", take)
    bad = PLAIN | {"seed": 666}
    with serve(exit_on_death=False) as running, ThreadPoolExecutor(6) as pool:
        answers = list(pool.map(lambda body: running.post(COMPLETIONS, body), [PLAIN, bad, PLAIN, bad, PLAIN]))
        assert [answer.status_code for answer in answers] == [200, 500, 200, 500, 200]
        codes = [running.post(COMPLETIONS, bad).status_code for _ in range(engine_loop.BROKEN_AFTER + 1)]
        assert set(codes) == {500, 503}
        assert running.engine.is_dead
    assert caplog.text.count("secret detail") < 4 * engine_loop.BROKEN_AFTER


def test_a_grammar_that_becomes_slow_is_the_clients_to_mend(
    running: Running, llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    from outrider.engine import guidance
    from outrider.grammar.guide import Guide

    honest = Guide.masks

    def masks(self: Guide, draft: Any) -> Any:
        time.sleep(1.0)
        return honest(self, draft)

    monkeypatch.setattr(guidance, "MAX_SECONDS", 0.3)
    monkeypatch.setattr(Guide, "masks", masks)
    with others(running):
        answer = running.post(COMPLETIONS, PLAIN | {"guided_choice": ["yes", "no"]})
    assert answer.status_code == 400
    assert "grammar takes too long" in answer.text


# the log


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    written, root = io.StringIO(), logging.getLogger()
    handlers = root.handlers, log_module.logger.handlers, log_module.logger.propagate, log_module.logger.level
    monkeypatch.setattr(sys, "stderr", written)
    log_module.log_to_stderr()
    yield written
    root.handlers, log_module.logger.handlers, log_module.logger.propagate, level = handlers
    log_module.logger.setLevel(level)
    logging.captureWarnings(False)


def test_lines_of_libraries_are_json_too(lines: io.StringIO) -> None:
    try:
        raise RuntimeError("broken")
    except RuntimeError:
        logging.getLogger("uvicorn.error").exception("Exception in %s", "ASGI application\n")
    logging.getLogger("uvicorn.error").info("nobody wants to know")
    log_module.log("request", id="a")
    library, request = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert (library["event"], library["logger"], library["level"]) == ("library", "uvicorn.error", "error")
    assert "RuntimeError: broken" in library["traceback"]
    assert request["event"] == "request"


def test_repeated_lines_are_counted(lines: io.StringIO, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(1000):
        log_module.log_fault(f"fault-{number}", RuntimeError("the same again"))
        log_module.log("request", id=number)
    assert lines.getvalue().count('"event": "fault"') == log_module.MAX_LIKE_LINES
    assert lines.getvalue().count('"event": "request"') == 1000
    monkeypatch.setattr(log_module, "LIKE_SECONDS", -1.0)
    log_module.log_fault("fault-1000", RuntimeError("the same again"))
    (repeated,) = [json.loads(line) for line in lines.getvalue().splitlines() if '"repeated"' in line]
    assert repeated["times"] == 1000 - log_module.MAX_LIKE_LINES


def test_a_log_that_cannot_be_written_is_no_reason_to_end() -> None:
    handler = LineHandler()
    with contextlib.suppress(OSError), open("/dev/full", "w") as full:  # to close it fails too
        handler.setStream(full)
        try:
            handler.emit(logging.LogRecord("other", logging.ERROR, "", 0, "lost", None, None))
        except OSError as error:
            raise AssertionError("it was told of the disk") from error


def test_a_server_whose_standard_error_is_full() -> None:
    """It serves all the same, and says "listening" when it does."""
    from outrider.bench.load import server_process

    port = server_process._free_port()
    command = [sys.executable, "-m", "outrider", "serve", "--port", str(port), "--threads", "1"]
    with open("/dev/full", "w") as full:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=full)
    try:
        wait_for(lambda: process.poll() is not None or _answers(port), 90)
        assert process.poll() is None
    finally:
        process.terminate()
        assert process.wait(30) == 0


def _answers(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


def test_listening_is_said_when_it_is_true(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[bool] = []

    class Listening(serving.Server):
        def __init__(self, *given: Any, **options: Any) -> None:
            super().__init__(*given, **options, on_listening=lambda: heard.append(self._accepts()))

        def _accepts(self) -> bool:
            with socket.create_connection(self.servers[0].sockets[0].getsockname(), timeout=2):
                return True

    import conftest

    monkeypatch.setattr(conftest, "Server", Listening)
    with serve() as running:
        assert heard == [True]
        assert running.get("/health").status_code == 200
    assert asyncio.iscoroutinefunction(serving.Server.startup)
