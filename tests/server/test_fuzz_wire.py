"""Bad HTTP, and HTTP that does not come: connections end, and nobody else notices."""
# ruff: noqa: F811

import contextlib
import socket
import time

import pytest
from others import busy, quiet  # noqa: F401
from running import Running, Serve

from outrider.server import connections
from outrider.server.security import Access


def exchange(running: Running, *parts: bytes, seconds: float = 15.0) -> bytes:
    """Sends the parts as they are; what came back until the server hung up, or nothing more came."""
    received = b""
    address = ("127.0.0.1", running.port)
    with socket.create_connection(address, timeout=seconds) as connection, contextlib.suppress(OSError):
        for number, part in enumerate(parts):
            time.sleep(0.1 * (number > 0))  # so that it comes by itself
            connection.sendall(part)
        while data := connection.recv(65536):
            received += data
    return received


HOST = b"Host: 127.0.0.1\r\n"
CLOSE = b"Connection: close\r\n"


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /v1/models HTTP/1.1\r\n" + HOST + b"X-Long: " + b"x" * 1_000_000 + b"\r\n\r\n",
        b"GET /" + b"x" * 1_000_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n",
        b"GET /v1/models HTTP/1.1\r\n" + HOST + b"".join(b"X-%d: 1\r\n" % n for n in range(50_000)) + b"\r\n",
        b"GET /v1/models HTTP/1.1\r\n" + HOST + b"X-Bad\x00: \xff\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Length: -1\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
        b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Length: " + b"9" * 10_000 + b"\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Transfer-Encoding: chunked\r\n\r\nzzz\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\x00" * 500,
        b"\x00" * 10_000,
        b"GET / HTTP/9.9\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    ],
    ids=[
        *("a huge header", "a huge path", "many headers", "a bad header", "a negative length", "two lengths"),
        *("an absurd length", "bad chunks", "TLS", "zeros", "no such version", "HTTP/2"),
    ],
)
def test_bad_http(busy: Running, request_bytes: bytes) -> None:
    answer = exchange(busy, request_bytes)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 4"), answer[:200]
    assert b"Traceback" not in answer


def test_pipelined_garbage(busy: Running) -> None:
    good = b"GET /health/live HTTP/1.1\r\n" + HOST + b"\r\n"
    answer = exchange(busy, good + good + b"\xff\x00garbage\r\n\r\n" + good)
    assert answer.count(b"HTTP/1.1 200") == 2
    assert b"HTTP/1.1 400" in answer


def test_two_ways_to_say_how_long(busy: Running) -> None:
    """A proxy in front might read the other one: what follows must not be taken for a second request."""
    smuggled = b"GET /v1/models HTTP/1.1\r\n" + HOST + b"\r\n"
    head = b"POST /detokenize HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
    lengths = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n"
    answer = exchange(busy, head + lengths + smuggled, seconds=8)
    assert b'"object":"list"' not in answer, answer


def test_chunked_bodies_over_the_limit(serve: Serve) -> None:
    with serve(access=Access(max_body=50_000)) as running:
        head = b"POST /v1/completions HTTP/1.1\r\n" + HOST + b"Content-Type: application/json\r\n"
        chunk = b"2710\r\n" + b" " * 10_000 + b"\r\n"
        answer = exchange(running, head + b"Transfer-Encoding: chunked\r\n\r\n", chunk * 6)
        assert answer.startswith(b"HTTP/1.1 413"), answer
        assert running.get("/health/live").status_code == 200


def test_a_body_that_never_comes(serve: Serve) -> None:
    with serve(access=Access(body_seconds=0.5)) as running:
        head = (
            b"POST /v1/completions HTTP/1.1\r\n"
            + HOST
            + b"Content-Type: application/json\r\nContent-Length: 100\r\n\r\n"
        )
        begin = time.monotonic()
        answer = exchange(running, head, b'{"prompt"')
        assert answer.startswith(b"HTTP/1.1 408"), answer
        assert time.monotonic() - begin < 5
        # one byte at a time is no way around it
        with socket.create_connection(("127.0.0.1", running.port), timeout=5) as connection:
            connection.sendall(head)
            begin = time.monotonic()
            with contextlib.suppress(OSError):  # until it hangs up
                while time.monotonic() - begin < 9:
                    connection.sendall(b" ")
                    time.sleep(0.05)
        assert time.monotonic() - begin < 5
        assert running.post("/v1/completions", {"prompt": "Hello", "max_tokens": 30}).status_code == 200


@pytest.mark.parametrize("sent", [b"", b"GET /health HT", b"GET /health HTTP/1.1\r\n" + HOST + b"X-Slow: "])
def test_headers_that_never_come(serve: Serve, monkeypatch: pytest.MonkeyPatch, sent: bytes) -> None:
    monkeypatch.setattr(connections, "HEADER_SECONDS", 0.5)
    with serve() as running:
        begin = time.monotonic()
        assert exchange(running, sent) == b""
        assert 0.3 < time.monotonic() - begin < 5
        if sent:  # the second request on a connection as well
            begin = time.monotonic()
            assert exchange(running, b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n", sent).count(b"200 OK") == 1
            assert time.monotonic() - begin < 4
        else:  # an answer that takes longer than that is not cut off
            body = {"prompt": "Hello", "max_tokens": 300, "ignore_eos": True}
            assert running.post("/v1/completions", body).json()["usage"]["completion_tokens"] == 300
