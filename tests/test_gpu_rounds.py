"""Recorded rounds on a CUDA device: the same as step by step, whoever comes and goes, and nothing is left behind."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from samples import METHODS, drafter_settings, guide, sample_target, suits
from tiny import FAMILIES

from outrider import LLM, SamplingParams
from outrider.certify.random_depth import RandomDepth
from outrider.llm import total_speculation
from outrider.sampling_params import Speculation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
VARIED = [
    GREEDY,
    replace(GREEDY, temperature=0.8, seed=5),
    replace(GREEDY, temperature=1.0, seed=6, top_p=0.9, top_k=20),
    replace(GREEDY, temperature=0.7, seed=7, num_speculative_tokens=1, max_tokens=9),
    replace(GREEDY, repetition_penalty=1.3),
    replace(
        GREEDY,
        temperature=0.9,
        seed=8,
        logit_bias={9: 3.0},
        bad_words=[[7, 8], [41]],
        min_tokens=30,
        stop_token_ids=[6, 9, 41],
        presence_penalty=0.5,
    ),
    replace(GREEDY, bad_words=[[number, 9] for number in range(40)]),  # too many for a recording
]
PROMPTS = [[5, 6, 7, 8, 9] * 3, [40, 41], list(range(60, 90)), [3] * 20, [11, 12, 13], [90, 91, 92], [8, 9]]


# every drafter with one target; every kind of memory a target may have with a drafter that is often right
SUITED = [(method, next(each for each in ("llama", *FAMILIES) if suits(method, each))) for method in METHODS]
MEMORIES = ["qwen3_moe", "gpt_oss", "gemma3", "gemma4_moe", "nemotron_h_latent", "deepseek_v2", "deepseek_v3",
            "step3p5", "qwen2_5_vl", "qwen3_vl", "qwen2_window"]  # fmt: skip
PAIRS = [(None, "llama"), *SUITED, *(("oracle", family) for family in MEMORIES)]


def answers(llm: LLM, params: list[SamplingParams]) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


def all_answers(llm: LLM) -> list[list[list[int]]]:
    return [answers(llm, [each] * len(PROMPTS)) for each in VARIED] + [answers(llm, VARIED)]


@pytest.mark.parametrize(("method", "family"), PAIRS)
def test_recorded_rounds_are_steps(
    method: str | None, family: str, target_path: Callable[..., Path], tmp_path: Path
) -> None:
    path = sample_target(method or "", tmp_path, target_path, family)
    options = {"device": "cuda", "dtype": "float32", "max_model_len": 128}
    with LLM(path, None, enforce_eager=True, **options) as llm:
        plain = all_answers(llm)
    truth = [prompt + tokens for each in plain for prompt, tokens in zip(PROMPTS, each, strict=True)]
    settings = None if method is None else drafter_settings(method, tmp_path, target_path, family)
    for eager in (True, False):
        with LLM(path, settings, enforce_eager=eager, **options) as llm:
            if llm.drafter is not None:
                guide(llm.drafter, truth, llm.target.vocab_size)
            assert all_answers(llm) == plain
            recorded = llm.engine.num_recorded_rounds
            assert (recorded > 0) is (not eager and (llm.drafter is None or llm.drafter.recordable))
            if method is not None and method != "oracle":  # drafters with memory, or with none to keep
                with llm.engine.drafting_with(restless := RandomDepth(llm.engine.lookahead)):
                    assert all_answers(llm) == plain
                assert restless.num_rests > 1


def test_logprobs_of_recorded_rounds(target_path: Callable[..., Path], tmp_path: Path) -> None:
    settings = drafter_settings("eagle3", tmp_path, target_path, "llama")
    params, found = replace(GREEDY, logprobs=3), []
    for eager in (True, False):
        with LLM(target_path("llama"), settings, device="cuda", dtype="float32", max_model_len=128,
                 enforce_eager=eager) as llm:  # fmt: skip
            rows = [output.outputs[0].logprobs for output in llm.generate(PROMPTS, params)]
            found.append([[{token: one.logprob for token, one in row.items()} for row in each or []] for each in rows])
    for own, other in zip(*found, strict=True):
        assert [list(row) for row in own] == [list(row) for row in other]
        pairs = zip(own, other, strict=True)
        assert all(row[token] == pytest.approx(twin[token], abs=1e-4) for row, twin in pairs for token in row)


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3"])
def test_exact_bits(family: str, target_path: Callable[..., Path], tmp_path: Path) -> None:
    """In bfloat16: alone, together, with a drafter, in small chunks, from the prefix cache. Log-probabilities too."""
    settings = drafter_settings("eagle3", tmp_path, target_path, family)
    params = [replace(each, logprobs=1) for each in VARIED]
    sides = [(None, {}), (settings, {}), (settings, {"max_num_batched_tokens": 32}), (None, {"max_num_seqs": 2})]
    found = []
    for config, options in sides:
        with LLM(target_path(family), config, device="cuda", dtype="bfloat16", max_model_len=128, exact=True,
                 **options) as llm:  # fmt: skip
            for _ in range(2):
                outputs = [output.outputs[0] for output in llm.generate(PROMPTS, params)]
                found.append([(out.token_ids, [next(iter(row.values())).logprob for row in out.logprobs or []])
                              for out in outputs])  # fmt: skip
    assert all(each == found[0] for each in found)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_exact_bits_in_any_company(head_dim: int, target_path: Callable[..., Path]) -> None:
    """How attention is computed otherwise goes by the size of heads, and by how many requests there are: 40, which is
    more than any form for few is for, or three at a time; with drafts and in small chunks."""
    chance = random.Random(0)
    parts = [[chance.randrange(5, 90) for _ in range(chance.randrange(3, 30))] for _ in range(40)]
    prompts, params = [part * 8 for part in parts], replace(GREEDY, max_tokens=24, logprobs=1)
    ngram = {"method": "ngram", "num_speculative_tokens": 4}
    sides = [(None, {}), (ngram, {}), (None, {"max_num_seqs": 3}), (ngram, {"max_num_batched_tokens": 64})]
    found, total = [], Speculation()
    for config, options in sides:
        with LLM(target_path("llama", head_dim=head_dim), config, device="cuda", dtype="bfloat16", max_model_len=320,
                 exact=True, **{"max_num_seqs": 64, **options}) as llm:  # fmt: skip
            outputs = llm.generate(prompts, params)
            found.append([(each.outputs[0].token_ids,
                           [next(iter(row.values())).logprob for row in each.outputs[0].logprobs or []])
                          for each in outputs])  # fmt: skip
            total += total_speculation(outputs)
    assert all(each == found[0] for each in found)
    assert 0 < total.accepted < total.drafted


def test_soak(target_path: Callable[..., Path], tmp_path: Path) -> None:
    """A thousand requests come and go, some of them early: pages, slots and memory come back."""
    settings = drafter_settings("eagle3", tmp_path, target_path, "llama")
    chance = random.Random(0)
    with LLM(target_path("llama"), settings, device="cuda", dtype="bfloat16", max_model_len=96,
             max_num_seqs=24) as llm:  # fmt: skip
        engine, pool = llm.engine, llm.engine.scheduler.pool

        def requests(count: int) -> list:
            made = []
            for number in range(count):
                prompt = [chance.randrange(5, 90) for _ in range(chance.randrange(1, 40))]
                params = replace(chance.choice(VARIED[:5]), max_tokens=chance.randrange(1, 40))
                made += llm.requests_for(prompt, params, number)
            return made

        def run(waiting: list) -> None:
            running: list = []
            while waiting or engine.has_work:
                for _ in range(min(len(waiting), chance.randrange(4))):
                    running.append(waiting.pop())
                    engine.add(running[-1])
                engine.step()
                if running and chance.random() < 0.05:
                    engine.abort(running.pop(chance.randrange(len(running))))

        run(requests(200))
        torch.cuda.synchronize()
        memory, free = torch.cuda.memory_allocated(), pool.num_free
        assert free == pool.capacity
        wanted = requests(1000)
        run(list(wanted))
        torch.cuda.synchronize()
        assert all(request.finished for request in wanted)
        assert pool.num_free == free
        assert torch.cuda.memory_allocated() <= memory + 2**20


def test_warm_up_records_what_comes_first(target_path: Callable[..., Path], tmp_path: Path) -> None:
    settings = drafter_settings("eagle3", tmp_path, target_path, "llama")
    with LLM(target_path("llama"), settings, device="cuda", dtype="float32", max_model_len=128) as llm:
        expected = answers(llm, [GREEDY] * len(PROMPTS))
    with LLM(target_path("llama"), settings, device="cuda", dtype="float32", max_model_len=128) as llm:
        llm.warm_up()
        assert llm.engine.scheduler.pool.num_free == llm.engine.scheduler.pool.capacity
        recorded = llm.engine.num_recordings
        assert answers(llm, [GREEDY] * len(PROMPTS)) == expected
        assert llm.engine.num_recordings == recorded > 0


@pytest.mark.parametrize("drafter", [None, {"method": "ngram", "prompt_lookup_min": 1, "force": True}, "auto"])
def test_guided_requests_are_in_recorded_rounds(drafter: Any) -> None:
    """The same text as without recordings and without a drafter, for every kind of sampling; and nothing is recorded in
    the middle of it."""
    options: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_model_len": 128, "max_num_seqs": 6}
    guided = pytest.importorskip("test_guided_rounds").KINDS  # which needs xgrammar
    prompts = ["Is it so? yes and no and", "Once upon a time"] * len(guided)
    kinds = [kind for kind in guided.values() for _ in range(2)]
    with LLM(None, None, enforce_eager=True, **options) as llm:
        plain = [output.outputs[0].token_ids for output in llm.generate(prompts, kinds)]
    with LLM(None, drafter, **options) as llm:
        llm.warm_up()
        recorded, before = llm.engine.num_recordings, llm.engine.num_recorded_rounds
        outputs = []
        for _ in range(3):  # the governor may find that drafts do not pay
            outputs += llm.generate(prompts, kinds)
            assert [output.outputs[0].token_ids for output in outputs[-len(plain) :]] == plain
        assert llm.engine.num_recordings == recorded
        assert llm.engine.num_recorded_rounds > before + 30
        if drafter is not None:
            total = total_speculation(outputs)
            assert 0 < total.accepted < total.drafted
