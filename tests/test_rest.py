"""A drafter that rests at any time, drafts at any depth, and is shown what it has missed: nothing that is said depends
on it, and neither does any draft that it makes afterwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from samples import METHODS, drafter_settings, guide, sample_target, suits

from outrider import LLM, SamplingParams
from outrider.certify.random_depth import RandomDepth
from outrider.engine import memory
from outrider.engine.policy import FixedDepth
from outrider.llm import total_speculation
from outrider.types import Draft, Hidden, Step, Verdict

PARAMS = SamplingParams(max_tokens=90, temperature=0, ignore_eos=True)
VARIED = [PARAMS, replace(PARAMS, temperature=0.8, seed=5), replace(PARAMS, temperature=0.9, seed=6, max_tokens=50)]
PROMPTS = [[5, 6, 7, 8, 9] * 3, [40, 41], list(range(60, 90))]
SIZES: dict[str, Any] = {"max_model_len": 160, "page_size": 8, "snapshot_interval": 16, "device": "cpu"}
NUM_MISSABLE = 20  # so that texts need not be long
SUITED = [(method, next(each for each in ("llama", *tiny.FAMILIES) if suits(method, each))) for method in METHODS]
PAIRS = [*SUITED, ("draft_model", "nemotron_h"), ("eagle3", "qwen3_vl"), ("mtp", "deepseek_v3")]


class Drafts:
    """What a drafter drafted after which text."""

    def __init__(self, llm: LLM) -> None:
        assert llm.drafter is not None
        self.after: dict[tuple[int, ...], list[int]] = {}
        self._propose = llm.drafter.propose
        llm.drafter.propose = self._spy  # type: ignore[method-assign]

    def _spy(self, step: Step, hidden: Hidden, verdict: Verdict) -> Draft:
        draft = self._propose(step, hidden, verdict)
        slots = step.batch.slots
        rows = zip(slots.tolist(), step.state.lengths[slots].tolist(), draft.count.tolist(), strict=True)
        for number, (slot, length, count) in enumerate(rows):
            if count:
                text = tuple(step.state.tokens[slot, :length].tolist())
                self.after[text] = draft.tokens[number, :count].tolist()
        return draft


@pytest.fixture(autouse=True)
def short_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "NUM_MISSABLE", NUM_MISSABLE)


def said(llm: LLM, params: Sequence[SamplingParams] = VARIED) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, list(params))]


def compare(path: Path, speculative: dict[str, Any], *, seed: int, batch: int, recorded: bool) -> None:
    with LLM(path, None, enforce_eager=True, **SIZES) as llm:
        plain = said(llm)
    with LLM(path, speculative, enforce_eager=True, max_num_seqs=batch, **SIZES) as llm:
        drafts = Drafts(llm)
        assert said(llm) == plain
    with (
        LLM(path, speculative, enforce_eager=not recorded, max_num_seqs=batch, **SIZES) as llm,
        llm.engine.drafting_with(restless := RandomDepth(llm.engine.lookahead, seed, NUM_MISSABLE, followed=1.0)),
    ):
        assert llm.drafter is not None
        later = Drafts(llm) if not recorded else None
        guide(llm.drafter, [p + t for p, t in zip(PROMPTS, plain, strict=True)], llm.target.vocab_size)
        outputs = llm.generate(PROMPTS, VARIED)
        assert [output.outputs[0].token_ids for output in outputs] == plain
        assert restless.num_rests > 1
        total = total_speculation(outputs)
        assert 0 < total.accepted < total.drafted
        assert llm.engine.num_recorded_rounds > 0 or not (recorded and llm.drafter.recordable)
        if later is not None:
            common = later.after.keys() & drafts.after.keys()
            assert len(common) > 4 or speculative["method"] in ("ngram", "suffix") or "+" in speculative["method"]
            # a shorter block of DFlash is another one
            alike = [text for text in common if len(later.after[text]) == len(drafts.after[text])]
            assert alike or not common
            for text in alike:
                assert later.after[text] == drafts.after[text], f"another draft after {len(text)} tokens"
        engine = llm.engine
        engine.step()
        assert engine.scheduler.pool.num_free == engine.scheduler.pool.capacity


@pytest.mark.parametrize(("method", "family"), PAIRS)
def test_rests_change_nothing(method: str, family: str, target_path: Callable[..., Path], tmp_path: Path) -> None:
    path = sample_target(method, tmp_path, target_path, family)
    compare(path, drafter_settings(method, tmp_path, target_path, family), seed=1, batch=2, recorded=False)


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("method", ["eagle3", "mtp", "dflash", "draft_model", "ngram"])
def test_recorded_rests_change_nothing(method: str, target_path: Callable[..., Path], tmp_path: Path) -> None:
    family = dict(SUITED)[method]
    path = sample_target(method, tmp_path, target_path, family)
    compare(path, drafter_settings(method, tmp_path, target_path, family), seed=2, batch=3, recorded=True)


@pytest.mark.parametrize("method", ["eagle3", "mtp", "draft_model"])
def test_what_the_drafter_has_not_seen_is_not_reused(
    method: str, target_path: Callable[..., Path], tmp_path: Path
) -> None:
    """An answer that was given while the drafter rested is the beginning of the next prompt."""
    family = dict(SUITED)[method] if method != "mtp" else "deepseek_v3"
    path = sample_target(method, tmp_path, target_path, family)
    speculative = drafter_settings(method, tmp_path, target_path, family)
    found = []
    for rests in (False, True):
        with LLM(path, speculative, **SIZES) as llm, llm.engine.drafting_with(policy := FixedDepth(0)):
            policy.latest = 0 if rests else llm.engine.lookahead
            answer = llm.generate([PROMPTS[0]], replace(PARAMS, max_tokens=60))[0].outputs[0].token_ids
            policy.latest = llm.engine.lookahead
            drafts = Drafts(llm)
            output = llm.generate([[*PROMPTS[0], *answer, 7, 8]], replace(PARAMS, max_tokens=20))[0]
            found.append((output.outputs[0].token_ids, drafts.after))
            hit = llm.engine.scheduler.prefixes.stats.hit
            assert hit % 8 == 0
            assert hit > (30 if rests else 60)
    assert found[0] == found[1]


@pytest.mark.parametrize("recorded", [False, True])
def test_a_rest_leaves_no_draft_behind(
    recorded: bool, target_path: Callable[..., Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Otherwise the first round after it would judge one that is out of date."""
    if recorded:
        request.getfixturevalue("recording")
    speculative = drafter_settings("eagle3", tmp_path, target_path, "llama")
    with (
        LLM(target_path(), speculative, enforce_eager=not recorded, **SIZES) as llm,
        llm.engine.drafting_with(policy := FixedDepth(llm.engine.lookahead)),
    ):
        engine = llm.engine
        (asked,) = llm.requests_for(PROMPTS[0], PARAMS, 0)
        engine.add(asked)
        for _ in range(3):
            engine.step()
        assert engine.cache.state.draft_count[asked.slot] == engine.lookahead
        policy.latest = 0
        for _ in range(4):  # rounds under way may still draft
            engine.step()
        assert engine.cache.state.draft_count[asked.slot] == 0


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("method", ["eagle3", "mtp", "dflash", "draft_model"])
def test_texts_that_are_not_followed(
    method: str, recorded: bool, target_path: Callable[..., Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Some requests the drafter follows, and some it never sees, side by side: the output is the target's, drafts for
    the former are right, and each kind finds the pages of its own."""
    if recorded:
        request.getfixturevalue("recording")
    family = dict(SUITED)[method] if method != "mtp" else "deepseek_v3"
    path = sample_target(method, tmp_path, target_path, family)
    speculative = drafter_settings(method, tmp_path, target_path, family)
    with LLM(path, None, enforce_eager=True, **SIZES) as llm:
        plain = said(llm)
    with (
        LLM(path, speculative, enforce_eager=not recorded, max_num_seqs=2, **SIZES) as llm,
        llm.engine.drafting_with(RandomDepth(llm.engine.lookahead, 3, NUM_MISSABLE, followed=0.5)),
    ):
        assert llm.drafter is not None
        guide(llm.drafter, [p + t for p, t in zip(PROMPTS, plain, strict=True)], llm.target.vocab_size)
        found = []
        for _ in range(4):
            outputs = llm.generate(PROMPTS, VARIED)
            assert [output.outputs[0].token_ids for output in outputs] == plain
            found += outputs
        drafted = [output.outputs[0].speculation.drafted for output in found]
        assert 0 in drafted
        assert max(drafted) > 0
        assert total_speculation(found).accepted > 0
        assert sum(output.num_cached_tokens for output in found[3:]) > 0


def test_where_drafts_do_not_pay_prompts_cost_nothing_more() -> None:
    """A drafter that is never right soon follows few of the requests that come; the others find each other's pages."""
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    prompt = "Once upon a time there was a little dog who lived in a house by the sea."
    with LLM(None, None) as llm:
        plain = llm.generate(prompt, params)[0].outputs[0].token_ids
    with LLM() as llm:
        assert llm.drafter is not None
        propose = llm.drafter.propose

        def wrong(*arguments: Any) -> Draft:
            draft = propose(*arguments)
            return replace(draft, tokens=torch.zeros_like(draft.tokens))

        llm.drafter.propose = wrong  # type: ignore[method-assign]
        found = [llm.generate(prompt, params)[0] for _ in range(12)]
        assert all(output.outputs[0].token_ids == plain for output in found)
        later = found[6:]
        assert sum(output.outputs[0].speculation.drafted == 0 for output in later) >= 5
        assert all(output.num_cached_tokens > 0 for output in later)
