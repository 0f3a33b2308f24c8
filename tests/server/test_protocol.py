"""What goes over the link arrives as it was sent, is small, and never keeps its sender waiting."""

import asyncio
import os
import pickle
import select
import socket
import threading
import time
from dataclasses import fields, replace
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
from running import Running, Serve, wait_for

from outrider import LLM
from outrider.engine import engine as engines
from outrider.outputs import Logprob
from outrider.sampling_params import Guided, SamplingParams, Speculation
from outrider.server.engine_client import EngineClient, QueueLimits, ReadyPrompt
from outrider.server.errors import ApiError, bad_request, too_busy
from outrider.server.link import LENGTH, Link
from outrider.server.protocol import Abort, Accepted, Brought, Ending, JobRefused, Opened, Piece, Submit

PARAMS = SamplingParams(guided=Guided(json_schema={"type": "object"}), logit_bias={3: 1.5}, stop=["a"], seed=7)
MODEL = Opened("somewhere", 128, 1000, max_num_seqs=2, num_speculative_tokens=0, memory={}, memory_rows={})


def row(token: int) -> dict[int, Logprob]:
    return {token: Logprob(-0.5, 1, "é"), token + 1: Logprob(float("-inf"), 2, "\ud800")}


def links() -> tuple[Link, Link]:
    ours, theirs = socket.socketpair()
    return Link(ours), Link(theirs)


def plain(index: int = 0, **changes: Any) -> Piece:
    given: dict[str, Any] = {"text": "ab", "token_ids": [5], "draft_positions": [0], "text_ends": [9]}
    return Piece(3, index, counts=(1, 2, 3), **{**given, **changes})


PIECES = [
    plain(),
    plain(1, logprobs=[row(5)], prompt_logprobs=[None, row(1)], draft=[4, 5]),
    plain(2, logprobs=[], draft=[], ending=Ending("stop", "end", Speculation(3, 2, 1, (2,), (1,)))),
]


@pytest.mark.parametrize("piece", PIECES)
def test_a_piece_arrives_as_it_was(piece: Piece) -> None:
    there, here = links()
    there.send(Brought(7, False, [piece.packed()], [3]))
    message = here.receive()
    assert (message.num_steps, message.closed) == (7, [3])
    arrived = Piece.unpacked(message.pieces[0])
    assert arrived.prompt_rows() == [each for each in piece.prompt_logprobs or () if each is not None]
    assert replace(arrived, prompt_logprobs=piece.prompt_logprobs) == piece


def test_what_two_steps_brought_is_joined() -> None:
    first = plain(text="a", text_ends=[1], logprobs=[row(5)], prompt_logprobs=[None, row(1)])
    second = plain(text="b", text_ends=[2], token_ids=[6], logprobs=[row(6)], ending=PIECES[2].ending)
    whole = first.joined(second)
    assert whole == plain(
        text="ab",
        text_ends=[1, 2],
        token_ids=[5, 6],
        draft_positions=[0, 0],
        logprobs=[row(5), row(6)],
        prompt_logprobs=[None, row(1)],
        ending=PIECES[2].ending,
    )


def test_every_field_of_a_piece_travels() -> None:
    assert len(plain().packed()) == len(fields(Piece))


def test_errors_and_requests_arrive_as_they_were() -> None:
    there, here = links()
    for error in (bad_request("no", "n"), too_busy("later", 7), ApiError(status=499, message="gone", code="x")):
        there.send(JobRefused(1, error))
        found = here.receive().error
        assert (found.body, found.headers, found.status) == (error.body, error.headers, error.status)
        there.send(Abort(1, error))
        assert here.receive().error.code == error.code
    asked = Submit(1, "id", [[1, 2], {"prompt": "x", "multi_modal_data": {"image": ["data:..."]}}], [PARAMS] * 2,
                   streams=True, waited=0.5, left=3.0)  # fmt: skip
    there.send(asked)
    assert here.receive() == asked


def test_a_step_of_many_streams_is_small() -> None:
    pieces = [Piece(1000 + n, 0, " word", [50_000 + n], [0], [300 + n], (12, 0, 0)).packed() for n in range(128)]
    message = ForkingPickler.dumps(Brought(10**6, False, pieces, []))
    assert len(message) < 128 * 64


def test_sending_waits_for_nobody() -> None:
    """Nor does it lose anything: what the other side has not taken yet comes in order."""
    there, here = links()
    begin = time.monotonic()
    for number in range(200):
        there.send((number, b"x" * 100_000))
    assert time.monotonic() - begin < 2
    assert [here.receive()[0] for _ in range(200)] == list(range(200))


def test_a_closed_link_delivers_what_was_sent() -> None:
    there, here = links()
    there.send("last words")
    there.close()
    assert here.receive() == "last words"
    for end in (here, there):
        with pytest.raises(EOFError):
            end.receive()
    here.send("too late")


def test_closing_ends_whoever_receives() -> None:
    there, _here = links()
    ended = threading.Event()

    def receive() -> None:
        with pytest.raises((EOFError, OSError)):
            there.receive()
        ended.set()

    threading.Thread(target=receive).start()
    time.sleep(0.05)
    there.close()
    assert ended.wait(5)


# links


def test_half_a_message_holds_nobody_up() -> None:
    """An engine that hangs, or dies, while it says something must not take the front with it."""
    ours, theirs = socket.socketpair()
    link = Link(ours)
    whole = [LENGTH.pack(len(each)) + each for each in map(pickle.dumps, ("first", "x" * 3_000_000))]
    theirs.sendall(whole[0] + whole[1][:1000])
    assert list(link.take()) == ["first"]
    assert list(link.take()) == []
    writer = threading.Thread(target=theirs.sendall, args=(whole[1][1000:] + whole[0] + whole[1][:3],))
    writer.start()
    assert link.receive() == "x" * 3_000_000
    writer.join()
    assert list(link.take()) == ["first"]
    theirs.close()
    with pytest.raises(EOFError):
        list(link.take())


def test_a_file_that_does_not_block_loses_nothing() -> None:
    """uvloop makes files so that it watches; a message may be larger than what the system holds for the other side."""
    here, there = links()
    for each in (here, there):
        os.set_blocking(each.fileno(), False)
    for sender, receiver in ((here, there), (there, here)):
        found: list[Any] = []
        reader = threading.Thread(target=lambda end=receiver, found=found: found.extend(end.receive() for _ in "ab"))
        reader.start()
        time.sleep(0.05)
        sender.send("x" * 20_000_000)
        sender.send("last")
        reader.join(20)
        assert [len(each) for each in found] == [20_000_000, 4]
        sender.send("y" * 20_000_000)  # nobody reads it yet
        time.sleep(0.05)
        assert receiver.receive() == "y" * 20_000_000


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("error", [OSError, RuntimeError])
def test_a_link_that_cannot_send_is_closed(error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    """Or whoever waits for an answer would wait for ever."""
    here, there = links()

    def fail(message: bytes) -> None:
        raise error

    monkeypatch.setattr(here, "_write_all", fail)
    here.send("lost")
    for each in (here, there):
        with pytest.raises(EOFError):
            each.receive()
    here._writer.join(10)


# the front's side alone


def test_what_queued_up_is_read_at_once() -> None:
    """Else a front that is slower than the engine would fall behind for ever, one step after the other."""

    async def main() -> None:
        here, there = links()
        client = EngineClient(here, MODEL, "m", QueueLimits(), lambda: "?")
        job = client.submit(
            [ReadyPrompt([1], [1], SamplingParams())], time.monotonic() + 60, time.monotonic(), streams=True
        )
        assert there.receive().job == job.number
        there.send(Accepted(job.number, None))
        for _ in range(5):
            there.send(Brought(1, False, [_of(job.number)], []))
        wait_for(lambda: select.select([here], [], [], 0)[0])
        await asyncio.sleep(0.05)
        client.start()
        await job.accepted()
        pieces = job.pieces()
        assert (await anext(pieces)).token_ids == [5] * 5
        await pieces.aclose()

    asyncio.run(main())


def _of(number: int) -> tuple[Any, ...]:
    return (number, *plain().packed()[1:])


def test_room_is_counted_here() -> None:
    """And given back with the end of a job, whichever it is; what comes for a job that has ended is nobody's."""

    async def main() -> None:
        here, there = links()
        client = EngineClient(here, MODEL, "m", QueueLimits(max_queue=1, max_queued_tokens=10), lambda: "it fell over")
        client.start()

        def submit(num_tokens: int, n: int = 1) -> Any:
            asked = ReadyPrompt([1] * num_tokens, [1] * num_tokens, SamplingParams(n=n))
            return client.submit([asked], time.monotonic() + 60, time.monotonic(), streams=True)

        first, second = submit(4, n=2), submit(4)
        assert (client.num_sequences, client.is_idle) == (3, False)
        with pytest.raises(ApiError, match="too many requests"):
            submit(1)
        there.send(JobRefused(second.number, bad_request("no")))
        with pytest.raises(ApiError, match="no"):
            await second.accepted()
        assert second.closed
        assert client.num_sequences == 2
        with pytest.raises(ApiError, match="too many requests"):
            submit(7)  # tokens
        there.send(Accepted(first.number, [[1] * 9]))  # an image took five of them
        await first.accepted()
        assert first.num_prompt_tokens == 9
        with pytest.raises(ApiError, match="too many requests"):
            submit(2)
        there.send(Brought(2, True, [_of(first.number), _of(second.number)], [first.number]))
        while not client.is_idle:
            await asyncio.sleep(0.01)
        assert client.is_acceptance_dead
        third = submit(10)
        there.close()
        with pytest.raises(ApiError, match="engine has ended"):
            await third.accepted()
        assert client.is_dead
        assert client.is_idle
        with pytest.raises(ApiError, match="engine has ended"):
            submit(1)

    asyncio.run(main())


# the engine's side


def test_a_slow_grammar_stops_nobody(serve: Serve, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds go on while it is compiled; whoever gives up waiting for it has not started it."""
    go_on, asked = threading.Event(), threading.Event()
    honest = engines.Engine.guide

    def slow(*given: Any) -> Any:
        asked.set()
        go_on.wait(20)
        return honest(*given)

    monkeypatch.setattr(engines.Engine, "guide", slow)
    with serve() as running:
        guided = {"prompt": "Hi", "guided_regex": "[ab]+", "max_tokens": 5}
        late = threading.Thread(target=running.post, args=("/v1/completions", guided | {"timeout": 0.3}))
        late.start()
        assert asked.wait(60)  # the process in which grammars are tried has to come up
        begin = time.monotonic()
        assert running.post("/v1/completions", {"prompt": "Hi", "max_tokens": 30}).status_code == 200
        late.join()
        assert time.monotonic() - begin < 5
        go_on.set()
        answer = running.post("/v1/completions", guided)
        assert answer.status_code == 200
        assert set(answer.json()["choices"][0]["text"]) <= set("ab")
        running.wait_until_idle()


def test_figures_while_a_step_takes_long(running: Running, llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    go_on, honest = threading.Event(), llm.engine.step
    with monkeypatch.context() as patch:
        patch.setattr(llm.engine, "step", lambda: (go_on.wait(20), honest())[1])
        waiting = threading.Thread(target=running.post, args=("/v1/completions", {"prompt": "Hi", "max_tokens": 3}))
        waiting.start()
        wait_for(lambda: running.engine.num_sequences == 1)
        begin = time.monotonic()
        assert "vllm:num_requests_waiting" in running.get("/metrics").text
        assert time.monotonic() - begin < 2
        go_on.set()
        waiting.join()


class Nonsense:
    """Cannot be read at the other end."""

    def __reduce__(self) -> Any:
        return int, ("x",)


def test_what_cannot_be_read_ends_everything(serve: Serve) -> None:
    """Either side: to wait for ever is worse."""

    async def main() -> None:
        here, there = links()
        client = EngineClient(here, MODEL, "m", QueueLimits(), lambda: "?")
        client.start()
        job = client.submit(
            [ReadyPrompt([1], [1], SamplingParams())], time.monotonic() + 60, time.monotonic(), streams=True
        )
        there.send(Nonsense())
        with pytest.raises(ApiError, match="engine has ended"):
            await job.accepted()

    asyncio.run(main())
    with serve(exit_on_death=False) as running:
        running.engine._link.send(Nonsense())
        wait_for(lambda: running.engine.is_dead)
        assert running.post("/v1/completions", {"prompt": "Hi"}).status_code == 503
