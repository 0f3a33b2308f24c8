"""N-gram lookup against the obvious loop."""

from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.config import SpeculativeConfig
from outrider.drafters.ngram import Ngram
from outrider.types import Batch, Hidden, RoundShape, SlotState, Step, Verdict


def obvious(tokens: list[int], shortest: int, longest: int, depth: int) -> list[int]:
    """The draft after `tokens`: longest match first, then most room, then latest; as long as the match at most."""
    best: tuple[int, int, int] | None = None
    for end in range(len(tokens) - 1):  # the match ends here
        run = 0
        while run < longest and run <= end and tokens[end - run] == tokens[len(tokens) - 1 - run]:
            run += 1
        room = min(len(tokens) - 1 - end, depth)
        if run >= shortest and (best is None or (run, room, end) > best):
            best = (run, room, end)
    if best is None:
        return []
    run, room, end = best
    return tokens[end + 1 :][: min(run, room)]


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    texts=st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=25), min_size=1, max_size=4),
    shortest=st.integers(1, 3),
    extra=st.integers(0, 4),
    depth=st.integers(1, 6),
)
def test_against_the_obvious_loop(texts: list[list[int]], shortest: int, extra: int, depth: int) -> None:
    drafter = Ngram(
        SpeculativeConfig.from_dict(
            {
                "method": "ngram",
                "num_speculative_tokens": depth,
                "prompt_lookup_min": shortest,
                "prompt_lookup_max": shortest + extra,
            }
        )
    )
    table = torch.full((len(texts), 40), 9)
    for row, text in zip(table, texts, strict=True):
        row[: len(text)] = torch.tensor(text)
    lengths = torch.tensor([len(text) for text in texts])
    zeros = torch.zeros(len(texts), dtype=torch.long)
    slots = torch.arange(len(texts))
    width = int(lengths.max())
    batch = Batch(zeros, zeros, zeros, zeros.int(), slots, slots, slots, zeros.int(), zeros, 4, width - 1, 1)
    state = SlotState(table, lengths, zeros, zeros, zeros, zeros)
    emits = torch.ones(len(texts), dtype=torch.bool)
    shape = RoundShape(len(texts), len(texts), 0, 0, depth, 1, width)
    sampling: Any = None
    step = Step(batch, shape, zeros, zeros, zeros, emits, *[zeros] * 4, sampling, state)
    empty = torch.empty(0)
    draft = drafter.propose(step, Hidden(empty, empty), Verdict(zeros, zeros, zeros))
    for row, count, text in zip(draft.tokens.tolist(), draft.count.tolist(), texts, strict=True):
        assert row[:count] == obvious(text, shortest, shortest + extra, depth)
