"""Who may talk to the server: one test for each way in."""

import contextlib
import http.client

import httpx
import pytest
from running import Running, Serve

from outrider.server.app import Application
from outrider.server.security import OPEN_PATHS, Access, access_for

KEY = "a-key-of-ours"
BODY = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}


def test_every_route_but_health_needs_the_key(serve: Serve) -> None:
    with serve(access=access_for("127.0.0.1", [KEY, "another-key"])) as running:
        paths = [route.path for route in _routes(running.application)]
        assert {"/metrics", "/v1/models", "/openapi.json", "/tokenize"} <= set(paths)
        for path in [*paths, "/nowhere", "/health/../metrics", "/health/", "//health"]:
            status = 200 if path in OPEN_PATHS else 401
            assert running.get(path).status_code == status, path
        for header in ("", "Bearer", f"Basic {KEY}", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", KEY):
            response = running.post("/v1/chat/completions", BODY, headers={"Authorization": header})
            assert response.status_code == 401
            assert response.json()["error"]["code"] == "invalid_api_key"
        assert running.openai(KEY).models.list().data[0].id == "default"
        assert running.openai("another-key").models.list().data[0].id == "default"
        running.openai(KEY).chat.completions.create(model="default", **BODY)  # type: ignore[call-overload]


def _routes(application: Application) -> list:
    guard = application.asgi._app  # type: ignore[attr-defined]
    return guard._app.routes  # type: ignore[attr-defined]


def test_other_machines_need_a_key() -> None:
    for host in ("0.0.0.0", "::", "192.168.1.5", "example.org"):
        with pytest.raises(ValueError, match="--api-key"):
            access_for(host)
        assert access_for(host, [KEY]).hosts == frozenset()
    assert access_for("127.0.0.1").hosts
    with pytest.raises(ValueError, match="at least 8"):
        access_for("127.0.0.1", ["short"])


@pytest.mark.parametrize(
    "host", ["evil.example", "127.0.0.1.evil.example", "127.0.0.1:99999999", "[::1", "localhost@e"]
)
def test_names_of_others(running: Running, host: str) -> None:
    assert running.get("/v1/models", headers={"Host": host}).status_code in (400, 403)
    assert running.get("/v1/models", headers={"Host": f"localhost:{running.port}"}).status_code == 200


def test_two_hosts(running: Running) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", running.port)
    connection.putrequest("GET", "/v1/models", skip_host=True)
    connection.putheader("Host", "127.0.0.1")
    connection.putheader("Host", "evil.example")
    connection.endheaders()
    assert connection.getresponse().status == 400
    connection.close()


def test_pages_of_others(serve: Serve, running: Running) -> None:
    def asked(server: Running, origin: str) -> httpx.Response:
        return server.post("/v1/chat/completions", BODY, headers={"Origin": origin})

    assert asked(running, "https://evil.example").status_code == 403
    assert asked(running, "null").status_code == 403
    assert asked(running, running.url).status_code == 200
    with serve(access=access_for("127.0.0.1", [], [], ["https://page.example"])) as other:
        answer = asked(other, "https://page.example")
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, "https://page.example")
        assert "access-control-allow-origin" not in asked(other, "https://evil.example").headers


def test_a_page_cannot_send_json_as_plain_text(running: Running) -> None:
    """Browsers send that without asking first."""
    content = b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": 2}'
    response = running.post("/v1/chat/completions", content=content, headers={"Content-Type": "text/plain"})
    assert response.status_code == 400


def test_sizes(serve: Serve) -> None:
    with serve(access=Access(max_body=10_000)) as running:
        body = BODY | {"user": "x" * 20_000}
        assert running.post("/v1/chat/completions", body).status_code == 413
        parts = (b" " * 1000 for _ in range(20))  # chunked: no Content-Length
        headers = {"Content-Type": "application/json"}
        assert running.post("/v1/chat/completions", content=parts, headers=headers).status_code == 413
        assert running.post("/v1/chat/completions", BODY).status_code == 200
        with contextlib.suppress(httpx.TransportError):  # it may hang up before all of it was sent
            response = running.get("/v1/models", headers={"X-Long": "x" * 300_000})
            assert 400 <= response.status_code < 500
        assert running.post("/v1/chat/completions", BODY).status_code == 200
