"""Text that a grammar forces. xgrammar can say at once what must come next, but not only so much of it: of some small
grammars there is no end to it. So it is asked byte by byte."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from outrider.grammar.masks import mask_of
from outrider.grammar.vocabulary import Vocabulary

if TYPE_CHECKING:
    import xgrammar

MAX_IDS = 64  # tokens that may all begin the same text


def certain_text(matcher: xgrammar.GrammarMatcher, vocabulary: Vocabulary, max_bytes: int) -> bytes:
    """What must come next, so much of it at most; empty where there is a choice. It may begin inside a character."""
    found = b""
    while len(found) < max_bytes and (byte := _only_byte(matcher, vocabulary)) and matcher.accept_string(byte):
        found += byte
    if found:
        matcher.rollback(len(found))
    return found


def _only_byte(matcher: xgrammar.GrammarMatcher, vocabulary: Vocabulary) -> bytes:
    """The byte that all tokens begin with which may come next; empty where there is none."""
    if _may_come(matcher, b"a") and _may_come(matcher, b"b"):  # as within a string, where a mask would take long
        return b""
    bits = mask_of(matcher, vocabulary.num_words).numpy()
    there = bits != 0
    if not 0 < np.count_nonzero(there) <= MAX_IDS:
        return b""
    place = int(there.argmax())
    word = int(bits[place])
    byte = int(vocabulary.first_bytes[32 * place + (word & -word).bit_length() - 1])
    if byte < 0 or (bits & vocabulary.beginning_otherwise(byte)).any():
        return b""
    num_ids = sum((word & 0xFFFFFFFF).bit_count() for word in bits[there].tolist())
    return bytes([byte]) if num_ids <= MAX_IDS else b""


def _may_come(matcher: xgrammar.GrammarMatcher, text: bytes) -> bool:
    if not matcher.accept_string(text):
        return False
    matcher.rollback(1)
    return True
