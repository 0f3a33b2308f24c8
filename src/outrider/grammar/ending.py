"""JSON answers that end in time. A model that goes on and on in a string would be cut by max_tokens, and what is cut
is no JSON. Here the shortest way to the end is found from any place, to be taken while there is room for it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from outrider.grammar.forced import certain_text
from outrider.grammar.vocabulary import Spelling, Vocabulary

if TYPE_CHECKING:
    import xgrammar

MAX_TRIES = 4096  # pieces of text that are put to a matcher in one search: a few milliseconds of everybody's time
CERTAIN_BYTES = 64  # of what must come next, that are looked for at a time
BYTES_PER_TOKEN = 4  # of a closing text, about; one that takes more than there is room for is of no use
SPARE = 4  # tokens left over when the closing begins: one token may make the way to the end a little longer

_OUTSIDE, _STRING, _ESCAPE = range(3)
_CLOSING_OUTSIDE = (b"}", b"]", b":", b",", b'"', *(b"%d" % digit for digit in range(10)), b"null", b"true", b"false")
_CLOSING_OUTSIDE += (b"[", b"{", b"-", b".", b"e", b" ")
_PRINTABLE = [bytes([code]) for code in (*range(0x30, 0x7F), *range(0x20, 0x30))]
# a string may have to be of some length or pattern; the last three go on with a character that is half written
_CLOSING_STRING = (b'"', *_PRINTABLE, b"\x80", b"\x90", b"\xa0")


@dataclass(frozen=True)
class Closing:
    """A short text that completes an answer."""

    text: bytes
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Countdown:
    """How many tokens an answer has left, and whether it is being closed. A value: it is a function of the tokens so
    far, so that drafts which are tried and taken back leave no trace."""

    left: int  # tokens that may still come, the one that ends the text included
    look_at: int  # the way to the end is looked for when no more than these are left
    lexer: int = _OUTSIDE  # of the JSON text so far: outside of strings, in one, after a backslash in one
    way: tuple[int, ...] | None = None  # tokens that close the answer; (): nothing but its end may follow
    known: Closing | None = None  # what would have closed it when that was last looked for

    @classmethod
    def of(cls, num_tokens: int) -> Countdown:
        return cls(num_tokens, num_tokens)

    @property
    def is_closing(self) -> bool:
        return self.way is not None


class JsonEnding:
    """Closes answers in one vocabulary."""

    def __init__(self, vocabulary: Vocabulary, spelling: Spelling) -> None:
        self._vocabulary, self._spelling = vocabulary, spelling

    def passed(self, countdown: Countdown) -> Countdown:
        """After a token that is no part of the JSON text, as of the reasoning before it."""
        return replace(countdown, left=countdown.left - 1)

    def after(self, token: int, countdown: Countdown, matcher: xgrammar.GrammarMatcher) -> Countdown:
        """The countdown after a token of the JSON text, which the matcher has taken."""
        left = countdown.left - 1
        if countdown.way is not None:
            return replace(countdown, left=left, way=countdown.way[1:])
        lexer = _read(self._vocabulary.token_bytes[token], countdown.lexer)
        countdown = replace(countdown, left=left, lexer=lexer)
        if left > countdown.look_at:
            return countdown
        closing = self._closing(matcher, lexer, left, countdown.known)
        countdown = replace(countdown, known=closing)
        if closing is None or len(closing.tokens) > left - 1:  # a search costs time: they become rarer as they fail
            return replace(countdown, look_at=left * 3 // 4)
        way = closing.tokens
        room = left - 1 - len(way)
        if room <= SPARE:
            return replace(countdown, way=way)
        # Both the room and the way may change with every token; halfway is early enough.
        return replace(countdown, look_at=left - max(1, (room - SPARE) // 2))

    def _closing(
        self, matcher: xgrammar.GrammarMatcher, lexer: int, left: int, known: Closing | None
    ) -> Closing | None:  # fmt: skip
        # a search takes as long as a hundred tokens do; in a string, what ended it before will mostly do so again
        if known is not None and lexer == _STRING and known.text.startswith(b'"') and _completes(matcher, known.text):
            return known
        text = _closing(matcher.fork(), lexer, left * BYTES_PER_TOKEN, self._vocabulary)
        if text is None:
            return None
        tokens = self._spelling.tokens(text)
        is_spelt = sum(len(self._vocabulary.token_bytes[token]) for token in tokens) == len(text)
        return Closing(text, tokens) if is_spelt else None


def _completes(matcher: xgrammar.GrammarMatcher, text: bytes) -> bool:
    trial = matcher.fork()
    return trial.accept_string(text) and trial.is_completed()


def _closing(
    matcher: xgrammar.GrammarMatcher, lexer: int, max_bytes: int, vocabulary: Vocabulary
) -> bytes | None:  # fmt: skip
    """A short text that completes what the matcher has taken so far: strings end, and nothing optional begins. None
    where there is none of so many bytes, or it is not found soon."""
    text, tries = b"", 0
    while not matcher.is_completed():
        certain = certain_text(matcher, vocabulary, CERTAIN_BYTES)
        tries += 2 + 3 * len(certain)  # pieces that were put to the matcher for it
        choices = (certain,) if certain else _CLOSING_OUTSIDE if lexer == _OUTSIDE else _CLOSING_STRING
        for piece in choices:
            tries += 1
            if matcher.accept_string(piece):
                break
        else:
            return None
        text += piece
        if len(text) > max_bytes or tries > MAX_TRIES:
            return None
        lexer = _read(piece, lexer)
    return text


def _read(text: bytes, lexer: int) -> int:
    for byte in text:
        if lexer == _ESCAPE:
            lexer = _STRING
        elif byte == 0x22:  # a quotation mark
            lexer = _OUTSIDE if lexer == _STRING else _STRING
        elif byte == 0x5C and lexer == _STRING:  # a backslash
            lexer = _ESCAPE
    return lexer
