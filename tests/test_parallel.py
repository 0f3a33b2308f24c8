"""Several ranks say what one says: every drafter, every sampling option, any way of batching."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from samples import METHODS, drafter_settings, sample_target, suits
from test_conformance import MEMORIES, SMALL, fixed, ids, make_prompts
from test_vision import prompts_of
from test_vision import vision_path as vision_path
from thread_ranks import ThreadWorkers

from outrider import LLM, SamplingParams, pair
from outrider.engine import engine
from outrider.engine.policy import FixedDepth
from outrider.engine.round import CHECKS
from outrider.engine.team import RankLostError
from outrider.kernels.filters import Filter, filters
from outrider.llm import total_speculation

# greedy and seeded requests in the same rounds
PARAMS = [
    SamplingParams(max_tokens=16, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=16, temperature=0.8, seed=11, ignore_eos=True),
    SamplingParams(max_tokens=16, temperature=0.9, seed=5, ignore_eos=True, logprobs=2),
]


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are threads, but for the tests below that say otherwise."""
    monkeypatch.setattr(pair, "take_workers", ThreadWorkers)
    for module in (pair, engine):
        monkeypatch.setattr(module, "return_workers", ThreadWorkers.end)


def generated(path: Path, settings: dict[str, Any] | None, params: Any = PARAMS, **options: Any) -> Any:
    with LLM(path, settings, **{**SMALL, **options}) as llm:
        return llm.generate(make_prompts(len(params)), params)


SUITED = {method: family for family in tiny.FAMILIES for method in METHODS if suits(method, family)}
FIRST = {method: "llama" if suits(method, "llama") else family for method, family in SUITED.items()}


# 3 divides few sizes: as many heads and groups as it needs
THREE: dict[str, dict[str, Any]] = {
    "llama": {"num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 96},
    "gemma3": {"num_attention_heads": 3, "num_key_value_heads": 1, "hidden_size": 96},
    "gemma4": {"num_attention_heads": 6, "num_key_value_heads": 3},
    "gpt_oss": {"num_attention_heads": 6, "num_key_value_heads": 1},
    "nemotron_h": {"num_attention_heads": 3, "num_key_value_heads": 1, "n_groups": 3},
    "deepseek_v2_lite": {"num_attention_heads": 6, "num_key_value_heads": 6, "hidden_size": 96},
    "deepseek_v3": {"num_attention_heads": 3, "num_key_value_heads": 3},
}


@pytest.mark.parametrize("family", THREE)
def test_three_ranks(family: str, target_path: Callable[..., Path]) -> None:
    path = target_path(family, vocab_size=257, **THREE[family], **_of_vocabulary(family))
    settings = fixed({"method": "draft_model", "model": str(path), "num_speculative_tokens": 2})
    expected = ids(generated(path, None))
    assert ids(generated(path, {**settings, "draft_tensor_parallel_size": 3}, tensor_parallel_size=3)) == expected


def _of_vocabulary(family: str) -> dict[str, Any]:
    return {"vocab_size_per_layer_input": 257} if family == "gemma4" else {}


@pytest.mark.parametrize("draft_size", [1, 2])
@pytest.mark.parametrize(("method", "family"), FIRST.items())
def test_every_drafter(
    method: str, family: str, draft_size: int, target_path: Callable[..., Path], tmp_path: Path
) -> None:
    """It drafts what it drafts on one rank, whether it is split or not: so does every rank."""
    path = sample_target(method, tmp_path, target_path, family)
    settings = fixed(drafter_settings(method, tmp_path, target_path, family))
    traced = [SamplingParams(**{**vars(each), "trace": True}) for each in PARAMS]
    alone, split = (
        generated(path, {**settings, "draft_tensor_parallel_size": size}, traced, tensor_parallel_size=size_of_target)
        for size, size_of_target in ((1, 1), (draft_size, 2))
    )
    assert ids(split) == ids(alone)
    assert [output.outputs[0].trace for output in split] == [output.outputs[0].trace for output in alone]
    assert total_speculation(split).drafted > 0


@pytest.mark.parametrize("family", [*MEMORIES, "gemma3", "qwen3_moe"])
def test_every_kind_of_memory(family: str, target_path: Callable[..., Path]) -> None:
    path = target_path(family)
    settings = fixed({"method": "draft_model", "model": str(path), "num_speculative_tokens": 2})
    expected = ids(generated(path, None))
    outputs = generated(path, settings, tensor_parallel_size=2)
    assert ids(outputs) == expected
    assert total_speculation(outputs).accepted > 0


OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0.0, "repetition_penalty": 1.3, "presence_penalty": 0.7, "logprobs": 3},
    {"temperature": 1.0, "top_k": 5, "frequency_penalty": 0.6, "prompt_logprobs": 2},
    {"temperature": 1.7, "min_p": 0.1, "logit_bias": {5: 3.0, 9: -50.0, 250: 4.0}},
    {"temperature": 0.7, "bad_words": ([7], [7, 9], [200], [11, 130])},
    {"temperature": 1.2, "allowed_token_ids": [*range(2, 40), *range(120, 150), 255]},
    {"temperature": 0.5, "min_tokens": 6, "stop_token_ids": tuple(range(60, 200)), "ignore_eos": False},
    {"temperature": 0.9, "top_p": 0.5, "repetition_penalty": 0.8, "n": 2},
    {"temperature": 0.0, "prediction": tuple(range(20, 60))},
]


def test_every_sampling_option(target_path: Callable[..., Path]) -> None:
    """On a vocabulary of which each rank has a part, the last one's padded; all options together, and each alone."""
    path = target_path("llama", vocab_size=257)
    drafter = str(target_path("llama", vocab_size=257, num_hidden_layers=3))
    settings = fixed({"method": "draft_model", "model": drafter, "num_speculative_tokens": 3})
    params = [SamplingParams(**{"max_tokens": 12, "seed": 3, "ignore_eos": True, **each}) for each in OPTIONS]
    prompts = make_prompts(len(params))
    found = []
    for size in (1, 2):
        split = {**settings, "draft_tensor_parallel_size": size}
        with LLM(path, split, tensor_parallel_size=size, **SMALL) as llm:
            together = llm.generate(prompts, params)
            alone = [llm.generate([prompt], each)[0] for prompt, each in zip(prompts, params, strict=True)]
        assert ids(together) == ids(alone)
        found.append(together)
    for one, two in zip(*found, strict=True):
        assert ids([one]) == ids([two])
        assert [each.finish_reason for each in one.outputs] == [each.finish_reason for each in two.outputs]
        for left, right in zip(
            [*(one.outputs[0].logprobs or []), *(one.prompt_logprobs or [])],
            [*(two.outputs[0].logprobs or []), *(two.prompt_logprobs or [])],
            strict=True,
        ):
            assert (left or {}).keys() == (right or {}).keys()
            assert all(abs(left[token].logprob - right[token].logprob) < 1e-4 for token in left or {})


class AtLeast(Filter):
    """Tokens of at least this probability."""

    @staticmethod
    def keeps(probs: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return probs >= value[:, None]


@pytest.mark.parametrize("sizes", [(2, 1), (1, 2)])
def test_a_filter_of_somebodys_own(
    sizes: tuple[int, int], target_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every rank must hear of it: nothing but the likeliest token passes 1, so sampling becomes greedy."""
    assert list(filters) == []  # entry points have been looked for
    monkeypatch.setitem(filters._entries, "at_least", AtLeast)
    free = SamplingParams(temperature=2.0, seed=1, max_tokens=12, ignore_eos=True)
    params = [free, replace(free, extra_args={"at_least": 1.0}), replace(free, extra_args={"at_least": 0.02})]
    params.append(replace(free, temperature=0))
    found = []
    for ranks, stages in ((1, 1), sizes):
        both = {"tensor_parallel_size": ranks, "pipeline_parallel_size": stages}
        with LLM(target_path("llama", vocab_size=257), fixed({"method": "ngram"}), **both, **SMALL) as llm:
            found.append(ids(llm.generate(make_prompts(1) * 4, params)))
    assert found[0] == found[1]
    assert found[0][1] == found[0][3] != found[0][0] != found[0][2]


def test_predictions(target_path: Callable[..., Path]) -> None:
    """Which rank 0 alone knows: what it drafts from them is everybody's draft, and nobody waits for anybody."""
    path, prompts = target_path("llama"), make_prompts(2)
    drafter = str(target_path("llama", num_hidden_layers=3))
    settings = fixed({"method": "draft_model", "model": drafter, "draft_tensor_parallel_size": 2})
    plain = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True)
    expected = ids(generated(path, None, [plain] * 2))
    predicted = [replace(plain, prediction=(*answer[:9], 7, 7)) for answer in expected]
    with LLM(path, settings, tensor_parallel_size=2, **SMALL) as llm:
        outputs = llm.generate(prompts, predicted) + llm.generate(prompts, [predicted[0], plain])
    assert ids(outputs) == expected * 2
    assert total_speculation(outputs).accepted_predicted > 10


@pytest.mark.parametrize("family", ["llama", "nemotron_h"])
def test_traffic(family: str, target_path: Callable[..., Path]) -> None:
    """Prompts in chunks, requests that come and go and start over, pages and states that are found again."""
    path, prompts = target_path(family), make_prompts(10)
    again = [prompt + prompt for prompt in prompts[:4]]
    options = {**SMALL, "max_num_seqs": 4, "max_num_batched_tokens": 9, "max_model_len": 64}
    with LLM(path, None, **options) as llm:
        num_bytes = llm.budget.page_bytes * 24
    found = []
    for size in (1, 2, 1):
        settings = {"method": "ngram", "prompt_lookup_min": 1} if size == 2 else None
        with LLM(path, settings, tensor_parallel_size=size, kv_cache_memory=num_bytes // size, **options) as llm:
            params = SamplingParams(max_tokens=20, temperature=0.8, seed=2, ignore_eos=True)
            found.append(ids(llm.generate(prompts, params)))
            assert llm.engine.scheduler.num_preemptions > 0
            for prompt in again[:2]:  # one after the other, so that pages are still there
                found[-1] += ids(llm.generate([prompt] * 2, params))
            assert llm.engine.scheduler.prefixes.stats.hit > 0
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("method", ["eagle3", "draft_model"])
def test_a_drafter_that_rests(method: str, target_path: Callable[..., Path], tmp_path: Path) -> None:
    """What it has missed, it sees later on all ranks."""
    path, prompts = target_path("llama"), make_prompts(2)
    settings = fixed(drafter_settings(method, tmp_path, target_path, "llama"))
    params = SamplingParams(max_tokens=30, temperature=0, ignore_eos=True, trace=True)
    found = []
    for size in (1, 2):
        with LLM(path, settings, tensor_parallel_size=size, **SMALL) as llm:
            requests = [request for prompt in prompts for request in llm.requests_for(prompt, params, 0)]
            for request in requests:
                llm.engine.add(request)
            llm.engine.step()
            resting = FixedDepth(0)
            with_drafts, llm.engine.drafting.policy = llm.engine.drafting.policy, resting
            for _ in range(6):
                llm.engine.step()
            llm.engine.drafting.policy = with_drafts
            while llm.engine.has_work:
                llm.engine.step()
        found.append([(request.tokens, request.trace) for request in requests])
    assert found[0] == found[1]
    assert any(entry["draft"] for _, trace in found[0] for entry in trace)


def test_what_cannot_be_split_is_named(target_path: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="num_attention_heads = 4 cannot be split over 3 ranks"):
        LLM(target_path("llama"), None, tensor_parallel_size=3, **SMALL)
    with pytest.raises(ValueError, match=r"n_groups = 2 cannot be split over 3 ranks"):
        LLM(target_path("nemotron_h"), None, tensor_parallel_size=3, **SMALL)
    settings = {"method": "draft_model", "model": str(target_path("llama")), "draft_tensor_parallel_size": 3}
    with pytest.raises(ValueError, match="draft_tensor_parallel_size must be 1 or 2"):
        LLM(target_path("llama"), settings, tensor_parallel_size=2, **SMALL)


STAGED = {"ngram": "llama", "suffix": "llama", **FIRST}


@pytest.mark.parametrize(("method", "family"), STAGED.items())
def test_a_pipeline_with_every_drafter(
    method: str, family: str, target_path: Callable[..., Path], tmp_path: Path
) -> None:
    """Taps come from all stages, and the drafter drafts what it drafts where all layers are in one place."""
    path = sample_target(method, tmp_path, target_path, family)
    settings = fixed(drafter_settings(method, tmp_path, target_path, family))
    traced = [SamplingParams(**{**vars(each), "trace": True}) for each in PARAMS]
    alone, staged = (generated(path, settings, traced, pipeline_parallel_size=size) for size in (1, 2))
    assert ids(staged) == ids(alone)
    assert [output.outputs[0].trace for output in staged] == [output.outputs[0].trace for output in alone]
    assert total_speculation(staged).drafted > 0


@pytest.mark.parametrize(
    ("sizes", "family", "method"),
    [
        ((1, 3), "nemotron_h", "eagle3"),
        ((1, 3), "nemotron_h", "p_eagle"),
        ((1, 3), "nemotron_h", "dflash"),
        ((2, 2), "nemotron_h", "draft_model"),
        ((2, 1), "gemma3", "eagle3"),
        ((2, 1), "gemma4", "eagle3"),
        ((2, 2), "gemma3", "eagle3"),
        ((1, 2), "gemma4", "eagle3"),
        ((1, 2), "deepseek_v3", "mtp"),
        ((1, 3), "qwen3_moe", "eagle3"),
        ((2, 2), "gpt_oss", "dflash"),
        ((1, 3), "llama", "ngram+eagle3"),
    ],
)
def test_stages_and_ranks_together(
    sizes: tuple[int, int], family: str, method: str, target_path: Callable[..., Path], tmp_path: Path
) -> None:
    path = sample_target(method, tmp_path, target_path, family)
    settings = fixed(drafter_settings(method.rpartition("+")[2], tmp_path, target_path, family))
    ranks, stages = sizes
    found = [
        generated(path, {**settings, "method": method}, tensor_parallel_size=each[0], pipeline_parallel_size=each[1])
        for each in ((1, 1), (ranks, stages))
    ]
    assert ids(found[0]) == ids(found[1])
    assert total_speculation(found[1]) == total_speculation(found[0])


@pytest.mark.parametrize("stages", [2, 3])
def test_sampling_options_in_stages(stages: int, target_path: Callable[..., Path]) -> None:
    path, prompts = target_path("llama"), make_prompts(len(OPTIONS))
    settings = fixed({"method": "draft_model", "model": str(target_path("llama", num_hidden_layers=3))})
    params = [SamplingParams(**{"max_tokens": 12, "seed": 3, "ignore_eos": True, **each}) for each in OPTIONS]
    found = []
    for size in (1, stages):
        with LLM(path, settings, pipeline_parallel_size=size, **SMALL) as llm:
            found.append(llm.generate(prompts, params))
    for one, other in zip(*found, strict=True):
        assert ids([one]) == ids([other])
        assert one.outputs[0].logprobs == other.outputs[0].logprobs
        assert one.prompt_logprobs == other.prompt_logprobs


@pytest.mark.parametrize(("family", "sizes"), [("gemma3_vision", (2, 1)), ("qwen3_vl", (1, 2))])
def test_images(family: str, sizes: tuple[int, int], vision_path: Callable[[str], Path]) -> None:
    """What stands in their place, and where they are, all ranks are told."""
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    found = []
    for ranks, stages in ((1, 1), sizes):
        with LLM(
            vision_path(family), {"method": "ngram"}, tensor_parallel_size=ranks, pipeline_parallel_size=stages, **SMALL
        ) as llm:
            found.append(ids(llm.generate(prompts_of(family), params)))
    assert found[0] == found[1]


def test_ranks_that_do_not_remember_the_same_are_noticed(
    monkeypatch: pytest.MonkeyPatch, target_path: Callable[..., Path]
) -> None:
    monkeypatch.setenv(CHECKS, "1")
    path, settings = target_path("llama"), {"method": "ngram", "prompt_lookup_min": 1}
    assert ids(generated(path, settings, tensor_parallel_size=2)) == ids(generated(path, settings))
    with LLM(path, None, tensor_parallel_size=2, **SMALL) as llm:
        llm.engine.cache.state.tokens[:, 40] = 9  # where no request will come
        with pytest.raises((RuntimeError, RankLostError), match=r"do not remember the same|a rank did not come"):
            llm.generate(make_prompts(1), PARAMS[0])
