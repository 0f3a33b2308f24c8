"""Prefix reuse where layers are recurrent, on a CUDA device: snapshots taken inside recorded rounds."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from samples import drafter_settings, guide, sample_target

from outrider import LLM, SamplingParams
from outrider.certify.random_depth import RandomDepth
from outrider.llm import total_speculation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
FAMILIES = [name for name in tiny.FAMILIES if name.startswith("nemotron_h")]
LENGTHS = (1072, 2000, 2144, 3000, 3500)
GREEDY = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
SEEDED = replace(GREEDY, temperature=0.8, seed=3)
OPTIONS: dict[str, Any] = {"device": "cuda", "dtype": "float32", "max_model_len": 4096, "max_num_seqs": 8}


def random_text(length: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(3, tiny.VOCAB) for _ in range(length)]


@pytest.mark.parametrize("exact", [False, True], ids=["fast", "exact"])
@pytest.mark.parametrize("method", [None, "draft_model", "eagle3", "mtp", "pard"])
@pytest.mark.parametrize("family", FAMILIES)
def test_reuse_in_recorded_rounds(
    family: str, method: str | None, exact: bool, target_path: Callable[..., Path], tmp_path: Path
) -> None:
    """Prompts that come again, that part, and that go on with what was said; all at once too, with a drafter that rests
    and does not follow every text."""

    def target(family: str, seed: int = 0, **options: Any) -> Path:
        return target_path(family, seed, max_position_embeddings=8192, **options)

    path = sample_target(method or "", tmp_path, target, family)
    settings = None
    if method is not None:
        settings = {**drafter_settings(method, tmp_path, target, family), "force": True}
    options = {**OPTIONS, "exact": exact}
    prompts = [random_text(length, length) for length in LENGTHS]
    prompts += [prompts[1][:1500] + random_text(300, number) for number in (7, 8)]
    params = [GREEDY if number % 2 else SEEDED for number in range(len(prompts))]
    with LLM(path, None, enable_prefix_caching=False, **options) as llm:
        plain = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
        turns = [prompt + answer + [7, 8] for prompt, answer in zip(prompts, plain, strict=True)]
        plain += [output.outputs[0].token_ids for output in llm.generate(turns, params)]
    with LLM(path, settings, **options) as llm:
        if llm.drafter is not None:
            truth = [text + answer for text, answer in zip(prompts + turns, plain, strict=True)]
            guide(llm.drafter, truth, llm.target.vocab_size)
        first = [llm.generate([text], each)[0] for text, each in zip(prompts, params, strict=True)]
        second = [llm.generate([text], each)[0] for text, each in zip(prompts, params, strict=True)]
        turned = [llm.generate([text], each)[0] for text, each in zip(turns, params, strict=True)]
        assert [output.num_cached_tokens for output in first] == [0] * 5 + [1024, 1488]
        assert [output.num_cached_tokens for output in second] == [(len(text) - 1) // 16 * 16 for text in prompts]
        for prompt, output in zip(prompts, turned, strict=True):
            assert output.num_cached_tokens >= (len(prompt) - 1) // 16 * 16
        if llm.drafter is not None:
            total = total_speculation(second)
            assert 0 < total.accepted < total.drafted
        with llm.engine.drafting_with(RandomDepth(llm.engine.lookahead, 1, 64, followed=0.7)):
            together = [llm.generate(prompts + turns, params + params) for _ in range(3)]
        assert llm.engine.num_recorded_rounds > 0
        assert llm.engine.scheduler.snapshots is not None
        llm.engine.scheduler.snapshots.pool.check()
    for outputs in (first, second):
        assert [output.outputs[0].token_ids for output in outputs] == plain[: len(prompts)]
    assert [output.outputs[0].token_ids for output in turned] == plain[len(prompts) :]
    for outputs in together:
        assert [output.outputs[0].token_ids for output in outputs] == plain
