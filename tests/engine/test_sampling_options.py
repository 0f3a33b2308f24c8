"""The table of sampling options: whoever has a slot is treated as if alone, and leaves nothing behind."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import SamplingParams
from outrider.engine.options import NUM_ENDS, NUM_WORDS, WORD_LEN, Flags, Options
from outrider.engine.request import Request
from outrider.engine.sampler import sample
from outrider.types import Batch, RoundShape, Sampling, SlotState, Step

VOCAB, NUM_SLOTS, LENGTH = 40, 5, 9
CPU = torch.device("cpu")

a_request = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.7, 1.3]),
        "top_k": st.sampled_from([0, 5]),
        "top_p": st.sampled_from([1.0, 0.8]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "repetition_penalty": st.sampled_from([1.0, 1.4]),
        "presence_penalty": st.sampled_from([0.0, 0.6]),
        "frequency_penalty": st.sampled_from([0.0, -0.4]),
        "min_tokens": st.integers(0, 9),
        "bad_words": st.lists(st.lists(st.integers(3, 8), min_size=1, max_size=3), max_size=3),
        "logit_bias": st.sampled_from([None, {4: 3.0, 7: -2.0}]),
        "allowed_token_ids": st.sampled_from([None, list(range(2, 20))]),
    }
)


# what the host alone reads: when to stop, what to show, who asks, how much to draft; and grammars, whose masks are told
# every round
ON_THE_HOST = {
    *(
        "n",
        "learn",
        "max_tokens",
        "ignore_eos",
        "stop",
        "include_stop_str_in_output",
        "skip_special_tokens",
        "shown_special_ids",
    ),
    *("guided", "logprobs", "prompt_logprobs", "num_speculative_tokens", "prediction", "tenant", "trace"),
    *("detokenize", "structured_outputs", "output_kind"),
}
# of all others, a value that must reach the table
OTHER: dict[str, Any] = {
    "temperature": 0.3,
    "top_k": 7,
    "top_p": 0.4,
    "min_p": 0.2,
    "seed": 99,
    "repetition_penalty": 1.7,
    "presence_penalty": 0.9,
    "frequency_penalty": 0.8,
    "min_tokens": 4,
    "bad_words": [[5]],
    "logit_bias": {6: 2.0},
    "allowed_token_ids": [1, 2],
    "stop_token_ids": [17],
}


def request_of(number: int, options: dict[str, Any], **extra: Any) -> Request:
    params = SamplingParams(max_tokens=20, stop_token_ids=[number + 3], **options)
    words = [list(word) for word in options.get("bad_words", ())]
    given = {"end_ids": frozenset({2}), "bad_words": words, **extra}
    return Request(f"r{number}", [1] * 3, params, seed=number, **given)


def chosen(sampling: Sampling, slots: list[int], tokens: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
    """The tokens after three rows of each slot."""
    rows = torch.arange(len(slots) * 3)
    indices, row_slots = rows % 3 + 4, torch.tensor(slots).repeat_interleave(3)
    state = SlotState(tokens, *(torch.zeros(NUM_SLOTS, dtype=torch.long) for _ in range(5)))
    starts, none = torch.arange(0, len(rows) + 1, 3).int(), torch.zeros(len(slots), 1, dtype=torch.int32)
    batch = Batch(rows, indices, indices, starts, rows // 3, row_slots, torch.tensor(slots), none, rows, 4, LENGTH, 3)
    shape = RoundShape(len(slots), len(rows), len(rows), 0, 0, 3, LENGTH)
    each = torch.zeros(len(slots), dtype=torch.long)
    judged = rows, row_slots, indices + 1, starts
    return sample(logits.clone(), Step(batch, shape, each, each, each, each > 0, *judged, sampling, state))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(companies=st.lists(st.lists(a_request, min_size=1, max_size=NUM_SLOTS - 1), min_size=1, max_size=3))
def test_a_slot_is_like_a_table_of_its_own(companies: list[list[dict[str, Any]]]) -> None:
    """One company after the other takes the same slots, in rounds as they are recorded and as they are not."""
    generator = torch.Generator().manual_seed(0)
    shared = Options(NUM_SLOTS, VOCAB, CPU)
    for company in companies:
        requests = [request_of(number, options) for number, options in enumerate(company)]
        slots = torch.randperm(NUM_SLOTS - 1, generator=generator)[: len(requests)].tolist()
        tokens = torch.randint(3, 9, (NUM_SLOTS, LENGTH + 1), generator=generator)
        logits = torch.randn(len(requests) * 3, VOCAB, generator=generator)
        expected = []
        for number, (request, slot) in enumerate(zip(requests, slots, strict=True)):
            alone, request.slot = Options(NUM_SLOTS, VOCAB, CPU), slot
            alone.write([request], lambda values: values)
            expected.append(chosen(alone.sampling([request]), [slot], tokens, logits[3 * number :][:3]))
        shared.write(requests, lambda values: values)
        together = chosen(shared.sampling(requests), slots, tokens, logits)
        recorded = chosen(shared.recorded(Flags(filtered=True, adjusted=True)), slots, tokens, logits)
        assert together.equal(torch.cat(expected))
        assert recorded.equal(torch.cat(expected))


def test_longer_lists_make_the_table_wider() -> None:
    options, plain = Options(NUM_SLOTS, VOCAB, CPU), request_of(0, {"min_tokens": 3, "bad_words": [[5, 6]]})
    plain.slot = 0
    options.write([plain], lambda values: values)
    before = options.generation
    words = [[3] * (WORD_LEN + 2), *([[4]] * NUM_WORDS)]
    large = request_of(1, {"min_tokens": 3, "bad_words": words}, end_ids=frozenset(range(NUM_ENDS + 1)))
    large.slot = 1
    options.write([large], lambda values: values)
    assert options.generation > before, "what was recorded with the old tables is void"
    sampling = options.recorded(Flags(filtered=False, adjusted=True))
    assert sampling.bad_words is not None
    assert sampling.bad_words[0, 0, -2:].tolist() == [5, 6]
    assert sampling.bad_words[1, 0].tolist() == words[0]
    assert sampling.end_ids[0, :3].tolist() == [2, 3, -1]
    assert sampling.end_ids[1].tolist()[: NUM_ENDS + 1] == list(range(NUM_ENDS + 1))


def test_no_option_is_forgotten() -> None:
    """Whatever a request may ask is read by the host alone, or is in the table; and where requests ask for different
    things, their rounds are drawn in company above."""
    asked = {field.name for field in fields(SamplingParams)}
    assert asked - {"extra_args"} == ON_THE_HOST | OTHER.keys(), (  # see tests/test_from_outside.py
        "an option that nothing packs: a column of COLUMNS, or the host's alone?"
    )
    assert OTHER.keys() - {"seed", "stop_token_ids"} == set(a_request.wrapped_strategy.mapping)
    common = {"temperature": 1.0, "min_tokens": 2}  # the ids that end an answer are there for min_tokens
    for name, value in OTHER.items():
        tables = []
        for options in (common, {**common, name: value}):
            params = SamplingParams(**options)
            words = [list(map(int, word)) for word in params.bad_words]
            request = Request("r", [1] * 3, params, seed=params.seed or 0, bad_words=words, slot=1)
            table = Options(NUM_SLOTS, VOCAB, CPU)
            table.write([request], lambda tensor: tensor)
            recorded = table.recorded(Flags(filtered=True, adjusted=True))
            tables.append([each[1].tolist() for each in vars(recorded).values() if isinstance(each, torch.Tensor)])
        assert tables[0] != tables[1], f"{name} is not in the table"
