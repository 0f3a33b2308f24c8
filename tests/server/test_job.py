"""From the engine's messages to a client's stream: in order, joined where there is no time, and never left waiting."""

import asyncio
import time
from typing import Any

import httpx
import pytest
from running import Running, wait_for

from outrider.sampling_params import Speculation
from outrider.server import job as job_module
from outrider.server.errors import ApiError, bad_request
from outrider.server.job import Job
from outrider.server.protocol import Accepted, Ending, Piece

ENDING = Ending("stop", None, Speculation())


def piece(index: int, text: str, *, last: bool = False) -> Piece:
    return Piece(7, index, text, [], [], [], (0, 0, 0), ending=ENDING if last else None)


def new_job(num_sequences: int = 1, seconds: float = 60.0) -> Job:
    return Job(7, "j", [[1, 2]], num_sequences, time.monotonic() + seconds)


def put(job: Job, *events: Any) -> None:
    for event in events:
        job.events.put_nowait(event)


def test_an_engine_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client is told all the same, after what had come until then; and nothing is left behind."""
    monkeypatch.setattr(job_module, "GRACE", 0.05)

    async def main() -> None:
        job = new_job(seconds=0.05)
        put(job, Accepted(7, None))
        await job.accepted()
        put(job, piece(0, "one"))
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
            put(job, Accepted(7, None), piece(0, "one"), piece(0, "two", last=True))
            await job.accepted()
            assert "".join([each.text async for each in job.pieces()]) == "onetwo"
            broken = new_job(seconds=600)
            put(broken, bad_request("no"))
            with pytest.raises(ApiError):
                await broken.accepted()
        return [timer for timer in loop._scheduled if not timer.cancelled()]

    assert asyncio.run(main()) == []


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
        shown = Piece(7, 1, "d", [7], [0], [1], (0, 0, 0), draft=[7, 8])
        first = [Piece(7, 0, text, [number], [0], [number], (number, 0, 0)) for number, text in enumerate("abc")]
        put(job, *first, shown, shown, piece(1, "x"), piece(1, "y", last=True), piece(0, "z", last=True))
        found = []
        async for each in job.pieces():
            found.append(each)
            if len(found) == 1:
                assert job.num_cached == 2  # as of the latest piece
        assert [(each.index, each.text) for each in found] == [(0, "abc"), (1, "d"), (1, "d"), (1, "xy"), (0, "z")]
        assert (found[0].token_ids, found[0].text_ends) == ([0, 1, 2], [0, 1, 2])
        assert [each.ending is not None for each in found] == [False, False, False, True, True]
        broken = new_job()
        put(broken, piece(0, "a"), piece(0, "b"), bad_request("no more"))
        pieces = broken.pieces()
        assert (await anext(pieces)).text == "ab"
        with pytest.raises(ApiError, match="no more"):
            await anext(pieces)

    asyncio.run(main())
