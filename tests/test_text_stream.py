"""An answer's text is the same whenever somebody looks at it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider.pair import DEFAULT_DIRECTORY
from outrider.sampling_params import SamplingParams
from outrider.text_stream import MOST_WAITING, TextStream
from outrider.tokenizer import Tokenizer

TOKENIZER = Tokenizer.from_directory(DEFAULT_DIRECTORY / "target")
assert TOKENIZER is not None
FOX = TOKENIZER.encode("a 🦊 runs, ünd so wéiter")  # characters of several tokens
TOKENS = st.lists(st.one_of(st.sampled_from(FOX), st.integers(0, TOKENIZER.vocab_size - 1), st.none()), max_size=150)


def stream(stop: list[str] | None = None) -> TextStream:
    assert TOKENIZER is not None
    return TextStream(TOKENIZER, FOX, SamplingParams(stop=stop))


@given(TOKENS, st.sets(st.integers(0, 150)), st.booleans())
def test_text_does_not_depend_on_when_it_is_read(tokens: list[int | None], looked_at: set[int], finishes: bool) -> None:
    """Nor on whether a stop string is watched for that never comes."""
    lazy, often, watched = stream(), stream(), stream(["\U0010ffff no such text"])
    for number, token in enumerate(tokens):
        for each in (lazy, often, watched):
            assert each.add(token, may_stop=True) is None
        if number in looked_at:
            assert often.ends[-1] == len(often.text)
    if finishes:
        for each in (lazy, often, watched):
            each.finish()
    assert lazy.text == often.text == watched.text
    assert lazy.ends == often.ends == watched.ends
    assert len(lazy.ends) == len(tokens)
    if finishes and tokens:
        assert lazy.ends[-1] == len(lazy.text)


def test_text_is_what_decoding_all_tokens_gives() -> None:
    assert TOKENIZER is not None
    ids = TOKENIZER.encode("once upon a time there was a 🦊. " * 20)
    assert len(ids) > 2 * MOST_WAITING
    lazy = TextStream(TOKENIZER, [], SamplingParams())
    for id in ids:
        lazy.add(id, may_stop=True)
    lazy.finish()
    assert lazy.text == TOKENIZER.decode(ids)
    for place, end in enumerate(lazy.ends[:-1]):
        settled = TOKENIZER.decode(ids[: place + 1]).rstrip("\N{REPLACEMENT CHARACTER}")  # part of a character waits
        assert lazy.text[:end] == settled
