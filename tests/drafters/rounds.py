"""Runs a drafter in every round: several requests, prompts in chunks, prefix hits, drafts accepted and rejected."""

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from samples import guide

from outrider import LLM, SamplingParams
from outrider.drafters.feedback import FeedbackDrafter
from outrider.outputs import CompletionOutput

PROMPTS = [[7, 8, 9, 10, 11, 12, 13, 14, 15], [50, 60, 70]]
Expected = Callable[[list[int], int], tuple[list[int], list[torch.Tensor]]]  # text, count -> draft, logits


def generate(path: Path, settings: dict[str, Any], max_tokens: int = 44, **options: Any) -> list[CompletionOutput]:
    """Every other draft is replaced by one that is mostly right, so that some are accepted."""
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True, trace=True)
    common: dict[str, Any] = {"max_model_len": 160, "page_size": 4}
    truth = _truth(path, max_tokens)
    small = {"max_num_seqs": 2, "max_num_batched_tokens": 12}  # prompts come in chunks
    with LLM(path, {"num_speculative_tokens": 3, "adaptive": False, **settings}, **common, **small, **options) as llm:
        assert llm.drafter is not None
        guide(llm.drafter, truth, llm.target.vocab_size, skill=0.8)
        outputs, again = llm.generate(PROMPTS, params), llm.generate(PROMPTS[::-1], params)[::-1]
        assert again[0].num_cached_tokens > 0
    assert [o.outputs[0].trace for o in outputs] == [o.outputs[0].trace for o in again], "a prefix hit changed drafts"
    return [output.outputs[0] for output in outputs]


@functools.cache
def _truth(path: Path, max_tokens: int) -> list[list[int]]:
    params = SamplingParams(max_tokens=max_tokens, temperature=0, ignore_eos=True)
    with LLM(path, None, max_model_len=160, page_size=4) as llm:
        return [p + o.outputs[0].token_ids for p, o in zip(PROMPTS, llm.generate(PROMPTS, params), strict=True)]


def own_rounds(prompt: list[int], completion: CompletionOutput) -> Iterator[tuple[list[int], list[int]]]:
    """(text, draft) of every round in which the drafter's own proposal was judged."""
    text = prompt + completion.token_ids
    length = len(prompt) + 1  # the first token comes from the prompt's own pass
    for entry in completion.trace or []:
        if length % 2:
            yield text[:length], entry["draft"]
        length += entry["accepted"] + 1


def check_rounds(path: Path, settings: dict[str, Any], expected: Expected, **options: Any) -> None:
    completions = generate(path, settings, **options)
    accepted = [entry["accepted"] for completion in completions for entry in completion.trace or []]
    assert min(accepted) == 0
    assert max(accepted) == 3
    count = 0
    for prompt, completion in zip(PROMPTS, completions, strict=True):
        for text, draft in own_rounds(prompt, completion):
            assert draft == expected(text, len(draft))[0], f"after {len(text)} tokens"
            count += len(draft) > 0
    assert count >= 12


def check_logits(path: Path, settings: dict[str, Any], expected: Expected) -> None:
    """One request, every draft's logits."""
    seen: list[torch.Tensor] = []
    params = SamplingParams(max_tokens=16, temperature=0, ignore_eos=True, trace=True)
    with LLM(path, {"num_speculative_tokens": 3, "adaptive": False, **settings}, max_model_len=160, page_size=4) as llm:
        assert isinstance(llm.drafter, FeedbackDrafter)
        logits = llm.drafter.logits
        llm.drafter.native_chain = lambda drawn: None  # type: ignore[method-assign]
        llm.drafter.logits = lambda x: seen.append(logits(x)) or seen[-1]  # type: ignore[method-assign, func-returns-value]
        completion = llm.generate([PROMPTS[0]], params)[0].outputs[0]
    length = len(PROMPTS[0]) + 1
    text = PROMPTS[0] + completion.token_ids
    for number, entry in enumerate(completion.trace or []):
        _, wanted = expected(text[:length], len(entry["draft"]))
        for row, other in zip(seen[3 * number :], wanted, strict=False):
            difference = float((row[0] - other).abs().max())
            assert difference < 1e-4, (number, difference, float(other.abs().max()))
        length += entry["accepted"] + 1
    assert length > len(PROMPTS[0]) + 10
