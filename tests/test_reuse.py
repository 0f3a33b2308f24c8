"""Prefix reuse where layers are recurrent: prompts that come again, that share a beginning or go on with an answer are
found with every drafter as without one, and nothing that is said or drafted depends on it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny
from samples import Oracle, drafter_settings, guide, sample_target

from outrider import LLM, SamplingParams
from outrider.certify.random_depth import RandomDepth
from outrider.engine.policy import FixedDepth
from outrider.engine.request import Request
from outrider.llm import total_speculation

FAMILIES = [name for name in tiny.FAMILIES if name.startswith("nemotron_h")]
PAIRS = [("nemotron_h", each) for each in (None, "oracle", "draft_model", "pard", "eagle3", "mtp", "ngram", "dflash")]
PAIRS += [(family, method) for family in FAMILIES if family != "nemotron_h" for method in (None, "draft_model")]
LENGTHS = (1072, 2000, 2144, 3000, 3500)
GREEDY = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, trace=True)
SEEDED = replace(GREEDY, temperature=0.8, seed=3)
MIXED = [GREEDY, SEEDED, GREEDY, SEEDED, GREEDY]
LONG: dict[str, Any] = {"max_model_len": 4096, "device": "cpu"}
SMALL: dict[str, Any] = {"max_model_len": 256, "page_size": 4, "snapshot_interval": 16, "device": "cpu"}
Answers = list[list[int]]


def random_text(length: int, seed: int) -> list[int]:
    chance = random.Random(seed)
    return [chance.randrange(3, tiny.VOCAB) for _ in range(length)]


class Pair:
    """A recurrent target that takes long prompts, and a drafter that goes with it."""

    def __init__(self, family: str, method: str | None, make: Callable[..., Path], directory: Path) -> None:
        def target(family: str, seed: int = 0, **options: Any) -> Path:
            return make(family, seed, max_position_embeddings=8192, **options)

        self.path = sample_target(method or "", directory, target, family)
        self.settings = None
        if method is not None:  # in every round, so that the same is drafted again
            self.settings = {**drafter_settings(method, directory, target, family), "force": True}

    def cold(self, prompts: Sequence[list[int]], params: Any, **options: Any) -> Answers:
        """What the target says by itself, and without reuse."""
        with LLM(self.path, None, enable_prefix_caching=False, enforce_eager=True, **options) as llm:
            return [output.outputs[0].token_ids for output in llm.generate(list(prompts), params)]

    def open(self, prompts: Sequence[list[int]], answers: Answers, **options: Any) -> LLM:
        """The drafter knows some of the answers, so that some drafts are accepted and some rejected."""
        truth = [prompt + answer for prompt, answer in zip(prompts, answers, strict=True)]
        Oracle.truth = truth
        llm = LLM(self.path, self.settings, **options)
        if llm.drafter is not None:
            guide(llm.drafter, truth, llm.target.vocab_size)
        return llm


@pytest.fixture
def pair(request: pytest.FixtureRequest, target_path: Callable[..., Path], tmp_path: Path) -> Pair:
    return Pair(*request.param, target_path, tmp_path)


pairs = pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{pair[0]}-{pair[1]}", indirect=True)


def last_page_end(length: int, page_size: int = 16) -> int:
    """That leaves a token to run."""
    return (length - 1) // page_size * page_size


@pairs
def test_prompts_that_come_again(pair: Pair) -> None:
    """They are found as far as they can be; the same is said, greedy or seeded, and the same is drafted."""
    prompts = [random_text(length, length) for length in LENGTHS]
    answers = pair.cold(prompts, MIXED, **LONG)
    asked = list(zip(prompts, MIXED, strict=True))
    with pair.open(prompts, answers, **LONG) as llm:
        first, second = ([llm.generate([prompt], params)[0] for prompt, params in asked] for _ in range(2))
        assert [output.num_cached_tokens for output in first] == [0] * len(LENGTHS)
        assert [output.num_cached_tokens for output in second] == [last_page_end(length) for length in LENGTHS]
        stats = llm.engine.scheduler.prefixes.stats
        assert (stats.queried, stats.hit) == (2 * sum(LENGTHS), sum(map(last_page_end, LENGTHS)))
    for outputs in (first, second):
        assert [output.outputs[0].token_ids for output in outputs] == answers
    assert [output.outputs[0].trace for output in first] == [output.outputs[0].trace for output in second]
    if pair.settings is not None:
        total = total_speculation(second)
        assert 0 < total.accepted < total.drafted


@pairs
def test_texts_that_part(pair: Pair) -> None:
    """What is found at first are the states at intervals, then the one where the texts part."""
    shared = random_text(1500, 1)
    prompts = [shared + random_text(600, 10 + number) for number in range(4)]
    answers = pair.cold(prompts, GREEDY, **LONG)
    with pair.open(prompts, answers, **LONG) as llm:
        outputs = [llm.generate([prompt], GREEDY)[0] for prompt in prompts]
    assert [output.num_cached_tokens for output in outputs] == [0, 1280, 1488, 1488]
    assert [output.outputs[0].token_ids for output in outputs] == answers


@pairs
def test_conversations(pair: Pair) -> None:
    """The next turn begins with the answer to the last one: all but an interval of it is found, at least."""
    said, interval = replace(GREEDY, max_tokens=90), 64
    options = {**LONG, "snapshot_interval": interval}
    prompt, turns = random_text(100, 2), []
    for number in range(3):
        (answer,) = pair.cold([prompt], said, **options)
        turns.append((prompt, answer))
        prompt = [*prompt, *answer, *random_text(20, number)]
    with pair.open(*zip(*turns, strict=True), **options) as llm:  # type: ignore[arg-type]
        outputs = [llm.generate([prompt], said)[0] for prompt, _ in turns]
    assert [output.outputs[0].token_ids for output in outputs] == [answer for _, answer in turns]
    assert outputs[0].num_cached_tokens == 0
    for (prompt, answer), output in zip(turns, outputs[1:], strict=False):
        least = (len(prompt) + len(answer) - 1) // interval * interval
        assert output.num_cached_tokens >= least > last_page_end(len(prompt))


@pytest.mark.parametrize("num_snapshots", [0, 1, 2, 7])
def test_few_places(num_snapshots: int, target_path: Callable[..., Path], tmp_path: Path) -> None:
    """Where states have gone, the rest of the text is computed again; without any place there is no reuse."""
    pair = Pair("nemotron_h", "draft_model", target_path, tmp_path)
    prompts = [random_text(90, number) for number in range(3)]
    answers = pair.cold(prompts, GREEDY, **SMALL)
    with pair.open(prompts, answers, num_snapshots=num_snapshots, **SMALL) as llm:
        cached = []
        for _ in range(3):
            outputs = llm.generate(prompts, GREEDY)
            assert [output.outputs[0].token_ids for output in outputs] == answers
            cached.append(sum(output.num_cached_tokens > 0 for output in outputs))
        snapshots = llm.engine.scheduler.snapshots
        assert (snapshots is None) is (num_snapshots == 0)
        if snapshots is not None:
            snapshots.pool.check()
            assert 0 < snapshots.pool.num_kept <= num_snapshots
        assert (cached[1] > 0) is (num_snapshots > 2)
        assert llm.budget.num_snapshots == num_snapshots


def test_memory_for_snapshots(target_path: Callable[..., Path]) -> None:
    with LLM(target_path("nemotron_h"), None, **SMALL) as llm:
        budget, cache = llm.budget, llm.engine.cache
        assert budget.num_snapshots == 64
        taken = [each for layer in cache.recurrent for each in layer.snapshots or ()]
        assert sum(each.numel() * 4 for each in taken) == 65 * budget.snapshot_bytes
        assert ", 64 states of " in budget.describe()
        without = replace(budget, num_snapshots=0)
        assert budget.cache_bytes - without.cache_bytes == 65 * budget.snapshot_bytes
    with pytest.raises(ValueError, match=r"100000000000 snapshots of recurrent states need .* ask for fewer"):
        LLM(target_path("nemotron_h"), None, num_snapshots=100_000_000_000, **SMALL)
    with pytest.raises(ValueError, match="num_snapshots must be a whole number"):
        LLM(target_path("nemotron_h"), None, num_snapshots=-1, **SMALL)
    with LLM(target_path("nemotron_h"), None, enable_prefix_caching=False, **SMALL) as llm:
        assert llm.budget.num_snapshots == 0
        assert llm.engine.cache.state.wanted is None
    with LLM(target_path("llama"), None, **SMALL) as llm:
        assert llm.budget.num_snapshots == 0


@pytest.mark.parametrize("method", [None, "oracle", "draft_model", "eagle3"])
def test_who_starts_over_goes_on_from_a_snapshot(
    method: str | None, target_path: Callable[..., Path], tmp_path: Path
) -> None:
    """With few pages: requests are sent back, and come back."""
    pair = Pair("nemotron_h", method, target_path, tmp_path)
    said = replace(GREEDY, max_tokens=40)
    prompts = [random_text(60 + 7 * number, number) for number in range(6)]
    answers = pair.cold(prompts, said, **SMALL)
    with pair.open(prompts, answers, **SMALL) as llm:
        page_bytes = llm.budget.page_bytes
    options = {**SMALL, "max_model_len": 160, "max_num_seqs": 4, "kv_cache_memory": page_bytes * 90}
    with pair.open(prompts, answers, **options) as llm:
        admit, came_back = llm.engine.cache.admit, []

        def spy(slot: int, tokens: list[int], reused: list[int], images: Any, snapshot: int) -> None:
            (request,) = [each for each in llm.engine.scheduler.running if each.slot == slot]
            if request.num_preemptions:
                came_back.append(snapshot)
                assert len(reused) * 4 == request.num_computed
            admit(slot, tokens, reused, images, snapshot)

        llm.engine.cache.admit = spy  # type: ignore[method-assign]
        outputs = llm.generate(prompts, said)
        assert llm.engine.scheduler.num_preemptions > 0
        assert any(came_back)
        assert llm.engine.scheduler.snapshots is not None
        llm.engine.scheduler.snapshots.pool.check()
    assert [output.outputs[0].token_ids for output in outputs] == answers


def test_tenants_find_their_own(target_path: Callable[..., Path], tmp_path: Path) -> None:
    pair = Pair("nemotron_h", "draft_model", target_path, tmp_path)
    prompts = [random_text(90, 1)]
    (answer,) = pair.cold(prompts, GREEDY, **SMALL)
    with pair.open(prompts, [answer], **SMALL) as llm:
        found = []
        for tenant in ("one", "other", None, "one", "other", None):
            (output,) = llm.generate(prompts, replace(GREEDY, tenant=tenant))
            assert output.outputs[0].token_ids == answer
            found.append(output.num_cached_tokens)
    assert found == [0, 0, 0, 88, 88, 88]


@pytest.mark.parametrize("family", ["nemotron_h", "llama"])
def test_a_drafter_that_rests(family: str, target_path: Callable[..., Path], tmp_path: Path) -> None:
    """An answer that was given while a recurrent drafter rested is the beginning of the next prompt: what it drafts
    then is what it would have drafted. The target may be recurrent too, or not."""
    pair = Pair("nemotron_h", "draft_model", target_path, tmp_path)
    path = pair.path if family == "nemotron_h" else target_path(family)
    prompt, found = random_text(50, 4), []
    for rests in (False, True):
        with LLM(path, pair.settings, **SMALL) as llm, llm.engine.drafting_with(policy := FixedDepth(0)):
            policy.latest = 0 if rests else llm.engine.lookahead
            answer = llm.generate([prompt], replace(GREEDY, max_tokens=90))[0].outputs[0].token_ids
            policy.latest = llm.engine.lookahead
            again = llm.generate([[*prompt, *answer[:79]]], GREEDY)[0]  # all but one token may be found
            found.append((answer, again.outputs[0].token_ids, again.outputs[0].trace))
            assert again.num_cached_tokens == (112 if rests else 128)
    assert found[0] == found[1]
    with LLM(path, pair.settings, enable_prefix_caching=False, **SMALL) as llm:
        output = llm.generate([[*prompt, *found[0][0][:79]]], GREEDY)[0].outputs[0]
        assert (output.token_ids, output.trace) == found[0][1:]


def family_tree(chance: random.Random, count: int) -> list[list[int]]:
    """Prompts that share beginnings of any length."""
    made = [random_text(60, chance.randrange(10**6))]
    while len(made) < count:
        begun = chance.choice(made)[: chance.randrange(1, 120)]
        made.append([*begun, *random_text(chance.randrange(1, 50), chance.randrange(10**6))][:150])
    return made


RECORDED = [(None, 1), (None, 2), ("oracle", 3), ("draft_model", 4), ("draft_model", 5), ("eagle3", 6), ("mtp", 7)]


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize(("method", "seed"), [*RECORDED, ("pard", 8), ("ngram", 9)])
def test_joins_at_random(method: str | None, seed: int, target_path: Callable[..., Path], tmp_path: Path) -> None:
    """In rounds that are planned before the outcome of those under way is known: prompts in parts, drafters that rest
    or do not follow, few places, few pages, some given up, some starting over."""
    chance = random.Random(seed)
    pair = Pair(FAMILIES[seed % len(FAMILIES)], method, target_path, tmp_path)
    options: dict[str, Any] = {**SMALL, "max_num_seqs": 4, "max_num_batched_tokens": chance.choice([24, 48, 400])}
    texts = family_tree(chance, 10)
    varied = [replace(GREEDY, max_tokens=40), replace(SEEDED, max_tokens=24), replace(SEEDED, seed=9, max_tokens=9)]
    asked = [(chance.choice(texts), chance.choice(varied)) for _ in range(24)]
    prompts = [prompt for prompt, _ in asked]
    answers = pair.cold(prompts, [params for _, params in asked], **options)
    for number in range(0, len(asked), 3):  # some go on with what was said
        asked[number] = ([*prompts[number], *answers[number]][:180], chance.choice(varied))
    prompts = [prompt for prompt, _ in asked]
    answers = pair.cold(prompts, [params for _, params in asked], **options)
    with pair.open(prompts, answers, **options) as llm:
        page_bytes = llm.budget.page_bytes
    limits = {"kv_cache_memory": page_bytes * 150, "num_snapshots": chance.choice([9, 20, 60])}
    with (
        pair.open(prompts, answers, **options, **limits) as llm,
        llm.engine.drafting_with(RandomDepth(llm.engine.lookahead, seed, 64, followed=0.8)),
    ):
        engine = llm.engine
        expected: list[tuple[Request, list[int]]] = []
        left: list[Request] = []
        for number, (prompt, params) in enumerate(asked):
            (request,) = llm.requests_for(prompt, params, number)
            engine.add(request)
            expected.append((request, answers[number]))
            for _ in range(chance.randrange(25)):
                engine.step()
            if chance.random() < 0.1:
                left.append(chance.choice(expected)[0])
                engine.abort(left[-1])
            if engine.scheduler.running and chance.random() < 0.1:
                engine.scheduler.restart(chance.choice(engine.scheduler.running))
        while engine.has_work:
            engine.step()
        engine.step()
        for request, tokens in expected:
            assert request.outputs == (tokens[: request.num_outputs] if request in left else tokens)
        assert engine.scheduler.prefixes.stats.hit > 100
        assert engine.scheduler.pool.num_free == engine.scheduler.pool.capacity
        assert engine.scheduler.snapshots is not None
        engine.scheduler.snapshots.pool.check()
        assert engine.num_recorded_rounds > 0
        if llm.drafter is not None:
            total = sum(sum(request.accepted_at) for request, _ in expected)
            assert 0 < total < sum(sum(request.drafted_at) for request, _ in expected)
