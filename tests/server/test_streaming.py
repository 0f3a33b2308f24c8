"""The client under `outrider bench serve`: HTTP's framing in any pieces, connections that are kept, lost or silent."""

import asyncio
from collections.abc import Awaitable, Callable
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.bench.load.streaming import Body, Streamed, Streams

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@settings(max_examples=200, deadline=None)
@given(
    pieces=st.lists(st.binary(min_size=1, max_size=40), max_size=8), cuts=st.sets(st.integers(0, 400)), data=st.data()
)
def test_bodies_in_any_pieces(pieces: list[bytes], cuts: set[int], data: st.DataObject) -> None:
    whole = b"".join(pieces)
    if data.draw(st.booleans()):
        headers, sent = {b"content-length": b"%d" % len(whole)}, whole
    else:
        headers = {b"transfer-encoding": b"chunked"}
        sent = b"".join(b"%x;note=1\r\n%s\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"
    body, found = Body(headers), b""
    places = sorted({0, len(sent), *(cut for cut in cuts if cut < len(sent))})
    for begin, end in pairwise(places):
        assert not body.is_complete
        found += body.feed(sent[begin:end])
    assert (found, body.is_complete) == (whole, True)


def served(
    handler: Handler, ask: Callable[[Streams], Awaitable[list[Streamed]]], timeout: float = 30.0
) -> list[Streamed]:
    async def run() -> list[Streamed]:
        async with await asyncio.start_server(handler, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            async with Streams(f"http://127.0.0.1:{port}/root/", {"X-Key": "7"}, timeout) as streams:
                return await ask(streams)

    return asyncio.run(run())


async def read_request(reader: asyncio.StreamReader) -> bytes:
    head = await reader.readuntil(b"\r\n\r\n")
    length = int(head.lower().partition(b"content-length:")[2].partition(b"\r\n")[0])
    return head + await reader.readexactly(length)


async def twice(streams: Streams) -> list[Streamed]:
    first = await streams.post("/path", {"a": 1})
    await asyncio.sleep(0.05)  # a server that closes has done so
    return [first, await streams.post("/path", {"a": 2})]


@pytest.mark.parametrize("closes", ["never", "says so", "silently"])
def test_connections_are_kept_as_long_as_the_server_keeps_them(closes: str) -> None:
    requests: list[list[bytes]] = []

    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests.append([])
        while not reader.at_eof():
            try:
                requests[-1].append(await read_request(reader))
            except asyncio.IncompleteReadError:
                break
            note = b"Connection: close\r\n" if closes == "says so" else b""
            writer.write(b"HTTP/1.1 200 OK\r\n" + note + b"Content-Length: 5\r\n\r\nhello")
            await writer.drain()
            if closes != "never":
                break
        writer.close()

    answers = served(handler, twice)
    assert [(answer.status, answer.body) for answer in answers] == [(200, b"hello")] * 2
    assert [len(each) for each in requests] == ([2] if closes == "never" else [1, 1])
    assert requests[0][0].startswith(b"POST /root/path HTTP/1.1\r\n")
    assert b"X-Key: 7\r\n" in requests[0][0]


def test_parts_have_their_times() -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\n\r\n")  # neither length nor chunks: until the connection ends
        for number in range(3):
            writer.write(b"%d" % number)
            await writer.drain()
            await asyncio.sleep(0.1)
        writer.close()

    async def once(streams: Streams) -> list[Streamed]:
        return [await streams.post("/", {})]

    (answer,) = served(handler, once)
    assert [data for _, data in answer.parts] == [b"0", b"1", b"2"]
    assert all(after - before > 0.05 for (before, _), (after, _) in pairwise(answer.parts))


@pytest.mark.parametrize(("ends", "error"), [(True, ConnectionError), (False, TimeoutError)])
def test_answers_that_stop_in_the_middle(ends: bool, error: type[Exception]) -> None:
    async def handler(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await read_request(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf")
        await writer.drain()
        if not ends:
            await asyncio.sleep(0.6)
        writer.close()

    async def once(streams: Streams) -> list[Streamed]:
        return [await streams.post("/", {})]

    with pytest.raises(error):
        served(handler, once, timeout=0.3)
