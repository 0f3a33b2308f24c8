"""Prompts of a given length for `outrider bench traffic`."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from outrider.bench.prompts import CHAT, REPETITION, PromptText, PromptVocabulary, random_prompts


def traffic_prompts(vocabulary: PromptVocabulary, count: int, length: int, seed: int = 0) -> list[PromptText]:
    """Different prompts of exactly `length` tokens: our own texts in random order where there is a tokenizer, else
    random ids. Of a text that is too long the middle is left out: the beginning and the end are what a model was
    trained to expect there."""
    source = random.Random(seed)
    if vocabulary.tokenizer is None:
        found = random_prompts(vocabulary.size, count, seed)
        return [PromptText(ids=tuple(itertools.islice(itertools.cycle(each.ids), length))) for each in found]
    return [PromptText(ids=_cut(_long_text(vocabulary, length, source), length)) for _ in range(count)]


def _long_text(vocabulary: PromptVocabulary, length: int, source: random.Random) -> list[int]:
    texts: list[str] = []
    for batch in _shuffled(source):
        texts += batch
        ids = vocabulary.encode(PromptText("\n\n".join(texts)))
        if len(ids) >= length:
            return ids
    raise AssertionError("texts without end")


def _shuffled(source: random.Random) -> Iterator[list[str]]:
    texts = [*CHAT, *REPETITION]
    while True:
        yield source.sample(texts, len(texts))


def _cut(ids: list[int], length: int) -> tuple[int, ...]:
    head = length // 2
    return (*ids[:head], *ids[len(ids) - (length - head) :])
