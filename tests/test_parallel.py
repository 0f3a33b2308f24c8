"""Several ranks say what one says: every drafter, every sampling option, any way of batching."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
from samples import METHODS, drafter_settings, sample_target, suits
from test_conformance import SMALL, fixed, ids, make_prompts
from thread_ranks import ThreadWorkers

from outrider import LLM, SamplingParams, pair
from outrider.engine import engine
from outrider.llm import total_speculation

# greedy and seeded requests in the same rounds
PARAMS = [
    SamplingParams(max_tokens=16, temperature=0, ignore_eos=True),
    SamplingParams(max_tokens=16, temperature=0.8, seed=11, ignore_eos=True),
    SamplingParams(max_tokens=16, temperature=0.9, seed=5, top_p=0.8, ignore_eos=True, logprobs=2),
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


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_every_family(family: str, target_path: Callable[..., Path]) -> None:
    path = target_path(family)
    settings = fixed({"method": "draft_model", "model": str(path), "num_speculative_tokens": 2})
    expected = ids(generated(path, None))
    outputs = generated(path, settings, tensor_parallel_size=2)
    assert ids(outputs) == expected
    assert total_speculation(outputs).accepted > 0
