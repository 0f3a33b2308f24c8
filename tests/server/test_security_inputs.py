"""One test for each class of hole that servers of models have had: what is foreign is data, bounded, and never run."""

import ast
import json
import shutil
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from running import Running, Serve

import outrider
from outrider import LLM
from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.server import app as app_module
from outrider.server import security
from outrider.server.parsers import ParserNames, ToolOptions, answer_parser, tool_parsers
from outrider.server.security import access_for

SOURCE = Path(outrider.__file__).parent
CHAT = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 2}
PATH = "/v1/chat/completions"


# unpickling, eval, code of a model's


BANNED_MODULES = {"pickle", "_pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib", "runpy", "code"}
BANNED_CALLS = {"eval", "exec", "compile", "__import__", "recv_pyobj", "send_pyobj", "spec_from_file_location"}
BANNED_ATTRIBUTES = {
    ("torch", "load"),
    ("torch", "save"),
    ("numpy", "load"),
    ("np", "load"),
    ("os", "system"),
    ("yaml", "load"),
}
CLIENTS = {"requests", "httpx", "aiohttp", "urllib3", "urllib.request", "http.client", "ftplib", "socket"}


def violations(source: str) -> list[str]:
    found = []
    for node in ast.walk(ast.parse(source)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        found += [name for name in names if name.split(".")[0] in BANNED_MODULES]
        if isinstance(node, ast.Call):
            function = node.func
            if isinstance(function, ast.Name) and function.id in BANNED_CALLS:
                found.append(function.id)
            if isinstance(function, ast.Attribute):
                owner = function.value.id if isinstance(function.value, ast.Name) else ""
                if (owner, function.attr) in BANNED_ATTRIBUTES or function.attr in BANNED_CALLS - {"compile", "eval"}:
                    found.append(f"{owner}.{function.attr}")
            for keyword in node.keywords:
                is_true = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
                if keyword.arg in ("trust_remote_code", "allow_pickle", "shell") and is_true:
                    found.append(keyword.arg)
    return found


def test_nothing_unpickles_or_evaluates() -> None:
    found = {str(file): violations(file.read_text()) for file in SOURCE.rglob("*.py")}
    assert len(found) > 100
    assert {name: what for name, what in found.items() if what} == {}


@pytest.mark.parametrize(
    "line",
    [
        *("import pickle", "from dill import loads", "import torch\ntorch.load('x')", "eval('1')", "exec('1')"),
        *("import marshal", "import shelve", "import cloudpickle as c", "f(trust_remote_code=True)", "s.recv_pyobj()"),
    ],
)
def test_the_lint_can_fail(line: str) -> None:
    assert violations(line)


def test_the_server_has_no_http_client() -> None:
    """So that no URL of a client's can be fetched. The router has one, for the addresses that it was given."""
    for file in (SOURCE / "server").rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            # what the server listens on, its link to the engine, and options of connections that others opened
            own = ("address.py", "serving.py", "link.py", "engine_host.py", "connections.py")
            needs = (
                {"socket"} if file.name in own else {"httpx"} if file.parts[-2:] == ("router", "fleet.py") else set()
            )
            assert not CLIENTS & set(names) - needs, file


def test_code_in_a_models_directory_is_not_run(tmp_path: Path, llm: LLM) -> None:
    model = tmp_path / "model"
    shutil.copytree(llm.config.model, model)
    marker = tmp_path / "it-ran"
    for name in ("modeling_evil.py", "configuration_evil.py", "tokenization_evil.py", "__init__.py"):
        (model / name).write_text(f"open({str(marker)!r}, 'w')\n")
    for name in ("config.json", "tokenizer_config.json"):
        content = json.loads((model / name).read_text()) if (model / name).exists() else {}
        names = {"AutoConfig": "configuration_evil.C", "AutoModelForCausalLM": "modeling_evil.M"}
        (model / name).write_text(json.dumps(content | {"auto_map": names, "trust_remote_code": True}))
    with LLM(model, None, max_num_seqs=1, max_model_len=64) as loaded:
        loaded.generate("Hello")
    assert not marker.exists()


# what may be sent


@pytest.mark.parametrize(
    "field", ["chat_template", "prompt_embeds", "prompt_logprobs", "logits_processors", "tokenize"]
)
def test_what_clients_may_not_send(running: Running, field: str) -> None:
    response = running.post(PATH, CHAT | {field: "x"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == field


# parsers of answers: linear in what the model writes


@pytest.mark.parametrize("name", sorted(tool_parsers))
def test_parsers_are_linear(name: str) -> None:
    def seconds(size: int) -> float:
        text = '<tool_call>{"name": "walk", "arguments": {"a": "' + "<[{\\\\" * size
        best = 1e9
        for _ in range(3):
            parser = answer_parser(ParserNames(name, None), "", ToolOptions(frozenset({"walk"})))
            begin = time.thread_time()  # others may be at work here
            for place in range(0, len(text), 7):
                parser.feed(text[place : place + 7])
            parser.finish()
            best = min(best, time.thread_time() - begin)
        return best

    assert seconds(16_000) < 40 * max(seconds(1000), 0.002)  # sixteen times as much text; quadratic would be 256


# grammars


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_regex": "((((a{1,30}){1,30}){1,30}){1,30}){1,30}"},
        {"guided_regex": "(x+x+)+y" * 8},
        {"guided_json": {"type": "array", "items": {"type": "array", "maxItems": 999}, "maxItems": 999}},
        {"guided_json": {"properties": {str(n): {"type": "string", "maxLength": 99} for n in range(500)}}},
        {"guided_grammar": 'root ::= "a" root | root "b" | root root root'},
        {
            "guided_grammar": "root ::= "
            + " ".join(f"r{n}" for n in range(900))
            + "".join(f'\nr{n} ::= "a"?' for n in range(900))
        },
    ],
    ids=["nested repeats", "overlapping repeats", "arrays of arrays", "many properties", "ambiguity", "many rules"],
)
def test_grammars_take_their_time_only(running: Running, fields: dict[str, Any]) -> None:
    pytest.importorskip("xgrammar")
    begin = time.monotonic()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(running.post, PATH, CHAT | fields)
        assert running.post("/v1/completions", {"prompt": "Hello", "max_tokens": 2}).status_code == 200
        assert asked.result().status_code in (200, 400)
    assert time.monotonic() - begin < 30


# addresses


@pytest.mark.parametrize(
    "url",
    [
        *("http://127.0.0.1:1/x.png", "https://example.org/x.png", "file:///etc/passwd", "/etc/passwd", "ftp://x/y"),
        *(
            "//example.org/x",
            "DATA:text/plain,x",
            " data:image/png;base64,AA",
            "data:,http://example.org/",
            "x\ndata:,",
        ),
    ],
)
def test_nothing_is_fetched(running: Running, url: str) -> None:
    part = {"type": "image_url", "image_url": {"url": url}}
    response = running.post(PATH, {"messages": [{"role": "user", "content": [part]}], "max_tokens": 2})
    assert response.status_code == 400
    assert "passwd" not in response.text


# keys


def test_every_key_is_compared_in_constant_time(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    """All keys, whichever matches, and digests of one length, whatever was sent."""
    compared: list[tuple[bytes, bytes]] = []
    genuine = security.hmac.compare_digest

    def compare(left: bytes, right: bytes) -> bool:
        compared.append((left, right))
        return genuine(left, right)

    monkeypatch.setattr(security.hmac, "compare_digest", compare)
    keys = ["the-first-key", "the-second-key", "the-third-key"]
    with serve(access=access_for("127.0.0.1", keys)) as running:
        for sent, status in ((keys[0], 200), (keys[2], 200), ("x", 401), ("x" * 9000, 401)):
            compared.clear()
            assert running.get("/v1/models", headers={"Authorization": f"Bearer {sent}"}).status_code == status
            assert len(compared) == 3
            assert {len(side) for pair in compared for side in pair} == {32}


@pytest.mark.parametrize(
    "path",
    [
        *("/health/../v1/models", "/health/..%2fv1/models", "/%68ealth/../metrics", "//health", "/health;x=/metrics"),
        *("/HEALTH", "/health/live/../../metrics", "/metrics?/health", "/metrics#/health", "/health\\..\\metrics"),
    ],
)
def test_paths_that_look_like_health(serve: Serve, path: str) -> None:
    import http.client

    with serve(access=access_for("127.0.0.1", ["a-key-of-ours"])) as running:
        for target in (path, f"http://127.0.0.1{path}"):
            connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=10)
            connection.putrequest("GET", target, skip_host=True)
            connection.putheader("Host", "127.0.0.1")
            connection.endheaders()
            assert connection.getresponse().status in (400, 401), target
            connection.close()


def test_tenants_do_not_share_a_cache(serve: Serve) -> None:
    """Else the time to the first token would tell what another has asked."""
    body = {
        "prompt": f"{time.time()} " + "A long secret that someone else has asked about before. " * 8,
        "max_tokens": 2,
    }
    with serve(access=access_for("127.0.0.1", ["the-first-key", "the-second-key"])) as running:

        def cached(key: str, **fields: str) -> int:
            answer = running.post("/v1/completions", body | fields, headers={"Authorization": f"Bearer {key}"})
            return answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        assert cached("the-first-key") == 0
        assert cached("the-first-key") > 0
        assert cached("the-second-key") == 0
        assert cached("the-first-key", cache_salt="another") == 0


# errors


def test_an_internal_error_is_a_reference_only(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    async def broken(*arguments: Any) -> Any:
        raise RuntimeError("the secret in /home/someone/model is 0x7f00")

    monkeypatch.setattr(app_module, "start_chat", broken)
    with serve() as running:
        for body in (CHAT, CHAT | {"stream": True}):
            response = running.post(PATH, body)
            assert response.status_code == 500
            assert "secret" not in response.text
            assert "Runtime" not in response.text
            assert "fault-" in response.json()["error"]["message"]
            assert set(response.json()) == {"error"}


def test_penalties_with_drafts(running: Running) -> None:
    """A penalty in a request with drafts has killed a whole engine elsewhere."""
    body = {"prompt": "Hello", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    for name, value in (
        ("presence_penalty", 2),
        ("frequency_penalty", -2),
        ("repetition_penalty", 1.5),
        ("min_p", 0.3),
    ):
        drafted, plain = (
            running.post("/v1/completions", body | {name: value} | more).json()["choices"][0]["text"]
            for more in ({}, {"speculative": {"enabled": False}})
        )
        assert drafted == plain


# files that lie about their sizes


def safetensors(header: dict[str, Any], data: bytes = b"\0" * 64, length: int | None = None) -> bytes:
    content = json.dumps(header).encode()
    return struct.pack("<Q", len(content) if length is None else length) + content + data


def tensor(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}}


@pytest.mark.parametrize(
    "content",
    [
        safetensors(tensor([4, 4], 0, 2**40)),
        safetensors(tensor([2**31, 2**31], 0, 64)),
        safetensors(tensor([4, 4], 0, 32)),
        safetensors(tensor([4, 4], 32, 96)),
        safetensors(tensor([16], 0, 64), length=2**62),
        safetensors(tensor([16], 0, 64), length=2**64 - 1),
        safetensors(tensor([16], 0, 64), data=b""),
        safetensors(tensor([16], 64, 0)),
    ],
    ids=["past the end", "overflow", "too short", "shifted", "header", "huge header", "no data", "backwards"],
)
def test_safetensors_that_lie(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ValueError, match="truncated or damaged"):
        open_checkpoint(tmp_path)


def gguf(num_tensors: int, num_values: int, info: bytes = b"") -> bytes:
    return b"GGUF" + struct.pack("<IQQ", 3, num_tensors, num_values) + info


def gguf_tensor(shape: list[int], offset: int) -> bytes:
    name = b"x"
    return (
        struct.pack("<Q", len(name))
        + name
        + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, 0, offset)
        + b"\0" * 64
    )


@pytest.mark.parametrize(
    "content",
    [
        gguf(1, 0, gguf_tensor([2**62, 2**62], 0)),
        gguf(1, 0, gguf_tensor([16], 2**63)),
        gguf(1, 0, gguf_tensor([1024], 0)),
        gguf(2**60, 0),
        gguf(0, 2**60),
        gguf(0, 1, struct.pack("<Q", 2**62)),
        gguf(0, 1, struct.pack("<Q", 1) + b"x" + struct.pack("<IIQ", 9, 0, 2**62)),
    ],
    ids=["overflow", "offset", "too short", "tensors", "values", "a long key", "a long list"],
)
def test_gguf_that_lies(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.gguf").write_bytes(content)
    begin = time.monotonic()
    with pytest.raises(ValueError, match="truncated or damaged"):
        open_checkpoint(tmp_path / "model.gguf")
    assert time.monotonic() - begin < 2
