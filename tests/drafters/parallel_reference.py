"""Parallel drafting without a cache: the whole text and the masks in one dense causal pass, anew in every round."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import eagle3_reference as slow
import pytest
import torch
import torch.nn.functional as F
from samples import guide
from torch import Tensor

from outrider import LLM, RequestOutput, SamplingParams
from outrider.drafters.base import SHARPNESS
from outrider.drafters.parallel import draft_at_once
from outrider.kernels.sampling import gumbel
from outrider.types import Draft, Step

Seen = dict[tuple[int, ...], Tensor]  # a text -> the draft's logits after it


def p_eagle_logits(
    head: slow.Head, tokens: list[int], taps: Tensor, embed: Tensor, lm_head: Tensor, mask_token: int, count: int
) -> Tensor:
    """[count, V] after `tokens`; taps [len(tokens) - 1, k, H] of the target."""
    mask = head.tensors["mask_hidden"].reshape(1, *taps.shape[1:])
    states = torch.cat([slow.combine(head, taps), slow.combine(head, mask).expand(count - 1, -1)])
    ids = torch.tensor(tokens[1:] + [mask_token] * (count - 1))
    normed, _ = slow.network(head, F.embedding(ids, embed), states)
    return F.linear(normed[-count:], lm_head) * head.logit_scale


def spy(monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> Seen:
    """Everything a drafter computes from now on, before a guide replaces some of it."""
    seen: Seen = {}

    def watched(step: Step, lookahead: int, logits: Tensor, ids: Tensor | None = None, **more: float) -> Draft:
        each = logits.view(len(step.batch.slots), step.depth, -1)
        for request, slot in enumerate(step.batch.slots.tolist()):
            if bool(step.emits[request]):
                text = step.state.tokens[slot, : int(step.state.lengths[slot])].tolist()
                seen[tuple(text)] = each[request].clone()
        return draft_at_once(step, lookahead, logits, ids, **more)

    monkeypatch.setattr(module, "draft_at_once", watched)
    return seen


def run(
    path: Path, settings: dict[str, Any], prompts: list[list[int]], params: SamplingParams, **options: Any
) -> list[RequestOutput]:
    """A generation in which rounds accept now nothing, now something, now everything. The same again, from what is
    in the cache then, goes the same way."""
    common = {"max_model_len": 96, "page_size": 4, "snapshot_interval": 16}
    with LLM(path, None, **common) as llm:
        truth = [p + o.outputs[0].token_ids for p, o in zip(prompts, llm.generate(prompts, params), strict=True)]
    with LLM(path, {**settings, "adaptive": False}, **{**common, **options}) as llm:
        assert llm.drafter is not None
        guide(llm.drafter, truth, llm.target.vocab_size)
        outputs, again = llm.generate(prompts, params), llm.generate(prompts, params)
        assert any(output.num_cached_tokens for output in again)
    assert [output.outputs[0].trace for output in again] == [output.outputs[0].trace for output in outputs]
    assert [p + o.outputs[0].token_ids for p, o in zip(prompts, outputs, strict=True)] == truth
    accepted = {entry["accepted"] for output in outputs for entry in output.outputs[0].trace or []}
    assert len(accepted) > 3, "rounds are too much alike to say much"
    return outputs


def check_rounds(
    outputs: list[RequestOutput],
    prompts: list[list[int]],
    seen: Seen,
    reference: Callable[[list[int], int, int], Tensor],
    **options: Any,
) -> None:
    """Logits of every round, and the draft of those that the guide left alone, against `reference(text,
    length, count)`: the logits [count, V] after the first `length` tokens of a text."""
    for prompt, output in zip(prompts, outputs, strict=True):
        tokens, length = prompt + output.outputs[0].token_ids, len(prompt) + 1
        for entry in output.outputs[0].trace or []:
            logits = seen[tuple(tokens[:length])]
            expected = reference(tokens, length, len(logits))
            torch.testing.assert_close(logits[:, : expected.shape[1]], expected, atol=1e-4, rtol=1e-4)
            if length % 2:
                assert entry["draft"] == chosen(expected, length, **options)[: len(entry["draft"])], f"after {length}"
            length += entry["accepted"] + 1
        assert length >= len(prompt) + 40


def chosen(
    logits: Tensor,
    length: int,
    d2t: Tensor | None = None,
    params: SamplingParams | None = None,
    sharpness: float = SHARPNESS,
) -> list[int]:
    """The tokens that stand at `length`, `length + 1`, ..."""
    ids = torch.arange(logits.shape[1]) + (0 if d2t is None else d2t)
    if params is not None and params.temperature:
        seeds = torch.full((len(logits),), params.seed)
        noise = gumbel(seeds, length + torch.arange(len(logits)), ids)
        logits = logits * sharpness / params.temperature + noise
    return ids[logits.argmax(-1)].tolist()
