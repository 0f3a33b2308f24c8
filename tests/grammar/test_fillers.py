"""Masks that several threads fill in, and what is found in them without a look at every token."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator

import pytest
import torch

from outrider import LLM
from outrider.grammar import fillers
from outrider.grammar.fillers import Fillers
from outrider.grammar.forced import MAX_IDS, _only_byte
from outrider.grammar.masks import mask_of
from outrider.grammar.vocabulary import Vocabulary
from outrider.sampling_params import Guided

xgrammar = pytest.importorskip("xgrammar")
SCHEMA = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
TEXTS = (b"", b'{"na', b'{"name": "', b'{"name": "a dog', b'{"name": "a \\', b'{"name": "a dog"', b'{"name": "a"}')


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(speculative_config=None, max_model_len=64, max_num_seqs=2) as made:
        yield made


def matchers(llm: LLM) -> list[xgrammar.GrammarMatcher]:
    """At different places of an answer, and of others that may begin with many or few tokens."""
    found = []
    for text in TEXTS:
        found.append(llm.engine.guide(Guided(json_schema=SCHEMA))._matcher)
        assert not text or found[-1].accept_string(text)
    for regex in ("a+", "[ab]", '"[a-z ]+"', " ?the (cat|dog)", "é", "\\d{3}"):
        found.append(llm.engine.guide(Guided(regex=regex))._matcher)
    return found


def own_threads() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "outrider-filler"]


@pytest.mark.parametrize("num_threads", [1, 2, 3, 16])
def test_masks_are_those_that_each_matcher_fills_in_alone(llm: LLM, num_threads: int) -> None:
    asked = [each for each in matchers(llm) if not each.is_terminated()]
    words = llm.engine.grammars._vocabulary.num_words
    alone = torch.stack([mask_of(each, words) for each in asked])
    together, before = Fillers(num_threads), len(own_threads())
    for shift in range(3):  # whose mask goes to which row is said
        rows = [(row + shift) % len(asked) for row in range(len(asked))]
        bits = torch.full((len(asked), words), 77, dtype=torch.int32)
        together.fill(asked, bits, rows)
        assert bits[rows].equal(alone)
        few = torch.full((3, words), 77, dtype=torch.int32)
        together.fill(asked[:2], few, [2, 0])
        assert few[[2, 0]].equal(alone[:2])
        assert (few[1] == 77).all()
    assert len(own_threads()) == before  # they stay, and no others are started


def test_what_goes_wrong_beside_is_raised(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def batch_fill_next_token_bitmask(self, *_: object) -> None:
            if threading.current_thread().name == "outrider-filler":
                raise ArithmeticError("broken")

    monkeypatch.setattr(fillers, "_one_thread", Broken)
    together = Fillers(3)
    for _ in range(2):  # and the threads go on
        with pytest.raises(ArithmeticError):
            together.fill(matchers(llm)[:4], torch.zeros(4, 8, dtype=torch.int32), [0, 1, 2, 3])


def test_they_end_with_the_thread_that_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fillers, "num_fillers", lambda: 4)
    before, seen = set(own_threads()), []

    def ask() -> None:
        assert fillers.fillers() is fillers.fillers()
        seen.append(set(own_threads()) - before)

    asking = threading.Thread(target=ask)
    asking.start()
    asking.join()
    assert len(seen[0]) == 3
    gc.collect()
    deadline = time.monotonic() + 5
    while any(thread.is_alive() for thread in seen[0]) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(thread.is_alive() for thread in seen[0])


def test_no_more_than_half_of_the_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    for processors, wanted in ((1, 1), (2, 1), (4, 2), (16, 8), (192, fillers.MAX_THREADS)):
        monkeypatch.setattr(fillers.os, "sched_getaffinity", lambda _, n=processors: range(n), raising=False)
        assert fillers.num_fillers() == wanted


def test_the_only_byte_is_that_of_all_allowed_tokens(llm: LLM) -> None:
    vocabulary: Vocabulary = llm.engine.grammars._vocabulary
    seen = set()
    for matcher in matchers(llm):
        if matcher.is_terminated():
            continue
        bits = mask_of(matcher, vocabulary.num_words)
        ids = [id for id in range(vocabulary.size) if bits[id // 32].item() >> (id % 32) & 1]
        begun = {b"" if id in vocabulary.end_ids else vocabulary.token_bytes[id][:1] for id in ids}
        expected = begun.pop() if len(begun) == 1 and len(ids) <= MAX_IDS else b""
        assert _only_byte(matcher, vocabulary) == expected
        seen.add(expected)
    assert {b"", b"a", b"m"} <= seen, seen


def test_bits_of_ids(llm: LLM) -> None:
    vocabulary: Vocabulary = llm.engine.grammars._vocabulary
    for ids in ([], [0], [31], [32, 63, 5], [vocabulary.size - 1], range(40)):
        words = vocabulary.bits(ids)
        assert (words.dtype, len(words)) == (torch.int32, vocabulary.num_words)
        assert [id for id in range(32 * len(words)) if words[id // 32].item() >> (id % 32) & 1] == sorted(ids)
