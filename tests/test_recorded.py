"""Recorded rounds without a GPU: everything but the recording itself (replay.py). Who flies, lands, joins and leaves is
decided by the very same code; nothing else differs."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
import tiny_dflash
from samples import METHODS, Oracle, drafter_settings, guide, sample_target, suits

from outrider import LLM, SamplingParams
from outrider.certify.random_depth import RandomDepth
from outrider.engine import graphs
from outrider.engine.policy import FixedDepth, Landed, RowSizes
from outrider.engine.request import Request, Work
from outrider.engine.round_sizes import NUM_ROWS, rows_between
from outrider.llm import total_speculation
from outrider.models.base import Target
from outrider.types import RoundShape

pytestmark = pytest.mark.usefixtures("recording")

GREEDY = SamplingParams(max_tokens=14, temperature=0, ignore_eos=True)
VARIED = [
    GREEDY,
    replace(GREEDY, temperature=0.8, seed=5),
    replace(GREEDY, temperature=1.0, seed=6, top_p=0.9, top_k=20, logprobs=2),
    replace(GREEDY, temperature=0.7, seed=7, num_speculative_tokens=1, max_tokens=9),
    replace(GREEDY, temperature=0.9, seed=8, logit_bias={9: 3.0}, bad_words=[[7, 8], [41]], min_tokens=9,
            stop_token_ids=[6, 9, 41], repetition_penalty=1.3),
]  # fmt: skip
PROMPTS = [[5, 6, 7, 8, 9] * 3, [40, 41], list(range(60, 90)), [3] * 20, [11, 12, 13]]
MEMORIES = ["gpt_oss", "gemma4_moe", "nemotron_h", "deepseek_v3", "step3p5", "qwen3_vl"]
SUITED = [(method, next(each for each in ("llama", *tiny.FAMILIES) if suits(method, each))) for method in METHODS]
PAIRS = [(None, "llama"), *SUITED, *(("oracle", family) for family in MEMORIES)]


def answers(llm: LLM, params: Any = VARIED) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in llm.generate(PROMPTS, params)]


@pytest.mark.parametrize(("method", "is_narrow"), [(None, True), ("eagle3", True), ("gemma4_assistant", False)])
def test_beside_prompts_only_judged_rows_have_a_last_state(
    method: str | None, is_narrow: bool, target_path: Callable[..., Path], tmp_path: Path, monkeypatch: Any
) -> None:
    """Unless the drafter reads it."""
    family = dict(SUITED)[method] if method is not None else "llama"
    path, asked = sample_target(method or "", tmp_path, target_path, family), list[bool]()
    run = Target.forward

    def spy(self: Target, batch: Any, taps: Any = (), out: Any = None, read: Any = None) -> Any:
        asked.append(read is not None)
        return run(self, batch, taps, out, read)

    settings = None if method is None else drafter_settings(method, tmp_path, target_path, family)
    with LLM(path, settings, max_model_len=64, device="cpu") as llm:
        monkeypatch.setattr(Target, "forward", spy)
        answers(llm, GREEDY)
        assert llm.engine.num_recorded_rounds > 0
    assert any(asked) is is_narrow


@pytest.mark.parametrize(("method", "family"), PAIRS)
def test_recorded_rounds_are_steps(
    method: str | None, family: str, target_path: Callable[..., Path], tmp_path: Path
) -> None:
    path = sample_target(method or "", tmp_path, target_path, family)
    with LLM(path, None, max_model_len=64, enforce_eager=True, device="cpu") as llm:
        plain = answers(llm)
        assert llm.engine.num_recorded_rounds == 0
    truth = [prompt + tokens for prompt, tokens in zip(PROMPTS, plain, strict=True)]
    Oracle.truth = truth
    settings = None if method is None else drafter_settings(method, tmp_path, target_path, family)
    with LLM(path, settings, max_model_len=64, device="cpu") as llm:
        able = llm.drafter is None or llm.drafter.recordable
        if llm.drafter is not None:
            guide(llm.drafter, truth, llm.target.vocab_size)
        outputs = llm.generate(PROMPTS, VARIED)
        assert [output.outputs[0].token_ids for output in outputs] == plain
        assert (llm.engine.num_recorded_rounds > 0) is able
    if method is not None:
        total = total_speculation(outputs)
        assert 0 < total.accepted < total.drafted


def test_logprobs(target_path: Callable[..., Path], tmp_path: Path) -> None:
    settings = drafter_settings("eagle3", tmp_path, target_path, "llama")
    found = []
    for eager in (True, False):
        with LLM(target_path(), settings, max_model_len=64, enforce_eager=eager, device="cpu") as llm:
            outputs = llm.generate(PROMPTS, replace(GREEDY, logprobs=3))
            rows = [row for output in outputs for row in output.outputs[0].logprobs or []]
            found.append([{token: one.logprob for token, one in row.items()} for row in rows])
    assert found[0] == found[1]
    assert len(found[0]) == 14 * len(PROMPTS)


@pytest.mark.parametrize("pages", [None, 14])
def test_requests_come_and_go(pages: int | None, target_path: Callable[..., Path], tmp_path: Path) -> None:
    """They join and are given up at any time, also while rounds are under way; with few pages some start over."""
    settings = drafter_settings("eagle3", tmp_path, target_path, "llama")
    options: dict[str, Any] = {"max_model_len": 64, "page_size": 8, "max_num_seqs": 4, "device": "cpu"}
    chance = random.Random(0)
    with LLM(target_path(), None, enforce_eager=True, **options) as llm:
        plain = {number: answers(llm, params) for number, params in enumerate(VARIED)}
    if pages is not None:
        with LLM(target_path(), settings, **options) as llm:
            options["kv_cache_memory"] = llm.budget.page_bytes * pages
    with LLM(target_path(), settings, **options) as llm:
        truth = [p + tokens for each in plain.values() for p, tokens in zip(PROMPTS, each, strict=True)]
        assert llm.drafter is not None
        guide(llm.drafter, truth, llm.target.vocab_size)
        engine, given_up, expected = llm.engine, [], []
        for _ in range(40):
            which, place = chance.randrange(len(VARIED)), chance.randrange(len(PROMPTS))
            (request,) = llm.requests_for(PROMPTS[place], VARIED[which], len(expected))
            engine.add(request)
            expected.append((request, plain[which][place]))
            for _ in range(chance.randrange(6)):
                engine.step()
            if chance.random() < 0.2:
                given_up.append(chance.choice(expected)[0])
                engine.abort(given_up[-1])
        while engine.has_work:
            engine.step()
        assert engine.num_recorded_rounds > 40
        assert (engine.scheduler.num_preemptions > 0) is (pages is not None)
        for request, tokens in expected:
            said = tokens[: len(request.outputs)] if request in given_up else tokens
            assert request.outputs == said
        engine.step()  # whatever is still under way has nobody to land for
        engine.scheduler.pool.check()
        assert engine.scheduler.pool.num_free == engine.scheduler.pool.capacity


@pytest.mark.parametrize("adaptive", [False, True], ids=["random", "adaptive"])
@pytest.mark.parametrize(("method", "family"), PAIRS)
def test_joins_at_random(
    method: str | None, family: str, adaptive: bool, target_path: Callable[..., Path], tmp_path: Path
) -> None:
    """Every drafter, and every kind of memory: requests join while others decode, in rounds that are planned before the
    outcome of those under way is known, with prompts in small parts, and some leave early. Drafts are of any depth, any
    part of them is judged, and some requests are never drafted for; or all that is as it is for users."""
    chance = random.Random(f"{method} {family}")
    path = sample_target(method or "", tmp_path, target_path, family)
    with LLM(path, None, max_model_len=64, enforce_eager=True, device="cpu") as llm:
        plain = {number: answers(llm, params) for number, params in enumerate(VARIED)}
    truth = [prompt + tokens for each in plain.values() for prompt, tokens in zip(PROMPTS, each, strict=True)]
    Oracle.truth = truth
    settings = None if method is None else drafter_settings(method, tmp_path, target_path, family)
    options: dict[str, Any] = {"max_num_seqs": 5, "max_num_batched_tokens": 32, "page_size": 4}
    with (
        LLM(path, settings, max_model_len=64, device="cpu", **options) as llm,
        nullcontext()
        if adaptive
        else llm.engine.drafting_with(RandomDepth(llm.engine.lookahead, chance.randrange(100))),
    ):
        if llm.drafter is not None:
            guide(llm.drafter, truth, llm.target.vocab_size)
        engine, expected, left = llm.engine, [], []
        for number in range(12):
            which, place = chance.randrange(len(VARIED)), chance.randrange(len(PROMPTS))
            (request,) = llm.requests_for(PROMPTS[place], VARIED[which], number)
            engine.add(request)
            expected.append((request, plain[which][place]))
            for _ in range(chance.randrange(5)):
                engine.step()
            if chance.random() < 0.15:
                left.append(chance.choice(expected)[0])
                engine.abort(left[-1])
        while engine.has_work:
            engine.step()
        for request, tokens in expected:
            assert request.outputs == (tokens[: request.num_outputs] if request in left else tokens)
        engine.step()
        assert engine.scheduler.pool.num_free == engine.scheduler.pool.capacity
        able = llm.drafter is None or llm.drafter.recordable
        assert (engine.num_recorded_rounds > 0) is able


def test_many_requests_need_not_have_room_for_all_drafts(target_path: Callable[..., Path], tmp_path: Path) -> None:
    """A round has as many rows as are judged in it, up to the next size that is recorded."""
    settings = drafter_settings("eagle3", tmp_path, target_path, "llama")
    options: dict[str, Any] = {"max_num_seqs": 18, "max_model_len": 64, "device": "cpu"}
    prompts = [[5 + number, 6, 7, 8] for number in range(18)]
    with LLM(target_path(), None, enforce_eager=True, **options) as llm:
        plain = [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)]
    policy = RandomDepth(5, 1, followed=1.0)
    with LLM(target_path(), settings, **options) as llm, llm.engine.drafting_with(policy):
        assert llm.drafter is not None
        guide(llm.drafter, [p + t for p, t in zip(prompts, plain, strict=True)], llm.target.vocab_size)
        seen: list[Landed] = []
        note = policy.note

        def spy(landed: Landed) -> None:
            seen.append(landed)
            note(landed)

        policy.note = spy  # type: ignore[method-assign]
        for _ in range(4):
            assert [output.outputs[0].token_ids for output in llm.generate(prompts, GREEDY)] == plain
    note(replace(seen[0], seconds=0.0))  # of a round during which something was recorded nobody can tell
    for landed in seen:
        if landed.num_requests == 18 and not landed.num_other_rows:
            assert landed.num_rows in rows_between(18, landed.depth)
    deep = {landed.num_rows for landed in seen if landed.num_requests == 18 and landed.depth == 5}
    assert deep - {108}
    assert rows_between(18, 5) == [32, 40, 48, 56, 72, 96, 108]
    assert rows_between(32, 1) == [48, 64]
    assert rows_between(32, 2) == [48, 64, 80, 96]
    assert rows_between(8, 5) == [48]
    assert rows_between(64, 0) == [64]


def test_the_check_at_load_is_not_recorded() -> None:
    """It looks at every draft from the host."""
    with LLM(max_model_len=96, device="cpu") as llm:
        assert llm.checkup is not None
        assert llm.checkup.agreement is not None
        assert llm.engine.num_recorded_rounds == 0
        llm.generate("Once upon a time", GREEDY)
        assert llm.engine.num_recorded_rounds > 0


@pytest.mark.parametrize("pages", [None, 5])
def test_warm_up(pages: int | None, target_path: Callable[..., Path], tmp_path: Path) -> None:
    """What comes first then finds its recording; nothing is left behind, and a small cache is large enough."""
    settings = drafter_settings("eagle3", tmp_path, target_path, "llama")
    options: dict[str, Any] = {"max_model_len": 48, "page_size": 8, "max_num_seqs": 3, "device": "cpu"}
    with LLM(target_path(), settings, **options) as llm:
        plain = answers(llm, GREEDY)
        page_bytes = llm.budget.page_bytes
    if pages is not None:
        options |= {"kv_cache_memory": pages * page_bytes, "max_model_len": 16}
    with LLM(target_path(), settings, **options) as llm:
        llm.warm_up()
        recorded = llm.engine.num_recordings
        # one, two and three requests that decode, with drafts or not; prompts up to as many rows as there are
        assert recorded > 2 * 3
        assert llm.engine.scheduler.pool.num_free == llm.engine.scheduler.pool.capacity
        if pages is None:
            assert answers(llm, GREEDY) == plain
            assert llm.engine.num_recordings == recorded


def test_recorded_blocks_see_what_others_see(target_path: Callable[..., Path], tmp_path: Path) -> None:
    """Windows that are counted from the anchor, and a tap after the final norm."""
    drafter = tiny_dflash.save_dflash(
        tmp_path,
        layer_types=["sliding_attention", "full_attention"],
        sliding_window=3,
        window_from_anchor=True,
        tap_after_final_norm=True,
        dflash_config={"mask_token_id": tiny_dflash.MASK, "target_layer_ids": [0, 1, 3]},
    )
    settings = {"model": str(drafter), "num_speculative_tokens": 4, "adaptive": False, "force": True}
    traces = []
    for eager in (True, False):
        with LLM(target_path("llama"), settings, max_model_len=64, enforce_eager=eager, device="cpu") as llm:
            output = llm.generate([PROMPTS[0]], replace(GREEDY, max_tokens=30, trace=True))[0]
            assert (llm.engine.num_recorded_rounds > 0) is not eager
            traces.append(output.outputs[0].trace)
    assert traces[0] == traces[1]


def test_what_a_drafter_has_missed_is_shown_from_recordings(
    target_path: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To many requests at once, in as many parts as it takes; and after a warm-up nothing is recorded for it."""
    monkeypatch.setattr(graphs, "MISSED_ROWS", (16, 64))
    settings = drafter_settings("eagle3", tmp_path, target_path, "llama")
    options: dict[str, Any] = {"max_num_seqs": 9, "max_model_len": 96, "device": "cpu"}
    prompts = [[5 + number, 6, 7, 8] for number in range(9)]
    params = replace(GREEDY, max_tokens=60)
    with LLM(target_path(), None, enforce_eager=True, **options) as llm:
        plain = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    with LLM(target_path(), settings, **options) as llm, llm.engine.drafting_with(Rests(5)):
        engine = llm.engine
        assert llm.drafter is not None
        assert engine.graphs is not None
        llm.warm_up()
        guide(llm.drafter, [p + t for p, t in zip(prompts, plain, strict=True)], llm.target.vocab_size)
        made, shown, seat = engine.graphs.num_made, list[int](), engine.graphs.seat

        def spy(plan: Sequence[Work], shape: RoundShape) -> int:
            if plan and not plan[0].emits and plan[0].request.num_outputs:
                shown.append(sum(work.num_rows for work in plan))
            return seat(plan, shape)

        monkeypatch.setattr(engine.graphs, "seat", spy)
        monkeypatch.setattr(engine.runner, "pack", None)  # that is how it is done without recordings
        outputs = llm.generate(prompts, params)
        assert [output.outputs[0].token_ids for output in outputs] == plain
        assert engine.graphs.num_made == made
        assert max(shown) > 48
        assert sum(shown) > 2 * 9 * 10
        total = total_speculation(outputs)
        assert 0 < total.accepted < total.drafted


def test_a_drafter_that_has_rested_drafts_as_if_it_had_not(target_path: Callable[..., Path], tmp_path: Path) -> None:
    settings = drafter_settings("eagle3", tmp_path, target_path, "llama")
    options: dict[str, Any] = {"max_num_seqs": 9, "max_model_len": 96, "device": "cpu", "watchdog": None}
    prompts, params = [[5 + number, 6, 7, 8] for number in range(9)], replace(GREEDY, max_tokens=60, trace=True)
    found = []
    for policy in (FixedDepth(5), Rests(5)):
        with LLM(target_path(), settings, **options) as llm, llm.engine.drafting_with(policy):
            outputs = llm.generate(prompts, params)
        found.append([drafts_by_place(output.outputs[0].trace or []) for output in outputs])
    num_compared = 0
    for always, sometimes in zip(*found, strict=True):
        for place in always.keys() & sometimes.keys():
            assert always[place] == sometimes[place]
            num_compared += 1
    assert num_compared > 30


def drafts_by_place(trace: Sequence[dict[str, Any]]) -> dict[int, list[int]]:
    """Whole drafts, by how many tokens came before them."""
    found, place = {}, 0
    for each in trace:
        if len(each["draft"]) == 5:
            found[place] = each["draft"]
        place += 1 + each["accepted"]
    return found


class Asked(FixedDepth):
    """Judges nothing beside prompts."""

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self.found = list[tuple[int, int, Sequence[int]]]()

    def allot_beside(self, requests: Sequence[Request], depth: int, row_sizes: Sequence[int]) -> None:
        self.found.append((len(requests), depth, row_sizes))
        for request in requests:
            request.most_judged = 0


def test_who_decodes_beside_prompts_is_asked_about(target_path: Callable[..., Path], tmp_path: Path) -> None:
    """In recorded rounds, with the numbers of rows that are left of them."""
    settings = drafter_settings("eagle3", tmp_path, target_path, "llama")
    with LLM(target_path(), settings, max_model_len=64, device="cpu") as llm:
        engine, policy = llm.engine, Asked(llm.engine.lookahead)
        first, second = (llm.requests_for(prompt, replace(GREEDY, max_tokens=12), 0)[0] for prompt in PROMPTS[:2])
        with engine.drafting_with(policy):
            engine.add(first)
            while first.num_outputs < 4:
                engine.step()
            assert not policy.found
            engine.add(second)
            while engine.has_work:
                engine.step()
    sizes = [size - len(PROMPTS[1]) for size in NUM_ROWS if size > len(PROMPTS[1])]
    assert policy.found == [(1, engine.lookahead, sizes)]


class Rests(FixedDepth):
    """Drafts for some rounds, then rests for more."""

    adaptive, depths = True, (0, 5)  # type: ignore[assignment]

    def __init__(self, depth: int) -> None:
        super().__init__(depth)
        self.num_asked = 0

    def depth(self, requests: Sequence[Request], row_sizes: RowSizes | None = None) -> int:
        self.num_asked += 1
        return super().depth(requests, row_sizes) if self.num_asked % 15 < 3 else 0
