"""Text that streams out of token ids one by one: what is settled, what may still turn out otherwise, and where a stop
string ends it."""

from __future__ import annotations

import codecs
from collections.abc import Iterable, Sequence

from outrider.tokenizer import Tokenizer


class Detokenizer:
    """Text that grows token by token: what add() returns is final, and all of it together is decode() of all ids."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        skip_special_tokens: bool = True,
        shown_ids: Iterable[int] = (),  # special tokens that are never skipped
        prompt_ids: Sequence[int] = (),
    ) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens, self._shown_ids = skip_special_tokens, frozenset(shown_ids)
        self._pieces: list[str] = []
        self._is_empty = True
        stream_type = _ByteStream if tokenizer.is_byte_level else _WindowStream
        self._stream = stream_type(tokenizer, self._audible_tail(prompt_ids))

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def add(self, id: int) -> str:
        """The text that this token settles; "" while it may still turn out otherwise."""
        if self._is_silent(id):
            return ""
        self._is_empty = False
        return self._keep(self._stream.add(id))

    def finish(self) -> str:
        """What was held back, as decode() would write it."""
        return "" if self._is_empty else self._keep(self._stream.finish())  # no text of the prompt alone

    def _is_silent(self, id: int) -> bool:
        skip = self._skip_special_tokens and id not in self._shown_ids
        return self._tokenizer.is_silent(id, skip_special_tokens=skip)

    def _keep(self, text: str) -> str:
        if text:
            self._pieces.append(text)
        return text

    def _audible_tail(self, prompt_ids: Sequence[int]) -> list[int]:
        """The end of a prompt on which the text after it depends: back to a token that is no part of a character."""
        tail: list[int] = []
        for id in reversed(prompt_ids):
            if self._is_silent(id):
                continue
            tail.insert(0, id)
            if self._tokenizer.is_byte_level:
                complete = len(tail) == 4  # no character is longer than four bytes
            else:
                complete = not self._tokenizer.is_byte_token(id)
            if complete:
                break
        return tail


class _ByteStream:
    """Byte-level vocabularies: tokens are bytes, and only the last unfinished character is open."""

    def __init__(self, tokenizer: Tokenizer, prompt_tail: list[int]) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        for id in prompt_tail:  # a prompt may end inside a character
            self.add(id)

    def add(self, id: int) -> str:
        return self._decoder.decode(self._tokenizer.token_bytes(id))

    def finish(self) -> str:
        return self._decoder.decode(b"", final=True)


class _WindowStream:
    """Other vocabularies: decode the open tokens behind the last settled one, whose presence keeps leading spaces."""

    def __init__(self, tokenizer: Tokenizer, prompt_tail: list[int]) -> None:
        self._tokenizer = tokenizer
        self._settled = prompt_tail
        # Bytes at the end of a prompt may yet become a character.
        self._settled_text = self._decode(prompt_tail).rstrip("\N{REPLACEMENT CHARACTER}")
        self._open: list[int] = []

    def add(self, id: int) -> str:
        self._open.append(id)
        if self._tokenizer.is_byte_token(id):  # a run of bytes is read as one: the next byte may make all of it invalid
            return ""
        text = self._open_text()
        undecided = text.endswith("\N{REPLACEMENT CHARACTER}") and len(self._open) < 8
        if not text or undecided:
            return ""
        self._settled, self._settled_text, self._open = [id], self._decode([id]), []
        return text

    def finish(self) -> str:
        text = self._open_text() if self._open else ""
        self._open = []
        return text

    def _open_text(self) -> str:
        return self._decode(self._settled + self._open)[len(self._settled_text) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=False)


class StopChecker:
    """Ends a text at a stop string, and holds back what may be the beginning of one."""

    def __init__(self, stop: list[str], *, include_stop: bool = False) -> None:
        if "" in stop:
            raise ValueError("a stop string must not be empty; leave it out")
        self._stop = stop
        self._include_stop = include_stop
        self._held = ""
        self._matched: str | None = None

    def add(self, text: str) -> tuple[str, str | None]:
        """Text that is safe to show, and the stop string that ended the text (the first to be complete)."""
        if self._matched is not None:
            return "", self._matched
        text = self._held + text
        # Whichever ends first, however the text was cut on its way here; the longer one where two end together.
        found = [(text.find(stop) + len(stop), -len(stop), stop) for stop in self._stop if stop in text]
        if found:
            end, negative_len, self._matched = min(found)
            self._held = ""
            return text[: end if self._include_stop else end + negative_len], self._matched
        num_held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held], None

    def finish(self) -> str:
        """What was held back and turned out to be plain text."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """The length of the longest end of the text that begins the stop string, short of all of it."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
