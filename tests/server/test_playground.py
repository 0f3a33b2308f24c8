"""The playground's files, how they are served, and what a stream tells the page about every token."""

import json
import re
import tomllib
from importlib.resources import files
from pathlib import Path, PurePath
from typing import Any

import pytest
from running import Running, Serve

import outrider
from outrider.server.playground import ASSETS
from outrider.server.security import access_for

KEY = "a-key-of-ours"
FOLDER = files("outrider.server.playground")
ASKED = [{"role": "user", "content": "How do plants grow?"}]
TRACED = {"stream": True, "return_token_ids": True, "return_drafts": True, "temperature": 0, "max_tokens": 60}


def text_of(name: str) -> str:
    return FOLDER.joinpath(name).read_text(encoding="utf-8")


# the files


@pytest.mark.parametrize("path", ASSETS)
def test_headers(running: Running, path: str) -> None:
    response = running.get(path)
    assert response.status_code == 200
    assert response.text == text_of(ASSETS[path])
    assert response.headers["content-type"].split(";")[0] in (
        "text/html",
        "text/css",
        "text/javascript",
        "image/svg+xml",
    )
    assert response.headers["x-content-type-options"] == "nosniff"
    policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["base-uri"] == policy["frame-ancestors"] == "'none'"
    assert {policy[name] for name in ("script-src", "style-src", "connect-src", "img-src")} == {"'self'"}
    assert "unsafe" not in response.headers["content-security-policy"]
    assert running.post(path, {}).status_code == 405


def test_every_file_is_served_and_packaged() -> None:
    names = {item.name for item in FOLDER.iterdir() if item.is_file()} - {"__init__.py"}
    assert set(ASSETS.values()) == names
    settings = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    patterns = settings["tool"]["setuptools"]["package-data"]["outrider"]
    for name in names:
        place = PurePath("server/playground") / name
        assert any(place.match(pattern) for pattern in patterns), place
    assert Path(outrider.__file__).parent / "server" / "playground" == Path(str(FOLDER))


def test_nothing_comes_from_elsewhere() -> None:
    """And nothing is in the page that the policy would forbid, or that could turn text into markup."""
    for name in ASSETS.values():
        text = text_of(name).replace('"http://www.w3.org/2000/svg"', "")
        assert not re.search(r"https?://|[\"'(]//|@import|url\(", text), name
        markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\b|new Function|srcdoc"
        assert not re.search(markup, text), name
    page = text_of("index.html")
    assert not re.search(r"\son\w+=|<style|\sstyle=|javascript:", page)
    assert not re.findall(r"<script(?![^>]* src=)", page)
    linked = re.findall(r'(?:src|href)="([^"#]+)"', page)
    imported = [found for name in ASSETS.values() for found in re.findall(r'from "\./([^"]+)"', text_of(name))]
    assert {f"/{path}" for path in linked} | {f"/playground/{name}" for name in imported} | {"/"} == set(ASSETS)


def test_only_the_page_itself_is_open(serve: Serve) -> None:
    with serve(access=access_for("127.0.0.1", [KEY])) as running:
        for path in ASSETS:
            response = running.get(path)
            assert response.status_code == 200
            assert KEY not in response.text
            assert running.get(path, headers={"Host": "evil.example"}).status_code == 403
            assert running.get(path, headers={"Origin": "https://evil.example"}).status_code == 403
        for path in ("/v1/models", "/metrics", "/playground", "/playground/", "/playground/nothing", "/index.html"):
            assert running.get(path).status_code == 401, path
        for path in ("/playground/../metrics", "/playground/%2e%2e/metrics", "//", "/?key=" + KEY):
            assert running.get(path).status_code == (200 if path.startswith("/?") else 401), path
        assert running.post("/v1/chat/completions", {"messages": ASKED}).status_code == 401


# what the page is told


def streamed(running: Running, path: str = "/v1/chat/completions", **options: Any) -> list[dict[str, Any]]:
    asked = {"messages": ASKED} if "chat" in path else {"prompt": "Once upon a time"}
    response = running.post(path, asked | TRACED | options)
    assert response.status_code == 200, response.text
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def read(chunks: list[dict[str, Any]], index: int = 0) -> tuple[str, list[str], list[dict[str, Any]]]:
    """Of one choice: its text, the texts of its tokens, and what came with them."""
    choices = [choice for chunk in chunks for choice in chunk["choices"] if choice["index"] == index]
    text = "".join(choice["text"] if "text" in choice else choice["delta"].get("content", "") for choice in choices)
    pieces = [choice for choice in choices if "token_texts" in choice]
    for piece in pieces:
        assert len(piece["token_texts"]) == len(piece["token_ids"]) == len(piece["draft_positions"]) > 0
    return text, [token for piece in pieces for token in piece["token_texts"]], pieces


CUTS: list[dict[str, Any]] = [
    {},
    {"stop": ["process called", "xyz"]},
    {"stop": ["food"], "include_stop_str_in_output": True},
    {"max_tokens": 7},
    {"temperature": 1, "seed": 4},
    {"speculative": {"num_speculative_tokens": 2}},
    {"guided_choice": ["naïve 日本語 😀 and 한국어", "naïve 日本語 😁"]},
]


@pytest.mark.parametrize("options", CUTS)
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_tokens_joined_are_the_text(running: Running, path: str, options: dict[str, Any]) -> None:
    chunks = streamed(running, path, **options)
    text, tokens, pieces = read(chunks)
    assert text
    assert "".join(tokens) == text
    if "guided_choice" in options:
        assert text in options["guided_choice"]
        assert "" in tokens, "parts of characters are held back"
    whole = {"stream": False, "return_drafts": False}
    asked = {"messages": ASKED} if "chat" in path else {"prompt": "Once upon a time"}
    choice = running.post(path, asked | TRACED | options | whole).json()["choices"][0]
    assert choice["token_texts"] == tokens
    assert choice["draft_positions"] == [place for piece in pieces for place in piece["draft_positions"]]
    assert "draft" not in choice


def test_drafts_are_told_round_by_round(running: Running) -> None:
    chunks = streamed(running)
    _, _, pieces = read(chunks)
    drafts = [piece["draft"] for piece in pieces]
    rejected = 0
    for piece, draft in zip(pieces, drafts, strict=True):
        accepted = draft["accepted"]
        assert len(draft["token_texts"]) == len(draft["token_ids"]) <= 5
        assert piece["token_ids"][:accepted] == draft["token_ids"][:accepted]
        assert piece["draft_positions"] == [*range(1, accepted + 1), *[0] * (len(piece["token_ids"]) - accepted)]
        if accepted < min(len(draft["token_ids"]), len(piece["token_ids"])):
            assert piece["token_ids"][accepted] != draft["token_ids"][accepted]
            rejected += 1
    assert rejected
    assert not drafts[0]["token_ids"], "the prompt's own step has no draft"
    figures = chunks[-1]["metrics"]["speculative_decoding"]
    assert sum(len(draft["token_ids"]) for draft in drafts) == figures["num_draft_tokens"]
    assert sum(draft["accepted"] for draft in drafts) == figures["num_accepted_draft_tokens"]
    assert sum(bool(draft["token_ids"]) for draft in drafts) == figures["num_spec_steps"]


def test_several_answers_and_no_speculation(running: Running) -> None:
    chunks = streamed(running, n=2, temperature=1, seed=3)
    for index in range(2):
        text, tokens, pieces = read(chunks, index)
        assert text == "".join(tokens)
        assert any(piece["draft"]["accepted"] for piece in pieces)
    _, _, pieces = read(streamed(running, speculative={"enabled": False}))
    assert not any(piece["draft"]["token_ids"] for piece in pieces)
    assert not any(place for piece in pieces for place in piece["draft_positions"])


def test_drafts_are_for_those_who_ask(running: Running) -> None:
    _, _, pieces = read(streamed(running, return_drafts=False))
    assert not any("draft" in piece for piece in pieces)
    assert not any("token_texts" in choice for chunk in streamed(running, **WITHOUT) for choice in chunk["choices"])
    for options in ({"stream": False}, {"return_token_ids": False}):
        response = running.post("/v1/chat/completions", {"messages": ASKED} | TRACED | options)
        assert response.status_code == 400
        assert "return_drafts" in response.json()["error"]["message"]


WITHOUT = {"return_drafts": False, "return_token_ids": False}


def test_the_longest_draft_is_known(running: Running) -> None:
    assert running.get("/v1/models").json()["data"][0]["num_speculative_tokens"] == 5
