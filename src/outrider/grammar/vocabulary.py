"""A vocabulary as bytes, and sets of its tokens as bits: which tokens spell the beginning of a marker, and which
would run past the end of one."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from outrider.grammar.compiler import Words
from outrider.tokenizer import Tokenizer

CACHED_SETS = 256  # a set is found by a look at every token


class Vocabulary:
    def __init__(self, tokenizer: Tokenizer, vocab_size: int, end_ids: frozenset[int]) -> None:
        self._tokenizer, self.size, self.end_ids = tokenizer, vocab_size, end_ids
        self.num_words = -(-vocab_size // 32)  # of 32 bits
        self.opening = lru_cache(CACHED_SETS)(self._opening)
        self.within = lru_cache(CACHED_SETS)(self._within)
        self.beginning_otherwise = lru_cache(256)(self._beginning_otherwise)

    @cached_property
    def token_bytes(self) -> list[bytes]:
        return [self._tokenizer.token_bytes(id) for id in range(self.size)]

    def words(self) -> Words:
        """The vocabulary as compilers of grammars know it."""
        ids = [id for id in range(self.size) if id not in self.end_ids]
        silent = frozenset(id for id in ids if self._tokenizer.is_silent(id, skip_special_tokens=True))
        unused = frozenset(id for id in silent if self._tokenizer.is_silent(id, skip_special_tokens=False))
        return Words(self.token_bytes, self.end_ids, silent, unused)

    @cached_property
    def ends(self) -> Tensor:
        return self.bits(self.end_ids)

    def bits(self, ids: Iterable[int]) -> Tensor:
        chosen = np.zeros(self.num_words * 32, dtype=bool)
        chosen[list(ids)] = True
        return torch.from_numpy(_packed(chosen))

    @cached_property
    def first_bytes(self) -> np.ndarray:
        """The first byte of each token, [32 words] int16; -1 where it has none, or ends a text."""
        found = np.full(self.num_words * 32, -1, dtype=np.int16)
        found[: self.size] = [text[0] if text else -1 for text in self.token_bytes]
        found[list(self.end_ids)] = -1
        return found

    def _beginning_otherwise(self, byte: int) -> np.ndarray:
        """Bits [words] int32 of all tokens that do not begin with this byte."""
        return _packed(self.first_bytes != byte)

    def _opening(self, rest: bytes, closing: bytes) -> Tensor:
        """Tokens that go on with an opening marker of which `rest` is missing, and not past its closing one. Where one
        token is all of it, the others are not what a model means."""
        if rest in self.token_bytes:
            return self.bits([id for id, text in enumerate(self.token_bytes) if text == rest])
        found = (
            id
            for id, text in enumerate(self.token_bytes)
            if text and (rest.startswith(text) or (text.startswith(rest) and not is_past(text[len(rest) :], closing)))
        )
        return self.bits(set(found) - self.end_ids)

    def _within(self, begun: bytes, marker: bytes) -> Tensor | None:
        """Tokens that do not run past the end of a marker of which `begun` is there; None: all of them."""
        ending = marker[-1:]
        past = {id for id, text in enumerate(self.token_bytes) if ending in text and is_past(begun + text, marker)}
        return ~self.bits(past) if past else None


class Spelling:
    """Writes text in the tokens of a vocabulary."""

    def __init__(self, vocabulary: Vocabulary, banned: Iterable[int]) -> None:
        banned = frozenset(banned) | vocabulary.end_ids
        self._ids = {text: id for id, text in enumerate(vocabulary.token_bytes) if text and id not in banned}
        self._longest = max(map(len, self._ids), default=0)

    def tokens(self, text: bytes) -> tuple[int, ...]:
        """Few tokens, the longest first, of as much of a text as the vocabulary can spell."""
        found: list[int] = []
        place = 0
        while place < len(text):
            sizes = range(min(self._longest, len(text) - place), 0, -1)
            size = next((size for size in sizes if text[place : place + size] in self._ids), 0)
            if not size:
                break
            found.append(self._ids[text[place : place + size]])
            place += size
        return tuple(found)


def _packed(chosen: np.ndarray) -> np.ndarray:
    """Bools [32 words] as bits [words] int32, lowest first."""
    return np.packbits(chosen, bitorder="little").view(np.int32)


def is_past(text: bytes, marker: bytes) -> bool:
    """Whether something follows the first of these markers in a text."""
    place = text.find(marker)
    return 0 <= place < len(text) - len(marker)


def begun_of(text: bytes, marker: bytes) -> bytes:
    """The longest end of a text that begins the marker, short of all of it."""
    longest = min(len(text), len(marker) - 1)
    return next((text[-n:] for n in range(longest, 0, -1) if marker.startswith(text[-n:])), b"")
