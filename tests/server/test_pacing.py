"""Paced streams: neither the times nor the sizes of frames depend on how many drafts were accepted."""

import asyncio
import itertools
import json
import socket
import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from running import Running, Serve

from outrider.server.pacing import FRAME, paced
from outrider.server.security import Access

PACE = 0.04
ASKED = {"messages": [{"role": "user", "content": "Tell me about walking in nature."}], "temperature": 0}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": ASKED | {"max_tokens": 80, "ignore_eos": True},
    "/v1/completions": {"prompt": "Walking in nature", "temperature": 0, "max_tokens": 80, "ignore_eos": True},
}
PLAIN = {"speculative": {"enabled": False}}


def frames_of(running: Running, path: str, body: dict[str, Any]) -> list[tuple[float, bytes]]:
    """Chunks as they are on the wire, and when each of them was complete."""
    content = json.dumps(body | {"stream": True}).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(content)}"
    frames: list[tuple[float, bytes]] = []
    with socket.create_connection(("127.0.0.1", running.port), timeout=30) as connection:
        connection.sendall(head.encode() + b"\r\n\r\n" + content)
        stream = connection.makefile("rb")
        assert b" 200 " in stream.readline()
        while stream.readline() != b"\r\n":
            pass
        while size := int(stream.readline(), 16):
            frames.append((time.monotonic(), stream.read(size)))
            assert stream.readline() == b"\r\n"
    return frames


def steady_frames_of(running: Running, path: str, body: dict[str, Any]) -> list[tuple[float, bytes]]:
    """Of a stream that the machine did not hold up for a while: of few frames, late ones would be most."""
    for _ in range(8):
        frames = frames_of(running, path, body)
        if all(moment - before < 4 * PACE for (before, _), (moment, _) in itertools.pairwise(frames)):
            break
    return frames


def events_of(frames: list[tuple[float, bytes]]) -> list[dict[str, Any]]:
    lines = b"".join(frame for _, frame in frames).decode().splitlines()
    data = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]
    assert data[-1] == "[DONE]"
    return [json.loads(line) for line in data[:-1]]


def text_of(events: list[dict[str, Any]]) -> str:
    choices = [choice for event in events for choice in event["choices"]]
    return "".join(choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices)


@pytest.mark.parametrize("path", ROUTES)
def test_frames_look_alike_whatever_was_accepted(serve: Serve, path: str) -> None:
    body = ROUTES[path]
    with serve(access=Access(pace=PACE)) as running:
        whole = running.post(path, body).json()
        drafted = steady_frames_of(running, path, body)
        plain = steady_frames_of(running, path, body | PLAIN)
        client = running.openai()
        if path.endswith("chat/completions"):  # the official client passes over the padding
            chunks = client.chat.completions.create(model="default", stream=True, **ASKED, max_tokens=80)  # type: ignore[call-overload]
            assert sum(len(chunk.choices[0].delta.content or "") for chunk in chunks) > 0
    assert whole["metrics"]["speculative_decoding"]["num_accepted_draft_tokens"] > 10
    for frames in (drafted, plain):
        assert {len(frame) for _, frame in frames} == {FRAME}
        moments = [moment / PACE for moment, _ in frames]
        gaps = [moment - before for before, moment in itertools.pairwise(moments)]
        late = sorted(abs(gap - round(gap)) for gap in gaps)
        assert late[len(late) // 2] < 0.25, gaps  # on the grid; a busy machine may miss it now and then
        assert round(moments[-1] - moments[0]) >= len(frames) - 1  # never two in one interval
    expected = whole["choices"][0].get("text") or whole["choices"][0]["message"]["content"]
    assert text_of(events_of(drafted)) == text_of(events_of(plain)) == expected


def test_an_unpaced_stream_does_tell(serve: Serve, running: Running) -> None:
    """What there is to hide: else the test above could not fail."""
    sizes = {len(frame) for _, frame in frames_of(running, "/v1/completions", ROUTES["/v1/completions"])}
    assert len(sizes) > 3


def test_it_ends_with_the_answer(serve: Serve) -> None:
    with serve(access=Access(pace=0.3)) as running:
        begin = time.monotonic()
        frames = frames_of(running, "/v1/completions", {"prompt": "Walking", "max_tokens": 1})
        assert time.monotonic() - begin < 2
        assert len(frames) <= 2


def test_a_client_that_leaves_a_paced_stream(serve: Serve) -> None:
    with serve(access=Access(pace=0.02)) as running:
        body = json.dumps(ROUTES["/v1/completions"] | {"stream": True, "max_tokens": 1500}).encode()
        with socket.create_connection(("127.0.0.1", running.port), timeout=30) as connection:
            head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
            connection.recv(10_000)
            assert running.engine.num_sequences == 1
        running.wait_until_idle(5)


def test_frames_of_many_and_of_long_events() -> None:
    """All sizes of events, in bursts and one at a time: the same bytes come out, in frames of one size."""

    async def frames(events: list[str], burst: int) -> list[bytes]:
        async def source() -> AsyncIterator[bytes]:
            for number, event in enumerate(events):
                if number % burst == 0:
                    await asyncio.sleep(0.002)
                yield event.encode()

        return [frame async for frame in paced(source(), 0.001)]

    sizes = [1, 100, FRAME - 11, FRAME - 10, FRAME - 9, FRAME - 8, FRAME, 3 * FRAME, 50, 7]
    events = [f"data: {'é' * (size // 2)}{'x' * (size % 2)}\n\n" for size in sizes]
    for burst in (1, 3, len(events)):
        made = asyncio.run(frames(events, burst))
        assert {len(frame) for frame in made} == {FRAME}
        lines = [line for line in b"".join(made).decode().split("\n") if line and not line.startswith(":")]
        assert lines == [event.strip() for event in events]
