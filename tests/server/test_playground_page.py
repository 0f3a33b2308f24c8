"""The playground in a real browser: colours, plot, switches, key, errors; by keyboard, and on a phone."""

from collections.abc import Iterator
from typing import Any

import pytest
from browser import Browser, open_browser
from running import Running, Serve, wait_for
from test_playground import ASKED, read, streamed

from outrider.server.engine_client import QueueLimits
from outrider.server.security import Access, access_for

KEY = "a-key-of-ours"
QUESTION = ASKED[0]["content"]
ENTER, ESCAPE, TAB, LEFT, SPACE, SHIFT = "\ue007", "\ue00c", "\ue004", "\ue012", "\ue00d", "\ue008"
LAST = ".turn:last-child .answer:last-child"
ENDLESS = "Write a short story about a dog."  # the embedded model tells it until it is stopped

TOKENS = """return [...document.querySelectorAll(arguments[0] + " .text .token")]
    .map((token) => [token.textContent, Number(token.dataset.position ?? 0)])"""


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, running: Running) -> Iterator[Browser]:
    open_page(browser, running)
    yield browser
    assert browser.complaints() == []


def open_page(browser: Browser, running: Running, width: int = 1280, height: int = 800) -> None:
    browser.open(running.url, width, height)
    browser.wait(lambda: browser.text("#model") == "default")


def ask(page: Browser, text: str = QUESTION) -> None:
    page.run("document.getElementById('prompt').focus()")
    page.keys(text, ENTER)


def answered(page: Browser) -> str:
    """The last answer, once it is complete."""
    page.wait(lambda: page.is_shown("#send") and page.is_shown(f"{LAST} .meta"))
    return "".join(text for text, _ in page.run(TOKENS, LAST))


def change(page: Browser, **values: Any) -> None:
    for name, value in values.items():
        page.run("document.getElementById(arguments[0]).value = arguments[1]", name.replace("_", "-"), value)


# speculation at work


def test_accepted_tokens_are_coloured_by_position(page: Browser, running: Running) -> None:
    change(page, max_tokens=60)
    ask(page)
    answered(page)
    text, tokens, pieces = read(streamed(running))
    places = [place for piece in pieces for place in piece["draft_positions"]]
    shown = page.run(TOKENS, LAST)
    assert "".join(text for text, _ in shown) == text
    assert shown == [[text, place] for text, place in zip(tokens, places, strict=True) if text]
    colours = {}
    for place in sorted(set(places) - {0}):
        colours[place] = page.style(f'{LAST} .token[data-position="{place}"]', "backgroundColor")
        legend = page.style(f'#legend .token[data-hue="{place}"]', "backgroundColor")
        assert colours[place] == legend
    assert len(set(colours.values())) == len(colours) >= 4
    assert page.style(f"{LAST} .token:not([data-position])", "backgroundColor") == "rgba(0, 0, 0, 0)"
    figures = streamed(running)[-1]["metrics"]["speculative_decoding"]
    length = figures["mean_acceptance_length"]
    page.wait(lambda: page.text("#accept-length") == f"{length:.2f}")
    assert page.text("#accepted") == f"{int(figures['draft_acceptance_rate'] * 100 + 0.5)} %"
    assert f"accept\xa0length\xa0{length:.2f}" in page.text(f"{LAST} .meta")
    rounds = [piece["draft"] for piece in pieces if piece["draft"]["token_ids"]]
    first = sum(draft["accepted"] >= 1 for draft in rounds) / len(rounds)
    assert page.text("#bars .bar .value") == f"{int(first * 100 + 0.5)} %"
    width = page.run("return parseFloat(document.querySelector('#bars .fill').style.width)")
    assert width == pytest.approx(first * 100, abs=0.1)


def test_the_plot_moves(page: Browser) -> None:
    drawn = "return [...document.querySelectorAll('.plot .line')].map((line) => line.getAttribute('d') ?? '')"
    assert page.run(drawn) == ["", ""]
    change(page, max_tokens=1900)
    ask(page, ENDLESS)
    early = page.wait(lambda: all(page.run(drawn)) and page.run(drawn))
    assert page.is_shown("#stop"), "it is still writing"
    page.wait(lambda: all(now != before and now for now, before in zip(page.run(drawn), early, strict=True)))
    assert page.is_shown("#stop")
    page.keys(ESCAPE)
    page.wait(lambda: page.is_shown("#send"))


def test_rejected_drafts_can_be_shown(page: Browser, running: Running) -> None:
    change(page, max_tokens=60)
    ask(page)
    text = answered(page)
    _, _, pieces = read(streamed(running))
    expected = [part for piece in pieces for part in drawn(piece)]
    assert ["rejected", " using"] in expected
    spans = "return [...document.querySelectorAll(arguments[0] + ' .text > span')]"
    assert page.run(spans + ".map((span) => [span.className, span.textContent])", LAST) == expected
    assert page.style(f"{LAST} .rejected", "display") == "none"
    page.run("document.getElementById('show-rejected').focus()")
    page.keys(SPACE)
    assert page.style(f"{LAST} .rejected", "display") == "inline"
    assert "line-through" in page.style(f"{LAST} .rejected", "textDecoration")
    assert page.style(f"{LAST} .rejected", "userSelect") == "none"
    assert answered(page) == text


def drawn(piece: dict[str, Any]) -> list[list[str]]:
    """Accepted tokens, what was rejected, and what the target said instead."""
    texts, draft = piece["token_texts"], piece["draft"]
    accepted = draft["accepted"]
    rejected = [text.replace("\n", "⏎") for text in draft["token_texts"][accepted:]]
    parts = [["token", text] for text in texts[:accepted]]
    if len(texts) > accepted:
        parts += [["rejected", text] for text in rejected]
    return [part for part in parts + [["token", text] for text in texts[accepted:]] if part[0] != "token" or part[1]]


def test_speculation_off_and_shorter_drafts(page: Browser) -> None:
    change(page, max_tokens=60)
    ask(page)
    text = answered(page)
    page.find(f"{LAST} .meta button:last-child").click()  # repeat without drafts
    assert answered(page) == text
    assert page.wait(lambda: page.text(f"{LAST} .verdict")).startswith("The same answer, token for token")
    assert not any(place for _, place in page.run(TOKENS, LAST))
    page.wait(lambda: page.text("#accept-length") == "1.00")
    page.run("document.getElementById('new-chat').click()")
    page.run("document.getElementById('speculate').focus()")
    page.keys(SPACE)
    ask(page)
    assert answered(page) == text
    assert not any(place for _, place in page.run(TOKENS, LAST))
    page.run("document.getElementById('speculate').click(); document.getElementById('new-chat').click()")
    page.run("document.getElementById('length').focus()")
    page.keys(LEFT, LEFT, LEFT)
    assert page.text("#length-shown") == "2 tokens"
    ask(page)
    assert answered(page) == text
    assert {place for _, place in page.run(TOKENS, LAST)} == {0, 1, 2}


def test_text_that_is_held_back_or_hostile(page: Browser) -> None:
    """The page's own module, with pieces as a server with parsers might send them."""
    page.chrome.set_script_timeout(10)
    shown = page.chrome.execute_async_script(
        """const done = arguments[0];
        import("/playground/answer.js").then(({ Answer }) => {
          const element = document.createElement("div");
          const answer = new Answer(element);
          const piece = (delta, token_texts, draft_positions, draft, finish_reason = null) =>
            answer.add({ delta, token_texts, draft_positions, draft, finish_reason });
          const none = { token_texts: [], accepted: 0 };
          piece({}, ["<thi", "nk>"], [0, 1], none);
          piece({ reasoning_content: "Hm" }, ["Hm", "", "</think>"], [2, 0, 0], none);
          piece({ content: "<img src=x onerror=alert(1)>" }, ["<img src=x", " onerror=alert(1)>"], [1, 0],
            { token_texts: ["<img src=x", "<b>no</b>"], accepted: 1 });
          answer.add({ delta: { content: " foreign" } });
          piece({ content: " end" }, [" end", ""], [1, 0], { token_texts: [" end", "x"], accepted: 1 }, "stop");
          done([element.innerHTML, answer.content, answer.reasoning]);
        });"""
    )
    html, content, reasoning = shown
    assert (content, reasoning) == ("<img src=x onerror=alert(1)> foreign end", "Hm")
    assert "<img" not in html
    assert "&lt;b&gt;no&lt;/b&gt;" in html
    assert html.index("reasoning") < html.index("&lt;img src=x")
    assert html.count('class="rejected"') == 2
    assert html.count("data-position") == 3


def test_a_paced_stream(browser: Browser, serve: Serve) -> None:
    """Frames of one size, filled up with comments: events come cut anywhere."""
    with serve(access=Access(pace=0.02)) as running:
        open_page(browser, running)
        change(browser, max_tokens=60)
        ask(browser)
        assert answered(browser) == read(streamed(running))[0]
        assert browser.complaints() == []


# everything around it


def test_stopping_ends_the_request(page: Browser, running: Running) -> None:
    change(page, max_tokens=1900)
    for how in ("escape", "button"):
        ask(page, ENDLESS)
        page.wait(lambda: len(page.run(TOKENS, LAST)) > 3)
        if how == "escape":
            page.keys(ESCAPE)
        else:
            page.find("#stop").click()
        text = answered(page)
        assert text
        assert "stopped" in page.text(f"{LAST} .meta")
        running.wait_until_idle()
        assert page.run("return document.querySelectorAll('.turn').length") == 1
        page.find("#new-chat").click()
        assert page.run("return document.querySelectorAll('.turn').length") == 0
        assert page.is_shown("#welcome")
        assert page.focused() == "prompt"


def test_a_key_is_asked_for(browser: Browser, serve: Serve) -> None:
    with serve(access=access_for("127.0.0.1", [KEY])) as running:
        browser.open(running.url)
        browser.wait(lambda: browser.is_shown("#key-dialog"))
        assert browser.focused() == "key"
        assert not browser.is_shown("#key-wrong")
        browser.keys("not-the-key", ENTER)
        browser.wait(lambda: browser.is_shown("#key-wrong"))
        browser.keys(ESCAPE)
        ask(browser)  # the question is kept until there is a key
        browser.wait(lambda: browser.is_shown("#key-dialog"))
        browser.keys(KEY, ENTER)
        assert answered(browser)
        assert browser.text("#model") == "default"
        browser.chrome.refresh()
        browser.wait(lambda: browser.text("#model") == "default")
        assert KEY not in browser.chrome.current_url
        assert KEY not in browser.run("return document.documentElement.outerHTML + document.cookie")
        assert browser.run("return localStorage.length") == 0
        assert browser.complaints() == []


def test_what_goes_wrong_is_said(browser: Browser, serve: Serve) -> None:
    with serve(QueueLimits(max_queue=0)) as running:
        open_page(browser, running)
        change(browser, max_tokens=20)
        others = running.openai()
        body: Any = {"model": "default", "messages": ASKED, "max_tokens": 1900, "extra_body": {"ignore_eos": True}}
        streams = [others.chat.completions.create(stream=True, **body) for _ in range(4)]
        wait_for(lambda: running.engine.num_sequences == 4)
        ask(browser)
        notice = browser.wait(lambda: browser.text(f"{LAST} .notice"))
        assert "busy" in notice
        assert "Try again in" in notice
        for stream in streams:
            stream.close()
        running.wait_until_idle()
        browser.find(f"{LAST} .notice button").click()
        assert answered(browser)
        change(browser, max_tokens=5000)
        ask(browser)
        assert browser.focused() == "max-tokens", "beyond what the field allows"
        change(browser, max_tokens=20, system="word " * 3000)
        ask(browser, "")
        assert "(400)" in browser.wait(lambda: browser.text(f"{LAST} .notice"))
    change(browser, system="")
    ask(browser, "Hello?")
    browser.wait(lambda: "cannot be reached" in browser.text(f"{LAST} .notice"))
    assert browser.complaints() == []


def overflows(page: Browser) -> bool:
    return page.run("return document.documentElement.scrollWidth > innerWidth")


@pytest.mark.parametrize("size", [(360, 640), (390, 844)])
def test_on_a_phone(browser: Browser, running: Running, size: tuple[int, int]) -> None:
    open_page(browser, running, *size)
    assert not overflows(browser)
    assert not browser.is_shown("#panel")
    change(browser, max_tokens=60)
    ask(browser, "How do plants grow?" + "x" * 100)
    answered(browser)
    browser.wait(lambda: browser.run("return document.querySelector('#strip-plot .line').getAttribute('d')"))
    assert not overflows(browser)
    for selector in ("#send", "#prompt", "#panel-button", "#legend", "#strip", f"{LAST} .meta"):
        box = browser.find(selector).rect
        assert box["x"] >= 0, selector
        assert box["x"] + box["width"] <= size[0], selector
        assert box["y"] + box["height"] <= size[1], selector
    browser.find("#panel-button").click()
    assert browser.is_shown("#panel")
    assert browser.is_shown("#speculate")
    assert not overflows(browser)
    browser.find("#show-rejected").click()
    browser.keys(ESCAPE)
    assert not browser.is_shown("#panel")
    assert browser.style(f"{LAST} .rejected", "display") == "inline"
    assert not overflows(browser)
    assert browser.complaints() == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_contrast(page: Browser, scheme: str) -> None:
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    page.chrome.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    assert page.run("return matchMedia('(prefers-color-scheme: dark)').matches") == (scheme == "dark")
    page.run("document.getElementById('show-rejected').click()")
    ask(page)
    answered(page)
    places = [f'#legend .token[data-hue="{place}"]' for place in range(1, 6)]
    plain = [
        "body",
        "#model",
        "#send",
        "#new-chat",
        "#key-wrong",
        "#legend",
        "#length-top",
        ".bar .place",
        ".field span",
    ]
    for selector in [*plain, *places, f"{LAST} .rejected", f"{LAST} .meta .muted", f"{LAST} .meta button"]:
        assert page.contrast(selector) >= 4.5, selector


def test_by_keyboard_alone(page: Browser) -> None:
    assert page.focused() == "prompt"
    page.keys("two")
    page.chrome.switch_to.active_element.send_keys(SHIFT, ENTER)
    page.keys("lines")
    assert page.run("return document.getElementById('prompt').value") == "two\nlines"
    assert not page.is_shown(LAST)
    reached = []
    for _ in range(30):
        page.keys(TAB)
        name = page.focused()
        if name in reached or name.startswith("\n"):
            break
        reached.append(name)
        assert page.run("return getComputedStyle(document.activeElement).outlineStyle") == "solid", name
    controls = ["send", "speculate", "length", "show-rejected", "system", "temperature", "top-p", "max-tokens", "seed"]
    assert [name for name in reached if name in controls] == controls
    unnamed = """return [...document.querySelectorAll("button, input, textarea")].filter(
        (field) => !field.textContent.trim() && !(field.labels ?? []).length).map((field) => field.id)"""
    assert page.run(unnamed) == []
    ask(page, "")
    page.wait(lambda: page.is_shown(f"{LAST} .meta"))
    assert page.text(".asked .text") == "two\nlines"
    assert page.focused() == "prompt"
    assert page.run("return document.getElementById('log').ariaBusy") == "false"
    assert page.text("#status").startswith("Answered")
