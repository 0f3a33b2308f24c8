"""From the engine's thread to the event loop: in order, woken once a step, and never left waiting."""

import asyncio
import threading
import time
from typing import Any

import httpx
import pytest
from running import Running, wait_for

from outrider.engine.request import Request
from outrider.outputs import CompletionOutput
from outrider.sampling_params import SamplingParams
from outrider.server import job as job_module
from outrider.server.errors import ApiError, bad_request
from outrider.server.job import Accepted, Job, Piece
from outrider.server.outbox import SHARE, Outbox


def request() -> Request:
    return Request("r", [1, 2], SamplingParams(), 0)


def piece(index: int, text: str, *, last: bool = False) -> Piece:
    final = CompletionOutput.of(request(), index) if last else None
    return Piece(index, text, [], [], [], [], final=final)


def new_job(num_requests: int = 1, seconds: float = 60.0) -> Job:
    return Job("j", [request() for _ in range(num_requests)], time.monotonic() + seconds)


def test_a_step_wakes_the_loop_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        jobs = [new_job(2) for _ in range(3)]
        wakes = []
        honest = loop.call_soon_threadsafe
        monkeypatch.setattr(loop, "call_soon_threadsafe", lambda *given: (wakes.append(1), honest(*given)))

        def engine() -> None:
            outbox = Outbox()
            for number in range(4):
                for job in jobs:
                    for index in (0, 1):
                        outbox.add(job, piece(index, str(number), last=number == 3))
                outbox.deliver(time.monotonic())

        thread = threading.Thread(target=engine)
        thread.start()
        for job in jobs:
            texts = {0: "", 1: ""}
            async for found in job.pieces():
                texts[found.index] += found.text
            assert texts == {0: "0123", 1: "0123"}
        thread.join()
        assert len(wakes) <= 4

    asyncio.run(main())


def test_an_engine_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client is told all the same, after what had come until then; and nothing is left behind."""
    monkeypatch.setattr(job_module, "GRACE", 0.05)

    async def main() -> None:
        job = new_job(seconds=0.05)
        job.send(Accepted())
        await job.accepted()
        job.send(piece(0, "one"))
        found = []
        try:
            async for each in job.pieces():
                found.append(each.text)
        except ApiError as error:
            found.append(error.code or "")
        assert found == ["one", "deadline_exceeded"]

    asyncio.run(main())


def test_no_timer_outlives_its_job() -> None:
    """Deadlines are minutes away: what waited for them would keep every job that ever was."""

    async def main() -> list[Any]:
        loop: Any = asyncio.get_running_loop()
        for _ in range(20):
            job = new_job(seconds=600)
            job.send(Accepted(), piece(0, "one"), piece(0, "two", last=True))
            await job.accepted()
            assert "".join([each.text async for each in job.pieces()]) == "onetwo"
            broken = new_job(seconds=600)
            broken.send(bad_request("no"))
            with pytest.raises(ApiError):
                await broken.accepted()
        return [timer for timer in loop._scheduled if not timer.cancelled()]

    assert asyncio.run(main()) == []


def test_a_loop_that_has_gone() -> None:
    async def main() -> Job:
        return new_job()

    job = asyncio.run(main())
    job.send(piece(0, "one"))
    assert job.closed


def test_gauges_after_an_abort(running: Running) -> None:
    """No step follows the last abort, and the gauges must not stay as they were in the last step."""
    body = {"prompt": "Once upon a time", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    names = ("vllm:num_requests_running{", "vllm:num_requests_waiting{", "vllm:kv_cache_usage_perc{")

    def gauges() -> list[float]:
        lines = running.get("/metrics").text.splitlines()
        return [float(line.rpartition(" ")[2]) for name in names for line in lines if line.startswith(name)]

    with httpx.stream("POST", f"{running.url}/v1/completions", json=body, timeout=30) as response:
        lines = response.iter_lines()
        next(lines)
        assert gauges()[0] == 1
        assert gauges()[2] > 0
    running.wait_until_idle()
    wait_for(lambda: gauges() == [0, 0, 0], 3)


def test_what_the_loop_had_no_time_for_is_sent_together() -> None:
    """In order, up to the end of a sequence; drafts are shown step by step; an error comes after what came before."""

    async def main() -> None:
        job = new_job(2)
        shown = Piece(1, "d", [7], [], [0], [1], draft=[7, 8])
        first = [Piece(0, text, [number], [], [0], [number]) for number, text in enumerate("abc")]
        for event in (*first, shown, shown, piece(1, "x"), piece(1, "y", last=True), piece(0, "z", last=True)):
            job.events.put_nowait(event)
        found = [each async for each in job.pieces()]
        assert [(each.index, each.text) for each in found] == [(0, "abc"), (1, "d"), (1, "d"), (1, "xy"), (0, "z")]
        assert (found[0].token_ids, found[0].text_ends) == ([0, 1, 2], [0, 1, 2])
        assert [each.final is not None for each in found] == [False, False, False, True, True]
        broken = new_job()
        for event in (piece(0, "a"), piece(0, "b"), bad_request("no more")):
            broken.events.put_nowait(event)
        pieces = broken.pieces()
        assert (await anext(pieces)).text == "ab"
        with pytest.raises(ApiError, match="no more"):
            await anext(pieces)

    asyncio.run(main())


def test_sending_takes_no_more_than_its_share() -> None:
    """What is neither first nor last waits while the event loop has had its share of the time; nothing is lost."""

    async def main() -> None:
        outbox, jobs = Outbox(), [new_job() for _ in range(3)]
        now = 100.0
        for job in jobs:
            outbox.add(job, piece(0, "a"))
        outbox.deliver(now)
        await asyncio.sleep(0.01)
        assert [job.events.qsize() for job in jobs] == [1, 1, 1]
        outbox._last = now
        for number in range(1, 8):
            now += 0.11
            outbox._seconds = 0.3  # that a delivery is said to take
            for job in jobs:
                outbox.add(job, piece(0, str(number), last=job is jobs[2] and number == 3))
            outbox.deliver(now)
            await asyncio.sleep(0)
            sizes = [job.events.qsize() for job in jobs[:2]]
            due = now - 100.0 >= 0.3 * (1 / SHARE - 1)
            assert sizes == ([1 + number] * 2 if due else [1, 1])
            assert jobs[2].events.qsize() >= (4 if number >= 3 else 1), "a last piece waits for nothing"
            if due:
                break
        else:
            raise AssertionError("they waited for ever")
        late = new_job()
        outbox._last = now
        outbox.add(late, piece(0, "first"))
        outbox.add(jobs[0], piece(0, "other"))
        outbox.deliver(now)
        await asyncio.sleep(0)
        assert late.events.qsize() == 1, "neither does a first one"
        outbox.forget(jobs[0])
        outbox.deliver(now + 100)
        await asyncio.sleep(0)
        assert jobs[0].events.qsize() == 1 + number

    asyncio.run(main())
