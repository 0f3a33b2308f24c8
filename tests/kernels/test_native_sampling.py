"""Tokens drawn in C against the same choice in torch: noise, filters, ties, and rows that hold rubbish. Penalties and
log-probabilities likewise."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from outrider import SamplingParams
from outrider.engine.options import Options
from outrider.engine.request import Request
from outrider.kernels import native_library
from outrider.kernels.logprobs import logprobs_of, logprobs_reference
from outrider.kernels.penalties import penalise, penalise_reference
from outrider.kernels.sampling import Columns, choose, filter_logits, gumbel
from outrider.types import Sampling

pytestmark = pytest.mark.skipif(native_library.library() is None, reason="no C compiler")


def sampling_of(params: list[SamplingParams], width: int) -> Sampling:
    requests = [Request("r", [1], each, seed=each.seed or 0, slot=slot) for slot, each in enumerate(params)]
    options = Options(len(params), width, torch.device("cpu"))
    options.write(requests, lambda values: values)
    return options.sampling(requests)


def drawn(*arguments: Any, **settings: Any) -> Tensor:
    """By the engine, which asks for no gradients."""
    with torch.inference_mode():
        return choose(*arguments, **settings)


def chosen_by_torch(*arguments: Any, **settings: Any) -> Tensor:
    with torch.enable_grad():
        return choose(*arguments, **settings)


def loosened(sampling: Sampling, by: float) -> Sampling:
    """Filters that let a little more pass, or less: what is just at their border may fall to either side."""
    top_p = torch.where(sampling.top_p < 1, (sampling.top_p * (1 + by)).clamp(max=0.9999999), sampling.top_p)
    return replace(sampling, top_p=top_p, min_p=sampling.min_p * (1 - by))


def scores(logits: Tensor, sampling: Sampling, rows: Tensor, places: Tensor, ids: Tensor, sharpness: float) -> Tensor:
    return logits / sampling.temperature[rows, None] * sharpness + gumbel(sampling.seed[rows], places, ids)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    width=st.sampled_from([1, 5, 16, 33, 400, 4097]),
    spread=st.sampled_from([0.0, 0.3, 3.0, 30.0]),
    temperature=st.sampled_from([2e-5, 0.3, 1.0, 1.7]),
    top_k=st.sampled_from([0, 1, 3, 40, 1000]),
    top_p=st.sampled_from([1.0, 0.95, 0.5, 1e-6]),
    min_p=st.sampled_from([0.0, 0.05, 1e-8]),
    sharpness=st.sampled_from([1.0, 1.15]),
    reduced=st.booleans(),
    barred=st.sampled_from([0.0, 0.3]),
    seed=st.integers(0, 10_000),
)
def test_tokens_are_those_of_torch(
    width: int, spread: float, temperature: float, top_k: int, top_p: float, min_p: float, sharpness: float,
    reduced: bool, barred: float, seed: int,
) -> None:  # fmt: skip
    random = torch.Generator().manual_seed(seed)
    logits = torch.randn(6, width, generator=random) * spread
    logits[:, 1:][torch.rand(6, width - 1, generator=random) < barred] = -torch.inf
    plain = SamplingParams(temperature=temperature, seed=seed)
    filtered = replace(plain, top_k=top_k, top_p=top_p, min_p=min_p)
    sampling = sampling_of([filtered, plain, replace(filtered, temperature=0), replace(filtered, seed=seed + 1)], width)
    rows, places = torch.tensor([0, 1, 2, 3, 0, 3]), torch.randint(0, 5000, (6,), generator=random)
    ids = torch.randperm(3 * width, generator=random)[:width].sort().values if reduced else None
    found = drawn(logits, sampling, rows, places, ids, sharpness=sharpness)
    columns = torch.arange(width) if ids is None else ids
    all_scores = scores(logits, sampling, rows, places, columns, sharpness)
    wanted = [chosen_by_torch(logits, loosened(sampling, by), rows, places, ids, sharpness=sharpness)
              for by in (0.0, 1e-5, -1e-5)]  # fmt: skip
    for row in range(6):
        if int(found[row]) in [int(each[row]) for each in wanted]:
            continue
        mine, theirs = (int((columns == token).nonzero()) for token in (found[row], wanted[0][row]))
        gap = float((all_scores[row, mine] - all_scores[row, theirs]).abs())  # logarithms differ in their last bits
        assert gap <= 2e-6 * max(1.0, float(all_scores[row, theirs].abs())), (row, mine, theirs, gap)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    values=st.lists(st.integers(-2, 3), min_size=1, max_size=40),
    top_k=st.integers(0, 41),
    top_p=st.sampled_from([1.0, 0.999, 0.9, 0.61, 0.3, 1e-6]),
    min_p=st.sampled_from([0.0, 0.02, 0.2, 1.0]),
)
def test_filters_keep_the_same_tokens_of_equals_the_first(
    values: list[int], top_k: int, top_p: float, min_p: float
) -> None:
    """Without sharpness all that are kept are as likely as each other: drawn often enough, each comes."""
    params = SamplingParams(temperature=0.9, top_k=top_k, top_p=top_p, min_p=min_p, seed=1)
    sampling = sampling_of([params], len(values))
    logits, row = torch.tensor([values], dtype=torch.float32), torch.tensor([0])
    kept = [
        filter_logits(logits / 0.9, loosened(sampling, by), row).isfinite().nonzero()[:, 1].tolist()
        for by in (0.0, 1e-5, -1e-5)
    ]
    tokens = drawn(logits.expand(1500, -1), sampling, row.expand(1500), torch.arange(1500), sharpness=0.0)
    filters = params.top_k in range(1, len(values)) or top_p < 1 or min_p > 0
    assert tokens.unique().tolist() in (kept if filters else [list(range(len(values)))])


@pytest.mark.parametrize(("top_k", "top_p", "wanted"), [(1000, 1.0, 1000), (0, 0.25, 5000), (8000, 0.25, 2000)])
def test_of_a_flat_row_as_many_are_kept_as_are_asked_for(top_k: int, top_p: float, wanted: int) -> None:
    """More than are near the best: all of 20,000 equals. The first of them stay."""
    sampling = sampling_of([SamplingParams(temperature=1, top_k=top_k, top_p=top_p, seed=4)], 20_000)
    logits, rows = torch.full((4000, 20_000), 2.5), torch.zeros(4000, dtype=torch.long)
    tokens = drawn(logits, sampling, rows, torch.arange(4000))
    assert int(tokens.max()) < wanted
    assert stats.kstest((tokens.numpy() + 0.5) / wanted, "uniform").pvalue > 1e-4


@pytest.mark.parametrize(
    ("params", "wanted"),
    [({"top_p": 0.999}, 85_300), ({"top_k": 1000}, 1000), ({"min_p": 1e-8}, 100_001), ({"min_p": 1e-7}, 1)],
)
def test_what_lies_far_below_the_best_is_kept_where_it_must_be(params: dict[str, Any], wanted: int) -> None:
    """A hundred thousand tokens 16.5 nats below the best, seven thousandths of the mass together."""
    logits = torch.full((1, 100_001), -16.5)
    logits[0, 0] = 0.0
    sampling = sampling_of([SamplingParams(temperature=1, seed=9, **params)], 100_001)
    rows, places = torch.zeros(400, dtype=torch.long), torch.arange(400)
    tokens = drawn(logits.expand(400, -1), sampling, rows, places, sharpness=0.0)  # all that are kept, equally often
    assert 0.97 * (wanted - 1) <= int(tokens.max()) <= 1.003 * (wanted - 1)


def test_choices_follow_the_distribution() -> None:
    logits, count = torch.randn(50, generator=torch.Generator().manual_seed(0)) * 1.5, 20_000
    sampling = sampling_of([SamplingParams(temperature=0.8, seed=3)], 50)
    tokens = drawn(logits.expand(count, -1), sampling, torch.zeros(count, dtype=torch.long), torch.arange(count))
    counts = torch.bincount(tokens, minlength=50).double()

    def p_value(temperature: float) -> float:
        expected = (logits.double() / temperature).softmax(0) * count
        common = expected >= 5
        pairs = [torch.cat([each[common], each[~common].sum()[None]]).numpy() for each in (counts, expected)]
        return float(stats.chisquare(*pairs).pvalue)

    assert p_value(0.8) > 1e-3
    assert p_value(0.9) < 1e-6, "a wrong temperature must be noticed"


def test_a_row_depends_on_itself_alone() -> None:
    params = [
        SamplingParams(temperature=0.7 + 0.1 * slot, top_p=0.9 if slot % 2 else 1.0, seed=slot) for slot in range(4)
    ]
    sampling = sampling_of(params, 5000)
    logits = torch.randn(24, 5000, generator=torch.Generator().manual_seed(2)) * 3
    rows, places = torch.arange(24) % 4, torch.arange(24) * 11
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        together = drawn(logits, sampling, rows, places)
        torch.set_num_threads(1)
        alone = [drawn(logits[n : n + 1], sampling, rows[n : n + 1], places[n : n + 1]) for n in range(24)]
    finally:
        torch.set_num_threads(before)
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("top_p", [1.0, 0.5])
@pytest.mark.parametrize("rubbish", [torch.nan, -torch.inf])
def test_rubbish_is_never_drawn_where_there_is_something_else(rubbish: float, top_p: float) -> None:
    sampling = sampling_of([SamplingParams(temperature=1, top_p=top_p, seed=1)], 70)
    logits = torch.full((200, 70), rubbish)
    rows, places = torch.zeros(200, dtype=torch.long), torch.arange(200)
    assert drawn(logits, sampling, rows, places).tolist() == [0] * 200
    logits[:, [33, 69]] = torch.tensor([1.0, 1.0])
    found = drawn(logits, sampling, rows, places)
    assert set(found.tolist()) == ({33, 69} if top_p == 1 else {33})
    out = torch.zeros(200, dtype=torch.long)
    assert drawn(logits, sampling, rows, places, out=out) is out
    assert torch.equal(out, found)


@pytest.mark.parametrize("top_p", [1.0, 0.9])
def test_rubbish_hides_nothing_beside_it(top_p: float) -> None:
    sampling = sampling_of([SamplingParams(temperature=1, top_p=top_p, seed=1)], 200)
    random = torch.Generator().manual_seed(3)
    logits = torch.randn(300, 200, generator=random) * 30
    rubbish = torch.rand(300, 200, generator=random) < 0.3
    rows, places = torch.zeros(300, dtype=torch.long), torch.arange(300)
    wanted = drawn(logits.masked_fill(rubbish, -torch.inf), sampling, rows, places)
    assert torch.equal(drawn(logits.masked_fill(rubbish, torch.nan), sampling, rows, places), wanted)


PENALTIES = [{}, {"repetition_penalty": 1.3}, {"presence_penalty": 0.4, "frequency_penalty": -0.3}]
PENALTIES += [{"repetition_penalty": 0.7, "presence_penalty": -0.2, "frequency_penalty": 0.1}]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    width=st.sampled_from([1, 7, 300, 4000]),
    rows=st.lists(st.tuples(st.integers(0, 3), st.integers(0, 90)), min_size=1, max_size=40),
    begin=st.sampled_from([None, 0, 3, 150]),
    num_threads=st.sampled_from([1, 2, 3]),
    seed=st.integers(0, 1000),
)
def test_penalties_equal_torch(
    width: int, rows: list[tuple[int, int]], begin: int | None, num_threads: int, seed: int
) -> None:
    """To the last bit; also of a rank that has only some of the ids."""
    generator = torch.Generator().manual_seed(seed)
    sampling = sampling_of([SamplingParams(**each) for each in PENALTIES], 5000)
    sampling = replace(sampling, prompt_len=torch.tensor([5, 40, 0, 91]))
    texts = torch.randint(400, (4, 93), generator=generator)
    slots, last = torch.tensor(rows).unbind(1)
    columns = None if begin is None else Columns(None, begin, width, 5000)  # type: ignore[arg-type]
    if columns is None:
        texts %= width
    logits = torch.randn(len(rows), width, generator=generator) * 3
    wanted, found, before = logits.clone(), logits.clone(), torch.get_num_threads()
    torch.set_num_threads(num_threads)
    penalise_reference(wanted, sampling, slots, last, texts, 91, columns)
    with torch.inference_mode():
        penalise(found, sampling, slots, last, texts, 91, columns)
    torch.set_num_threads(before)
    assert found.equal(wanted)
    assert found[slots == 0].equal(logits[slots == 0]), "who has no penalty keeps what is there"


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    width=st.sampled_from([1, 5, 16, 33, 400, 4097, 40000]),
    num_rows=st.integers(0, 9),
    most=st.sampled_from([0, 1, 5, 100]),
    spread=st.sampled_from([0.0, 0.3, 3.0, 30.0]),
    steps=st.sampled_from([None, 2]),
    seed=st.integers(0, 1000),
)
def test_logprobs_equal_float64(
    width: int, num_rows: int, most: int, spread: float, steps: int | None, seed: int
) -> None:
    """With ties where there are few steps, and tokens that cannot come; alone and in company to the last bit."""
    generator, most = torch.Generator().manual_seed(seed), min(most, width)
    logits = torch.randn(num_rows, width, generator=generator) * spread
    logits = logits if steps is None else (logits * steps).round() / steps
    logits[:, 1::7] = -torch.inf
    chosen = torch.randint(width, (num_rows,), generator=generator)
    with torch.inference_mode():
        found = logprobs_of(logits, torch.arange(num_rows), chosen, most)
        for row in range(num_rows):
            alone = logprobs_of(logits, torch.tensor([row]), chosen[row : row + 1], most)
            assert all(one.equal(whole[row : row + 1]) for one, whole in zip(alone, found, strict=True))
    expected = logits.double().log_softmax(-1)
    near = {"rtol": 1e-6, "atol": 4e-6}
    torch.testing.assert_close(found.own.double(), expected.gather(1, chosen[:, None])[:, 0], **near)
    torch.testing.assert_close(found.values.double(), expected.topk(most, dim=-1).values, **near)
    by_torch = logprobs_reference(logits, torch.arange(num_rows), chosen, most)
    for one, other in zip((found.own, found.values), (by_torch.own, by_torch.values), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)  # torch rounds more than we do
    for row in range(num_rows):
        value = logits[row, chosen[row]]
        assert found.ranks[row] <= 1 + (logits[row] > value).sum()
        assert found.ranks[row] >= 1 + (logits[row] > value + 4e-6 * (1 + value.abs())).sum()
        order = logits[row].sort(descending=True, stable=True).indices[:most]
        assert found.ids[row].equal(order), "the first of equals first"
