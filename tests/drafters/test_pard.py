"""PARD: a draft model that guesses all tokens at once, against Hugging Face's own model over text and masks."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from parallel_reference import check_rounds, run, spy
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.drafters import draft_model
from outrider.types import Resolved

MASK = 77
PROMPTS = [[7, 8, 9, 10, 11, 12, 13, 14, 15], [50, 60, 70], list(range(30, 51))]
GREEDY = SamplingParams(max_tokens=45, temperature=0, ignore_eos=True, trace=True)
SEEDED = SamplingParams(max_tokens=45, temperature=0.7, seed=5, ignore_eos=True, trace=True)
# name: (family of the draft model, its options, sampling)
MODELS: dict[str, tuple[str, dict[str, Any], SamplingParams]] = {
    "llama": ("llama", {"num_hidden_layers": 2, "pard_token": MASK}, SEEDED),
    "a window shorter than the draft": ("mistral", {"sliding_window": 3, "pard_token": MASK}, GREEDY),
    "recurrent": ("nemotron_h", {"mask_token_id": MASK}, GREEDY),
    "a mask beyond the target's vocabulary": (
        "qwen3",
        {"vocab_size": tiny.VOCAB + 8, "ptd_token_id": tiny.VOCAB + 3},
        SEEDED,
    ),
    "nested": ("gemma3_vision", {"pard_token": MASK}, GREEDY),
}


def reference(family: str, mask: int, overrides: dict[str, Any]) -> Callable[[list[int], int, int], Tensor]:
    model = tiny.reference(family, **overrides)

    @torch.no_grad()
    def logits(text: list[int], length: int, count: int) -> Tensor:
        ids = torch.tensor([text[:length] + [mask] * (count - 1)])
        return model(input_ids=ids, use_cache=False).logits[0, -count:, : tiny.VOCAB]

    return logits


@pytest.mark.parametrize("name", MODELS)
def test_every_round_equals_the_dense_reference(
    name: str, target_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks of a prompt, two requests at a time, the third entering when one leaves."""
    family, overrides, params = MODELS[name]
    (mask,) = [value for key, value in overrides.items() if "token" in key]
    seen = spy(monkeypatch, draft_model)
    model = str(target_path(family, **overrides))
    settings = {"method": "draft_model", "parallel_drafting": True, "model": model, "num_speculative_tokens": 4}
    outputs = run(target_path("llama"), settings, PROMPTS, params, max_num_seqs=2, max_num_batched_tokens=10)
    check_rounds(outputs, PROMPTS, seen, reference(family, mask, overrides), params=params, sharpness=1.0)


def test_fewer_tokens_than_the_method_may_draft(
    target_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    overrides = {"num_hidden_layers": 2, "pard_token": MASK}
    seen = spy(monkeypatch, draft_model)
    settings = {"parallel_drafting": True, "model": str(target_path("llama", **overrides))}
    params = [replace(GREEDY, num_speculative_tokens=limit) for limit in (2, 1)]
    with LLM(target_path("llama"), settings, max_model_len=96) as llm:
        outputs = llm.generate(PROMPTS[:2], params)
    check_rounds(outputs, PROMPTS[:2], seen, reference("llama", MASK, overrides))


def test_the_first_token_is_the_one_of_a_plain_draft_model(target_path: Callable[..., Path]) -> None:
    """Nothing is masked before it; so a draft model that is the target is right about it in every round."""
    path = target_path("llama", pard_token=MASK)
    settings = {"method": "draft_model", "parallel_drafting": True, "model": str(path), "num_speculative_tokens": 3}
    with LLM(path, settings, max_model_len=96) as llm:
        (output,) = llm.generate([PROMPTS[0]], SEEDED)
        assert llm.drafter is not None
        assert llm.drafter.provenance()["mask_token"] == Resolved(MASK, "config.json pard_token")
    rounds = output.outputs[0].trace or []
    assert all(entry["accepted"] for entry in rounds if entry["draft"])


BROKEN = {
    "no mask token": ({}, "must give the mask token's id as one of"),
    "two mask tokens": ({"pard_token": 5, "ptd_token_id": 6}, "pard_token says 5, config.json ptd_token_id says 6"),
    "mask token out of range": ({"pard_token": tiny.VOCAB}, f"ids are 0..{tiny.VOCAB - 1}"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_refused(name: str, target_path: Callable[..., Path]) -> None:
    config, message = BROKEN[name]
    model = str(target_path("llama", num_hidden_layers=2, **config))
    with pytest.raises(ValueError, match=message):
        LLM(target_path("llama"), {"method": "draft_model", "parallel_drafting": True, "model": model})
