"""Plain = speculative, token for token: every drafter x every target x ways of batching, greedy and seeded."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from samples import METHODS, Oracle, drafter_settings, guide, sample_target, suits

from outrider import LLM, RequestOutput, SamplingParams, Speculation
from outrider.llm import total_speculation
from outrider.matrix import support_matrix

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=24, temperature=0.8, seed=11, ignore_eos=True)
SMALL: dict[str, Any] = {"max_model_len": 128, "page_size": 4, "snapshot_interval": 16}
PAIRS = [(family, method) for family in tiny.FAMILIES for method in METHODS if suits(method, family)]


def make_prompts(count: int, seed: int = 5) -> list[list[int]]:
    """Random ids with some repetition in them, of mixed lengths."""
    generator = torch.Generator().manual_seed(seed)
    prompts = []
    for number in range(count):
        length = int(torch.randint(2, 14, (), generator=generator))
        part = torch.randint(3, tiny.VOCAB, (length,), generator=generator).tolist()
        prompts.append([3 + number, *part, *part[: number % 5]])
    return prompts


def ids(outputs: Sequence[RequestOutput]) -> list[list[int]]:
    return [completion.token_ids for output in outputs for completion in output.outputs]


def fixed(settings: dict[str, Any]) -> dict[str, Any]:
    """As much is drafted as can be, and the drafter follows every text: its pages are found again."""
    return {**settings, "adaptive": False}


def plain(path: Path, prompts: list[list[int]], params: Any, **options: Any) -> list[list[int]]:
    with LLM(path, None, **{**SMALL, **options}) as llm:
        return ids(llm.generate(prompts, params))


def mixed(count: int) -> list[SamplingParams]:
    """Greedy and seeded by turns, side by side in the same rounds."""
    return [(GREEDY, SEEDED)[number % 2] for number in range(count)]


Plainly = Callable[[str, str, Path, list[list[int]]], list[list[int]]]


@pytest.fixture(scope="session")
def plainly() -> Plainly:
    """What a sample target says without a drafter, told once for all drafters and ways of batching."""
    told: dict[str, list[list[int]]] = {}

    def say(family: str, method: str, path: Path, prompts: list[list[int]]) -> list[list[int]]:
        key = f"{family} {method if method == 'mtp' else ''} {prompts}"  # whose modules make it another checkpoint
        if key not in told:
            told[key] = plain(path, prompts, mixed(len(prompts)))
        return told[key]

    return say


@pytest.mark.parametrize(("family", "method"), PAIRS)
def test_every_pair(
    family: str, method: str, target_path: Callable[..., Path], tmp_path: Path, plainly: Plainly
) -> None:
    path, prompts = sample_target(method, tmp_path, target_path, family), make_prompts(4)
    params, expected = mixed(4), plainly(family, method, path, prompts)
    with LLM(path, fixed(drafter_settings(method, tmp_path, target_path, family)), **SMALL) as llm:
        assert llm.drafter is not None
        guide(llm.drafter, [p + e for p, e in zip(prompts, expected, strict=True)], llm.target.vocab_size)
        outputs = llm.generate(prompts, params)
    assert ids(outputs) == expected
    total = total_speculation(outputs)
    assert 0 < total.accepted < total.drafted


def test_every_cell_of_the_matrix_is_tested_above() -> None:
    """`outrider matrix` says what works; test_every_pair is what it rests on."""
    tested = {(tiny.FAMILIES[family].registered, method) for family, method in PAIRS}
    claimed = {(cell.target, cell.drafter) for cell in support_matrix() if cell.supported and cell.drafter != "oracle"}
    assert claimed <= tested, f"no test for {sorted(claimed - tested)}"


# ways of batching: name -> options of the engine
WAYS: dict[str, dict[str, Any]] = {
    "batch 1": {"max_num_seqs": 1},
    "batch 3": {"max_num_seqs": 3},
    "batch 16": {"max_num_seqs": 16},
    "chunked prefill": {"max_num_seqs": 2, "max_num_batched_tokens": 5},
    "preemption": {"max_num_seqs": 8},  # with a small cache, below
    "no prefix reuse": {"enable_prefix_caching": False},
}


# every drafter with one target; every kind of memory a target may have with a drafter that is often right
MEMORIES = ["llama", "mistral", "qwen2_window", "gpt_oss", "gemma4", "deepseek_v3", "step3p5", "nemotron_h", "qwen3_vl"]
SUITED = {method: family for family, method in PAIRS if family == "llama" or not suits(method, "llama")}
BATCHED = [(family, method) for method, family in SUITED.items()] + [(family, "oracle") for family in MEMORIES]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("family", "method"), BATCHED)
def test_every_way_of_batching(
    family: str, method: str, way: str, target_path: Callable[..., Path], tmp_path: Path, plainly: Plainly
) -> None:
    path, prompts = sample_target(method, tmp_path, target_path, family), make_prompts(16)
    # the same prompts again, longer: their beginnings are in the cache
    again = [prompt + prompt for prompt in prompts[:6]]
    expected = [plainly(family, method, path, prompts), plainly(family, method, path, again)]
    Oracle.truth = [p + e for p, e in zip(prompts + again, expected[0] + expected[1], strict=True)]
    options = {**SMALL, **WAYS[way]}
    settings = drafter_settings(method, tmp_path, target_path, family)
    if way in ("batch 3", "batch 16"):
        settings = fixed(settings)
    if way == "preemption":
        with LLM(path, settings, **options) as llm:
            options["kv_cache_memory"] = llm.budget.page_bytes * 40
        options["max_model_len"] = 64
    with LLM(path, settings, **options) as llm:
        outputs = [llm.generate(prompts, mixed(len(prompts))), llm.generate(again, mixed(len(again)))]
        assert [ids(each) for each in outputs] == expected
        scheduler = llm.engine.scheduler
        scheduler.pool.check()
        assert scheduler.pool.num_free == scheduler.pool.capacity, "pages leaked"
        if way == "preemption":
            assert scheduler.num_preemptions > 0
        if scheduler.limits.prefix_caching and way != "preemption":
            assert scheduler.prefixes.stats.hit > 0
    if method == "oracle":
        total = total_speculation(outputs[0] + outputs[1])
        assert 0 < total.accepted < total.drafted


def test_company_does_not_matter(target_path: Callable[..., Path]) -> None:
    """A request alone, in any company and in any order gives the same tokens."""
    path, prompts = target_path("qwen3"), make_prompts(9)
    params = [replace(SEEDED, seed=number) for number in range(9)]
    alone = [plain(path, [prompt], each)[0] for prompt, each in zip(prompts, params, strict=True)]
    order = [4, 7, 1, 0, 8, 2, 6, 3, 5]
    together = plain(path, [prompts[i] for i in order], [params[i] for i in order])
    assert together == [alone[i] for i in order]


def test_hit_rate_is_the_same_with_and_without_a_drafter(target_path: Callable[..., Path], tmp_path: Path) -> None:
    path = target_path("llama")
    system = list(range(10, 47))
    turns = [system + [100 + number] * 3 for number in range(4)]
    cached: dict[str, list[int]] = {}
    for method in ["none", *(method for method in METHODS if suits(method, "llama"))]:
        config = None if method == "none" else fixed(drafter_settings(method, tmp_path, target_path, "llama"))
        with LLM(path, config, **SMALL) as llm:
            cached[method] = []
            for turn in turns:
                (output,) = llm.generate([turn], GREEDY)
                follow = turn + output.outputs[0].token_ids + [7, 8, 9]
                (second,) = llm.generate([follow], GREEDY)
                cached[method] += [output.num_cached_tokens, second.num_cached_tokens]
    assert cached["none"][2] > 30, "nothing was reused, so the comparison says nothing"
    assert all(each == cached["none"] for each in cached.values()), cached


def test_drafts_do_not_suffer_from_prefix_hits_or_chunks(target_path: Callable[..., Path], tmp_path: Path) -> None:
    """The drafter's own cache is whole after a hit and across chunks: the same drafts, round by round."""
    path, prompt = target_path("llama"), list(range(20, 61))
    params = replace(GREEDY, trace=True)
    for method in ("eagle3", "draft_model"):
        config = fixed(drafter_settings(method, tmp_path, target_path, "llama"))
        with LLM(path, config, **SMALL) as llm:
            first, second = llm.generate([prompt], params)[0], llm.generate([prompt], params)[0]
        with LLM(path, config, max_num_seqs=1, max_num_batched_tokens=6, **SMALL) as llm:
            chunked = llm.generate([prompt], params)[0]
        assert second.num_cached_tokens == 40
        assert first.outputs[0].trace == second.outputs[0].trace == chunked.outputs[0].trace


def test_a_draft_model_that_is_the_target_is_always_right(target_path: Callable[..., Path]) -> None:
    path = target_path("llama")
    for params in (GREEDY, SEEDED):
        with LLM(path, {"method": "draft_model", "model": str(path)}, **SMALL) as llm:
            total = total_speculation(llm.generate(make_prompts(4), params))
        assert total.accepted == total.drafted, "sampling uses the same noise, so equal models agree"


def test_per_request_speculation(target_path: Callable[..., Path]) -> None:
    path, prompts = target_path("llama"), make_prompts(3)
    limits: list[int | None] = [0, 2, None]
    params = [replace(GREEDY, num_speculative_tokens=limit, trace=True) for limit in limits]
    with LLM(path, {"method": "draft_model", "model": str(path), "num_speculative_tokens": 4}, **SMALL) as llm:
        outputs = llm.generate(prompts, params)
    longest = [max(len(entry["draft"]) for entry in output.outputs[0].trace or []) for output in outputs]
    assert longest == [0, 2, 4]
    assert outputs[0].outputs[0].speculation == replace(Speculation(), rounds=23)
    assert ids(outputs) == plain(path, prompts, GREEDY)


options_strategy = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.5, 1.0, 1.7]),
        "top_p": st.sampled_from([1.0, 0.9, 0.3]),
        "top_k": st.sampled_from([0, 1, 5, 40]),
        "min_p": st.sampled_from([0.0, 0.1]),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "repetition_penalty": st.sampled_from([1.0, 1.3, 0.8]),
        "presence_penalty": st.sampled_from([0.0, 0.7, -0.5]),
        "frequency_penalty": st.sampled_from([0.0, 0.6]),
        "logit_bias": st.sampled_from([None, {5: 3.0, 9: -50.0}]),
        "bad_words": st.sampled_from([(), ([7],), ([7, 9], [11], [3, 4, 5])]),
        "allowed_token_ids": st.sampled_from([None, list(range(2, 90))]),
        "min_tokens": st.sampled_from([0, 6]),
        "max_tokens": st.integers(6, 20),
        "stop_token_ids": st.sampled_from([(), (20, 21, 22, 23, 24, 25)]),
        "ignore_eos": st.booleans(),
        "logprobs": st.sampled_from([None, 2]),
        "n": st.sampled_from([1, 2]),
        "num_speculative_tokens": st.sampled_from([None, 0, 2]),
    }
)


@pytest.fixture(scope="module")
def pair(target_path: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One engine without a drafter, one with a good draft model."""
    path = target_path("llama")
    with (
        LLM(path, None, **SMALL) as without,
        LLM(path, {"method": "draft_model", "model": str(target_path("llama", num_hidden_layers=3))}, **SMALL) as with_,
    ):
        yield without, with_


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(options=st.lists(options_strategy, min_size=1, max_size=4))
def test_every_sampling_option(options: list[dict[str, Any]], pair: tuple[LLM, LLM]) -> None:
    prompts = make_prompts(len(options))
    params = [SamplingParams(**each) for each in options]
    first, second = (llm.generate(prompts, params) for llm in pair)
    for a, b in zip(first, second, strict=True):
        for x, y in zip(a.outputs, b.outputs, strict=True):
            assert (x.token_ids, x.finish_reason, x.stop_reason) == (y.token_ids, y.finish_reason, y.stop_reason)
            for p, q in zip(x.logprobs or [], y.logprobs or [], strict=True):
                assert p.keys() == q.keys()
                assert all(abs(p[token].logprob - q[token].logprob) < 1e-4 for token in p)
