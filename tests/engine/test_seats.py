"""Seats of recorded rounds: whoever sits there is treated as anywhere else, and leaves nothing behind."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import SamplingParams
from outrider.engine.request import Request
from outrider.engine.sampler import adjust, adjusts, sampling_of
from outrider.engine.seats import MAX_ENDS, MAX_WORD, MAX_WORDS, Kind, Seats, fits
from outrider.kernels.sampling import choose
from outrider.types import Batch, SlotState

VOCAB, NUM_SEATS, LENGTH = 40, 4, 9
CPU = torch.device("cpu")

a_request = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 1.3]),
        "top_k": st.sampled_from([0, 5]),
        "top_p": st.sampled_from([1.0, 0.8]),
        "repetition_penalty": st.sampled_from([1.0, 1.4]),
        "frequency_penalty": st.sampled_from([0.0, -0.4]),
        "min_tokens": st.integers(0, 9),
        "bad_words": st.lists(st.lists(st.integers(3, 8), min_size=1, max_size=3), max_size=3),
        "logit_bias": st.sampled_from([None, {4: 3.0, 7: -2.0}]),
        "allowed_token_ids": st.sampled_from([None, list(range(2, 20))]),
    }
)


def request_of(number: int, options: dict[str, Any]) -> Request:
    params = SamplingParams(max_tokens=20, stop_token_ids=[number + 3], **options)
    words = [list(word) for word in options.get("bad_words", ())]
    made = Request(f"r{number}", [1] * 3, params, seed=number, end_ids=frozenset({2}), bad_words=words)
    made.slot = number
    return made


@settings(max_examples=80, deadline=None, derandomize=True)
@given(companies=st.lists(st.lists(a_request, min_size=1, max_size=NUM_SEATS), min_size=1, max_size=3))
def test_a_seat_is_like_any_other_place(companies: list[list[dict[str, Any]]]) -> None:
    """One company after the other takes the same seats."""
    generator = torch.Generator().manual_seed(0)
    kind = Kind(NUM_SEATS, 2, greedy=False, filtered=True, adjusted=True)
    seats = Seats.of(kind, nobody=NUM_SEATS, vocab_size=VOCAB, device=CPU)
    for company in companies:
        requests = [request_of(number, options) for number, options in enumerate(company)]
        count = len(requests)
        sampling = sampling_of(requests, VOCAB, CPU)
        seats.fill([request.slot for request in requests], [2] * count, sampling)
        assert seats.slots.tolist() == list(range(count)) + [NUM_SEATS] * (NUM_SEATS - count)
        assert seats.taken.tolist() == [number < count for number in range(NUM_SEATS)]
        assert seats.allowed.tolist() == [2] * count + [0] * (NUM_SEATS - count)
        tokens = torch.randint(3, 9, (NUM_SEATS + 1, LENGTH + 1), generator=generator)
        state = SlotState(tokens, *(torch.zeros(NUM_SEATS + 1, dtype=torch.long) for _ in range(4)))
        found = []
        for options, number in ((sampling, count), (seats.sampling, NUM_SEATS)):
            rows = torch.arange(number * 3)
            indices = rows % 3 + 4
            slots = seats.slots[:number]
            none = torch.zeros(number, 1, dtype=torch.int32)
            starts = torch.arange(0, number * 3 + 1, 3).int()
            batch = Batch(rows, indices, indices, starts, rows // 3, slots, none, rows, 4, LENGTH, 3)
            logits = torch.randn(NUM_SEATS * 3, VOCAB, generator=torch.Generator().manual_seed(1))[: number * 3]
            adjusted = adjust(logits, options, batch, rows, state)
            chosen = choose(adjusted, options, batch.request, indices + 1)
            found.append((adjusted[: count * 3], chosen[: count * 3]))
        torch.testing.assert_close(found[0][0], found[1][0], rtol=0, atol=0)
        assert torch.equal(found[0][1], found[1][1])


@pytest.mark.parametrize(
    ("options", "room"),
    [
        ({}, True),
        ({"bad_words": [[3] * MAX_WORD] * MAX_WORDS}, True),
        ({"bad_words": [[3] * (MAX_WORD + 1)]}, False),
        ({"bad_words": [[3]] * (MAX_WORDS + 1)}, False),
        ({"repetition_penalty": 1.2, "min_tokens": 4}, True),
    ],
)
def test_what_a_seat_has_room_for(options: dict[str, Any], room: bool) -> None:
    request = request_of(0, options)
    assert fits(request) is room
    assert adjusts(request) is bool(options)


def test_too_many_end_ids_need_another_place() -> None:
    params = SamplingParams(max_tokens=20, min_tokens=3)
    request = Request("r", [1], params, seed=0, end_ids=frozenset(range(MAX_ENDS + 1)))
    assert not fits(request)
