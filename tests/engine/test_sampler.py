"""The sampling pipeline against obvious loops, and the distribution it draws from against the target's own."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from outrider import LLM, SamplingParams
from outrider.engine.options import Options
from outrider.engine.request import Request
from outrider.engine.sampler import adjust
from outrider.kernels.sampling import choose, filter_logits, gumbel
from outrider.types import Batch, SlotState

VOCAB = 40


def sampling_for(params: SamplingParams, prompt_len: int = 3, **extra: Any) -> Any:
    request = Request("r", [1] * prompt_len, params, seed=params.seed or 0, **extra)
    request.slot = 0
    options = Options(1, VOCAB, torch.device("cpu"))
    options.write([request], lambda values: values)
    return options.sampling([request])


def naive_adjust(logits: list[float], params: SamplingParams, text: list[int], prompt_len: int) -> list[float]:
    """One row, one option at a time, as the documentation would put it."""
    logits = list(logits)
    if params.allowed_token_ids is not None:
        logits = [x if token in params.allowed_token_ids else -torch.inf for token, x in enumerate(logits)]
    for token, bias in (params.logit_bias or {}).items():
        logits[token] += bias
    if len(text) - prompt_len < params.min_tokens:
        for token in (2, *params.stop_token_ids):
            logits[token] = -torch.inf
    for word in params.bad_words:
        if list(word[:-1]) == text[len(text) - len(word) + 1 :] if len(word) > 1 else True:
            logits[int(word[-1])] = -torch.inf
    for token in range(len(logits)):
        if token in text:
            r = params.repetition_penalty
            logits[token] = logits[token] / r if logits[token] > 0 else logits[token] * r
        count = text[prompt_len:].count(token)
        logits[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    return logits


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    text=st.lists(st.integers(3, 8), min_size=4, max_size=12),
    repetition=st.sampled_from([1.0, 1.4, 0.7]),
    presence=st.sampled_from([0.0, 0.5]),
    frequency=st.sampled_from([0.0, -0.4]),
    min_tokens=st.integers(0, 9),
    bad_words=st.lists(st.lists(st.integers(3, 8), min_size=1, max_size=3), max_size=3),
    allowed=st.sampled_from([None, list(range(2, 20))]),
)
def test_every_row_is_judged_by_its_own_prefix(text: list[int], bad_words: list[list[int]], **options: Any) -> None:
    params = SamplingParams(
        repetition_penalty=options["repetition"],
        presence_penalty=options["presence"],
        frequency_penalty=options["frequency"],
        min_tokens=options["min_tokens"],
        allowed_token_ids=options["allowed"],
        logit_bias={5: 2.0},
        bad_words=bad_words,
        stop_token_ids=[9],
    )
    prompt_len = 3
    sampling = sampling_for(params, prompt_len, end_ids=frozenset([2]), bad_words=bad_words)
    state = SlotState(torch.tensor([[*text, 0]]), *(torch.zeros(1, dtype=torch.long) for _ in range(5)))
    rows = torch.arange(len(text))
    zeros = torch.zeros(len(text), dtype=torch.long)
    size, slots = len(text), torch.tensor([0])
    batch = Batch(zeros, rows, rows, zeros.int(), zeros, zeros, slots, zeros.int(), zeros, 4, size, size)
    logits = torch.randn(len(text), VOCAB, generator=torch.Generator().manual_seed(1))
    by_torch = adjust(logits, sampling, batch, rows, state)
    with torch.inference_mode():
        by_kernels = adjust(logits, sampling, batch, rows, state)
    for row in range(prompt_len - 1, len(text)):
        expected = naive_adjust(logits[row].tolist(), params, text[: row + 1], prompt_len)
        torch.testing.assert_close(by_torch[row], torch.tensor(expected))
        torch.testing.assert_close(by_kernels[row], torch.tensor(expected))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    top_k=st.sampled_from([0, 1, 3, 100]),
    top_p=st.sampled_from([1.0, 0.8, 0.2]),
    min_p=st.sampled_from([0.0, 0.2]),
    seed=st.integers(0, 1000),
)
def test_filters(top_k: int, top_p: float, min_p: float, seed: int) -> None:
    logits = torch.randn(1, VOCAB, generator=torch.Generator().manual_seed(seed)) * 2
    sampling = sampling_for(SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p))
    kept = set(torch.isfinite(filter_logits(logits, sampling, torch.tensor([0])))[0].nonzero().flatten().tolist())
    order = logits[0].argsort(descending=True).tolist()
    candidates = order[: top_k or VOCAB]
    probs = logits[0, candidates].softmax(0).tolist()
    expected, mass = set(), 0.0
    for token, p in zip(candidates, probs, strict=True):
        if expected and (mass >= top_p - 1e-6 or p < min_p * probs[0]):
            break
        expected.add(token)
        mass += p
    assert kept == expected


def test_noise_is_keyed_by_seed_position_and_token() -> None:
    ids = torch.arange(1000)
    base = gumbel(torch.tensor([5]), torch.tensor([7]), ids)
    assert torch.equal(base, gumbel(torch.tensor([5]), torch.tensor([7]), ids))
    assert torch.equal(base[:, 300:400], gumbel(torch.tensor([5]), torch.tensor([7]), ids[300:400]))
    for seed, position in ((6, 7), (5, 8), (-5, 7)):
        other = gumbel(torch.tensor([seed]), torch.tensor([position]), ids)
        assert abs(torch.corrcoef(torch.cat([base, other]))[0, 1]) < 0.15


def test_noise_is_gumbel_distributed() -> None:
    noise = gumbel(torch.arange(40), torch.arange(40) * 3, torch.arange(5000)).flatten().numpy()
    assert stats.kstest(noise, "gumbel_r").pvalue > 1e-3
    assert stats.kstest(noise * 1.02, "gumbel_r").pvalue < 1e-3, "the test must be able to fail"


def chi_squared(counts: torch.Tensor, probs: torch.Tensor) -> float:
    """p-value; cells expected fewer than five times are merged."""
    total = counts.sum()
    common = probs * total >= 5
    observed = torch.cat([counts[common], counts[~common].sum()[None]]).double()
    expected = torch.cat([probs[common], probs[~common].sum()[None]]).double() * total
    keep = expected > 0
    return float(stats.chisquare(observed[keep], expected[keep] / expected[keep].sum() * observed[keep].sum()).pvalue)


def test_choices_follow_the_distribution() -> None:
    logits = torch.randn(VOCAB, generator=torch.Generator().manual_seed(0)) * 1.5
    count = 20000
    params = SamplingParams(temperature=0.8)
    requests = [Request("r", [1], params, seed=seed, slot=seed) for seed in range(count)]
    options = Options(count, VOCAB, torch.device("cpu"))
    options.write(requests, lambda values: values)
    sampling = options.sampling(requests)
    rows = torch.arange(count)
    tokens = choose(logits.expand(count, -1), sampling, rows, torch.full((count,), 17))
    counts = torch.bincount(tokens, minlength=VOCAB)
    assert chi_squared(counts, (logits / 0.8).softmax(0)) > 1e-3
    assert chi_squared(counts, (logits / 0.9).softmax(0)) < 1e-6, "a wrong temperature must be noticed"


@pytest.mark.parametrize("top_k", [0, 5])
def test_what_is_flatter_is_made_as_sharp(top_k: int) -> None:
    """Half of everybody's logits, twice as sharp: the same token every time. Filters look at what they are given."""
    logits = torch.randn(50, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    rows, places = torch.zeros(50, dtype=torch.long), torch.arange(50)
    sampling = sampling_for(SamplingParams(temperature=0.8, top_k=top_k, seed=3))
    wanted = choose(logits, sampling, rows, places).tolist()
    assert choose(logits / 2, sampling, rows, places, sharpness=2.0).tolist() == wanted
    assert choose(logits / 2, sampling, rows, places).tolist() != wanted


@pytest.mark.parametrize("skipped", [1, 2])
def test_speculative_sampling_follows_the_targets_distribution(skipped: int, target_path: Callable[..., Path]) -> None:
    """The second and third tokens of many seeded runs, all drafted, against the target's probabilities."""
    path, prompt, count = target_path("llama"), [9, 8, 7, 6], 3000
    allowed = list(range(20, 44))
    params = [
        SamplingParams(max_tokens=3, temperature=1.0, seed=seed, allowed_token_ids=allowed, ignore_eos=True)
        for seed in range(count)
    ]
    draft = {
        "method": "draft_model",
        "model": str(target_path("llama", num_hidden_layers=3)),
        "num_speculative_tokens": 2,
    }
    with LLM(path, draft, max_model_len=32, max_num_seqs=64, page_size=4) as llm:
        outputs = llm.generate([prompt] * count, params)
        drafted = sum(output.outputs[0].speculation.drafted for output in outputs)
        accepted = sum(output.outputs[0].speculation.accepted for output in outputs)
        assert 0 < accepted < drafted
        texts = [tuple(output.outputs[0].token_ids) for output in outputs]
        prefix = max({text[:skipped] for text in texts}, key=[text[:skipped] for text in texts].count)
        following = torch.tensor([text[skipped] for text in texts if text[:skipped] == prefix])
    model_logits = torch.full((256,), -torch.inf)
    with torch.no_grad():
        reference = tiny.reference("llama")(input_ids=torch.tensor([prompt + list(prefix)])).logits[0, -1]
    model_logits[allowed] = reference[allowed]
    counts = torch.bincount(following, minlength=256)
    assert len(following) > 60
    assert chi_squared(counts, model_logits.softmax(0)) > 1e-3
    assert chi_squared(counts, (model_logits / 3).softmax(0)) < 1e-3, "the negative control must fail"
