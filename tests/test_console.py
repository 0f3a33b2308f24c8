"""What the command shows: colours by draft position, bars, progress; and nothing of the kind where nobody sees it."""

import io
from typing import Any

import pytest
from rich.console import Console

from outrider import Speculation
from outrider.console import (
    DRAFT_COLOURS,
    StreamedText,
    acceptance_bars,
    checkpoint_name,
    loading,
    open_consoles,
    show_card,
    show_error,
    show_speculation,
)
from outrider.measure import Run
from outrider.outputs import CompletionOutput
from outrider.startup import CHECKING

ESCAPE = "\x1b"


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")


def completion(text: str, ends: list[int], positions: list[int]) -> CompletionOutput:
    return CompletionOutput(
        index=0,
        text=text,
        token_ids=list(range(len(ends))),
        finish_reason=None,
        stop_reason=None,
        logprobs=None,
        speculation=Speculation(2, 6, 3, (2, 2, 2), (2, 1, 0)),
        seed=0,
        draft_positions=positions,
        text_ends=ends,
    )


RUN = Run(completion("ab", [1, 2], [0, 1]), seconds=0.5, ttft=0.1)


def terminal(**options: Any) -> tuple[Console, io.StringIO]:
    written = io.StringIO()
    return Console(file=written, force_terminal=True, **options), written


def test_drafted_text_is_coloured_by_position() -> None:
    console, written = terminal(color_system="standard")
    stream = StreamedText(console)
    stream.show(completion("ab", [1, 2], [0, 1]))
    stream.show(completion("abcd\te", [1, 2, 3, 6], [0, 1, 9, 0]))  # a draft deeper than there are colours
    stream.finish()
    assert written.getvalue() == f"a{ESCAPE}[32mb{ESCAPE}[0m{ESCAPE}[31mc{ESCAPE}[0md\te\n"


def test_a_token_that_settles_no_text_waits_for_the_next() -> None:
    console, written = terminal(color_system="standard")
    stream = StreamedText(console)
    stream.show(completion("a", [1, 1], [0, 1]))  # part of a character
    stream.show(completion("aé", [1, 1, 2], [0, 1, 2]))
    assert written.getvalue() == f"a{ESCAPE}[36mé{ESCAPE}[0m"


def test_without_colours_text_is_as_it_is() -> None:
    console, written = terminal(color_system=None)
    StreamedText(console).show(completion("a\tb  " * 40, [1, 200], [0, 1]))
    assert written.getvalue() == "a\tb  " * 40


def test_control_characters_do_not_reach_a_terminal() -> None:
    console, written = terminal(color_system=None)
    text = f"a{ESCAPE}]0;title\x07\x9b"
    StreamedText(console).show(completion(text, [len(text)], [0]))
    assert written.getvalue() == "a␛]0;title␇\N{REPLACEMENT CHARACTER}"
    piped = io.StringIO()
    StreamedText(Console(file=piped)).show(completion(text, [len(text)], [0]))
    assert piped.getvalue() == text


def test_errors_break_between_words_on_a_terminal_and_are_one_line_elsewhere() -> None:
    console, written = terminal(color_system=None, width=20)
    show_error(console, ValueError("neither a method\nnor a checkpoint"))
    assert [line.rstrip() for line in written.getvalue().splitlines()] == [
        "error: neither a",
        "method nor a",
        "checkpoint",
    ]
    piped = io.StringIO()
    show_error(Console(file=piped, width=20), ValueError("neither a method\nnor a checkpoint"))
    assert piped.getvalue() == "error: neither a method nor a checkpoint\n"


def test_no_color_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert open_consoles().out.color_system is not None
    assert open_consoles(no_color=True).out.color_system is None
    monkeypatch.setenv("NO_COLOR", "1")
    assert open_consoles().out.color_system is None


def test_the_card_has_a_bar_for_each_position() -> None:
    console, written = terminal(color_system=None, width=20)
    show_card(console, RUN, "eagle3")
    lines = written.getvalue().splitlines()
    assert lines[0] == "tokens      2 tokens in 0.50 s, the first after 0.10 s"
    assert lines[1] == "speed       4.0 tokens/s"
    assert lines[-1].split() == ["acceptance", "1█100%", "2▅50%", "3▁0%"]
    bars = acceptance_bars(RUN.completion.speculation)
    assert [str(span.style) for span in bars.spans] == list(DRAFT_COLOURS[:3])
    assert acceptance_bars(RUN.completion.speculation, plain=True).plain == "1:100% 2:50% 3:0% "


def test_the_card_says_why_there_are_no_drafts() -> None:
    console, written = terminal(color_system=None)
    show_speculation(console, Speculation(rounds=7), "eagle3")
    assert "acceptance  nothing was drafted: drafts did not pay" in written.getvalue()
    console, written = terminal(color_system=None)
    show_speculation(console, Speculation(), "eagle3")  # an answer of one token: there was no round
    assert "acceptance" not in written.getvalue()


def test_the_card_of_plain_decoding_is_silent_about_drafts() -> None:
    console, written = terminal(color_system=None)
    show_card(console, RUN, None)
    assert "rounds" not in written.getvalue()


def test_progress_is_for_terminals() -> None:
    with loading(Console(file=io.StringIO())) as progress:
        assert progress is None
    console, written = terminal(color_system=None, width=80)
    with loading(console) as progress:
        assert progress is not None
        for done in range(4):
            progress("/models/rider", done, 3)
        progress(CHECKING, 1, 2)
    assert "loading rider" in written.getvalue()
    assert "loading checking" not in written.getvalue()
    assert "checking the drafter" in written.getvalue()


def test_checkpoint_name() -> None:
    assert checkpoint_name("/models/rider/") == "rider"
    assert checkpoint_name("/cache/models--org--rider/snapshots/0123abc") == "org/rider"
