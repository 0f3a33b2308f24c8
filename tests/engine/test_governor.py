"""The governor in made-up worlds, where what rounds cost and bring is known: it must find what is best there, and never
be much slower than plain decoding on the way."""

from __future__ import annotations

import random
import time
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from made_up_time import MadeUpTime
from worlds import World, mixed, requests, run

from outrider import LLM, SamplingParams
from outrider.engine.governor import Governor, depths_up_to
from outrider.engine.policy import FixedDepth, Judged, Landed
from outrider.engine.survival import Survival
from outrider.engine.times import Times, size_of
from outrider.llm import total_speculation
from outrider.pair import DEFAULT_DIRECTORY
from outrider.types import Draft

NUM_SLOTS = 600
worlds = st.builds(
    World,
    rates=st.lists(st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.97]), min_size=1, max_size=24),
    begin=st.floats(0, 1),
    each=st.floats(0, 0.4),
    row=st.floats(0, 0.1),
    noise=st.floats(0, 0.3),
    lookahead=st.integers(1, 12),
)


@given(worlds, st.integers(0, 1000))
@settings(max_examples=40, deadline=None, derandomize=True)
def test_it_finds_the_best_rows(world: World, seed: int) -> None:
    governor, chance = Governor(world.lookahead, NUM_SLOTS), random.Random(seed)
    early = run(world, governor, 200, chance).rate
    late = run(world, governor, 1500, chance).rate
    assert late > 0.90 * world.best
    assert late > 0.97 * world.plain
    assert early > 0.78 * world.plain


@pytest.mark.parametrize("count", [2, 8, 32])
def test_rows_go_to_those_whose_drafts_stand(count: int) -> None:
    """Half of the requests are drafted for well, half badly: within 3 % of the best that is possible, and far better
    than any depth that is the same for all."""
    world = World(mixed(0.9, 0.1, count=count), begin=0.1, each=0.05, row=0.04, noise=0.1)
    governor, chance = Governor(5, NUM_SLOTS), random.Random(0)
    run(world, governor, 300, chance)
    late = run(world, governor, 3000, chance).rate
    assert late > 0.97 * world.best
    assert late > 1.05 * world.best_fixed
    asked = requests(count)
    governor.depth(asked)
    judged = [request.most_judged or 0 for request in asked]
    assert min(judged[::2]) > max(judged[1::2])


@pytest.mark.parametrize("count", [1, 8, 32, 128])
@pytest.mark.parametrize("prompt", [0, 64])
def test_a_drafter_that_is_never_right_costs_almost_nothing(count: int, prompt: int) -> None:
    world = World([0.0] * count, begin=0.3, each=0.1, row=0.02, noise=0.1, prompt=prompt, answer=32 if prompt else 0)
    governor, chance = Governor(5, NUM_SLOTS), random.Random(0)
    assert run(world, governor, 300, chance).rate > 0.94 * world.plain
    assert run(world, governor, 2000, chance).rate > 0.98 * world.plain


def test_a_good_drafter_is_hardly_interrupted() -> None:
    world = World([0.8], begin=0.1, each=0.05)
    governor, chance = Governor(5, NUM_SLOTS), random.Random(0)
    assert run(world, governor, 5000, chance).rate > 0.97 * world.rate(5, [5])
    assert governor.latest == 5


class SettlingWorld(World):
    """As measured on two cores with a small model: plain rounds take 1.1 ms, but the first ones after drafts half as
    long again, and rounds with drafts 2.9 ms."""

    num_rested = 0

    def seconds(self, depth: int, rows: int) -> float:
        self.num_rested = 0 if depth else self.num_rested + 1
        return 0.0029 if depth else 0.0011 + 0.0008 * 0.8**self.num_rested


def test_the_first_rounds_of_a_rest_say_nothing() -> None:
    """Drafts bring 2.2 tokens in 2.9 ms: more than what a plain round seems to bring at first, less than it does."""
    world = SettlingWorld([0.55], begin=0, each=0)
    found = run(world, Governor(5, NUM_SLOTS), 4000, random.Random(0))
    assert found.drafted < 0.05 * found.rounds


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.9), (0.9, 0.0)])
def test_it_notices_when_the_text_changes(before: float, after: float) -> None:
    governor, chance = Governor(5, NUM_SLOTS), random.Random(1)
    run(World([before] * 4, 0.2, 0.08, 0.02), governor, 2000, chance)
    world = World([after] * 4, 0.2, 0.08, 0.02)
    run(world, governor, 1500, chance)  # it looks again now and then
    assert run(world, governor, 500, chance).rate > 0.95 * world.best


@pytest.mark.parametrize(("rate", "low"), [(0.8, 1.15), (0.2, 0.98)])
def test_rounds_that_read_prompts_teach_too(rate: float, low: float) -> None:
    """With so many requests that come and go, hardly a round is without a prompt. The best depth for all makes 1.25
    times plain in the first of these worlds."""
    world = World([rate] * 24, begin=0.2, each=0.1, row=0.02, noise=0.1, prompt=100, answer=24)
    governor, chance = Governor(5, NUM_SLOTS), random.Random(2)
    run(world, governor, 300, chance)
    late = run(world, governor, 1500, chance)
    assert late.prompt_seconds > 0.4 * late.seconds
    assert late.rate > low * world.plain


def test_rows_of_drafts_are_dear_beside_prompts() -> None:
    """A smaller round is taken where what is left out is worth less than the rows that it saves; those that are judged
    are the most likely ones."""
    world = World(mixed(0.9, 0.3, count=24), begin=0.1, each=0.05, row=0.02, noise=0.05, prompt=100, answer=48)
    governor, chance = Governor(5, NUM_SLOTS), random.Random(2)
    run(world, governor, 1500, chance)
    asked, judged = requests(24), dict[tuple[int, ...], list[int]]()
    for sizes in ([24, 72], [60, 72], [24, 60, 400], [24, 400]):
        governor.depth(asked)
        governor.allot_beside(asked, 2, sizes)
        judged[tuple(sizes)] = [request.most_judged or 0 for request in asked]
    assert sum(judged[24, 72]) == 48, "there is room for all"
    assert sum(judged[60, 72]) == 36, "twelve rows of drafts that hardly stand are not worth as many of prompts"
    assert judged[60, 72] == judged[24, 60, 400], "nor 340"
    assert sum(judged[60, 72][::2]) == 24 > sum(judged[60, 72][1::2])
    assert sum(judged[24, 400]) == 0
    governor.depth(asked)
    assert sum(request.most_judged or 0 for request in asked) > 48, "elsewhere drafts are as they were"


@pytest.mark.parametrize(("made", "begin", "depth"), [(0.1, 0.8, 0), (0.5, 0.2, 5)])
def test_a_text_may_suggest_nothing(made: float, begin: float, depth: int) -> None:
    """Drafts that are always right, but seldom there: whether they pay depends on how often they are."""
    world = World([0.97] * 4, begin=begin, each=0.05, row=0.02, noise=0.1, made=made)
    governor, chance = Governor(5, NUM_SLOTS), random.Random(0)
    run(world, governor, 300, chance)
    late = run(world, governor, 1000, chance)
    assert governor.latest == depth
    assert late.rate > (0.98 if depth == 0 else 1.3) * world.plain


def test_sizes_are_judged_alone() -> None:
    """With many requests the same drafts are dear."""
    cheap, dear = World([0.6], 0.05, 0.05), World([0.6] * 64, 0.5, 0.4, 0.5)
    governor, chance = Governor(5, NUM_SLOTS), random.Random(2)
    for _ in range(20):
        run(cheap, governor, 50, chance)
        run(dear, governor, 50, chance)
    assert governor.latest == 0
    governor.depth(requests(1))
    assert governor.latest >= 2


def test_requests_may_want_fewer() -> None:
    """Then a trial of more ends as well, and whoever comes later finds a governor at work."""
    world, governor, chance = World([0.0], 0.3, 0.1, 0.02), Governor(5, NUM_SLOTS), random.Random(3)
    for _ in range(200):
        depth = min(governor.depth(requests(1)), 1)
        governor.note(Landed(1, depth, depth == 0, 1, 0, 1, 0, 0, world.seconds(depth, 1), []))
    run(world, governor, 300, chance)
    assert governor.latest == 0


def test_texts_are_followed_when_a_trial_is_due() -> None:
    """Where drafts do not pay, a newcomer costs what it costs without a drafter, but for one now and then."""
    world = World([0.0] * 4, begin=0.3, each=0.1, row=0.02, prompt=64, answer=32)
    governor, chance = Governor(5, NUM_SLOTS), random.Random(0)
    assert governor.wants(1)
    run(world, governor, 500, chance)
    nobody, followed = requests(4), 0
    for request in nobody:
        request.is_followed = False
    for _ in range(2000):
        depth = governor.depth(nobody)
        governor.note(Landed(4, 0, True, 4, 0, 4, 0, 0, world.seconds(0, 4), []))
        assert depth == 0  # of whom nobody can be drafted for
        followed += governor.wants(4)
    assert 0 < followed < 2000


def test_a_prompt_is_read_again_if_drafts_save_more() -> None:
    """A row of a prompt takes 20 ms here, and drafts save about half of the 420 ms that a token takes without."""
    world = World([0.9], begin=0.3, each=0.02, row=0.02, prompt=64, answer=32)
    governor, chance = Governor(5, NUM_SLOTS), random.Random(0)
    run(world, governor, 500, chance)
    assert governor.latest > 0
    assert governor.wants(1, 64, 64)
    assert governor.wants(1, 640, 2**20)
    assert not governor.wants(1, 64, 1)
    assert not governor.wants(1, 2**20, 2**20)  # nobody says so much, whatever is allowed


def test_no_prompt_is_read_again_for_a_trial() -> None:
    world = World([0.0] * 4, begin=0.3, each=0.1, row=0.02, prompt=64, answer=32)
    governor, chance = Governor(5, NUM_SLOTS), random.Random(0)
    run(world, governor, 500, chance)
    for request in (nobody := requests(4)):
        request.is_followed = False
    for _ in range(2000):
        assert not governor.wants(4, 16, 1000)
        governor.depth(nobody)
        governor.note(Landed(4, 0, True, 4, 0, 4, 0, 0, world.seconds(0, 4), []))
    assert governor.wants(4)


def test_a_text_that_is_followed_is_tried() -> None:
    """To follow a text costs something too: it is begun when there is enough left for the trial."""
    world = World([0.0] * 8, begin=0.3, each=0.1, row=0.02, prompt=64, answer=32)
    governor, chance = Governor(5, NUM_SLOTS), random.Random(0)
    run(world, governor, 500, chance)
    asked, left, followed, tried, spent, total = requests(8), 0, 0, 0, 0.0, 0.0
    for request in asked:
        request.is_followed = False
    for _ in range(6000):
        rows = 0
        if left == 0:  # somebody has ended, and somebody else comes
            asked[0].is_followed = governor.wants(8)
            followed += asked[0].is_followed
            left, rows, begun = 32, 64, tried
        depth = governor.depth(asked)
        if depth and tried == begun and asked[0].is_followed:
            tried += 1
        follows = rows > 0 and asked[0].is_followed
        rests = depth == 0 and not follows
        seconds = world.seconds(depth, 8 + rows) + (0.05 * rows if not rests else 0.0)
        spent += seconds - world.seconds(0, 8 + rows)
        total += seconds
        governor.note(Landed(8, depth, rests, 8, rows, 8, 5 * bool(depth), 5 * bool(depth), seconds, []))
        left -= 1
    assert followed > 5
    assert tried > 0.7 * followed
    assert spent < 0.015 * total


def test_prompts_cost_no_more_while_the_drafter_rests() -> None:
    """Whatever a few disturbed rounds seem to say: it would be a reason to draft."""
    times = Times()
    for number in range(40):
        times.add(3, 5, (24, 64 * (number % 3)), 1.5 + 0.003 * 64 * (number % 3), rests=False)
        times.add(3, 0, (8, 64 * (number % 3)), 1.0 + 0.007 * 64 * (number % 3), rests=True)
    resting, drafting = times.line(3, 0, 8), times.line(3, 5, 8)
    assert resting is not None
    assert drafting is not None
    assert resting.prompt <= drafting.prompt
    assert times.prompt_seconds(3, rests=True) <= times.prompt_seconds(3, rests=False)
    unknown = times.line(4, 0, 16)
    assert unknown is None or unknown.prompt <= drafting.prompt


def test_recorded_sizes_are_filled() -> None:
    """Where a round has a fixed number of rows anyway, none of them is left empty."""
    world = World(mixed(0.9, 0.5, count=16), begin=0.1, each=0.05, row=0.02)
    governor, chance = Governor(5, NUM_SLOTS), random.Random(0)
    run(world, governor, 300, chance, lambda count, depth: [2 * count, (1 + depth) * count])
    asked = requests(16)
    depth = governor.depth(asked, lambda count, depth: [2 * count, (1 + depth) * count])
    assert sum(1 + (request.most_judged or 0) for request in asked) in (32, 16 * (1 + depth))


def test_a_decision_is_quick() -> None:
    world, governor, asked = World([0.8] * 128, 0.1, 0.05, 0.005), Governor(5, NUM_SLOTS), requests(128)
    run(world, governor, 100, random.Random(0))
    judged = [Judged(slot, 3, 2, 3) for slot in range(128)]
    best = 1.0
    for _ in range(50):
        begin = time.process_time()
        governor.depth(asked)
        governor.note(Landed(128, 5, False, 512, 0, 300, 640, 640, 1.0, judged))
        best = min(best, time.process_time() - begin)
    assert best < 5e-4  # 0.2 ms on a machine that is not busy


def test_survival_begins_with_the_average() -> None:
    survival = Survival(4, 3)
    for _ in range(100):
        survival.add([Judged(0, 3, 3, 3), Judged(1, 3, 0, 1)])
    own = survival.of(np.array([0, 1, 2]))
    assert own[0, 0] > 0.8
    assert own[1, 0] < 0.2
    assert 0.4 < own[2, 0] < 0.6
    assert (np.diff(own, axis=1) <= 0).all()
    survival.begin(0)
    assert np.allclose(survival.of(np.array([0])), survival.of(np.array([2])))


@pytest.mark.parametrize("count", [1, 32])
def test_one_round_that_disappoints_says_little(count: int) -> None:
    """However many requests were in it: they have all begun at the same time."""
    survival = Survival(count, 2)
    for right in (2, 2, 2, 0):  # of which the last one is compared with what was expected
        survival.add([Judged(slot, 2, right, min(right + 1, 2)) for slot in range(count)])
    assert 0.85 < survival.trust < 0.95


def test_requests_as_they_come_include_those_that_left() -> None:
    """Whether another has their slot or not; and each counts once, however long it stays."""
    survival = Survival(4, 2)
    for _ in range(10):
        survival.add([Judged(0, 2, 2, 2), Judged(1, 2, 0, 1), Judged(2, 2, 2, 2)])
    survival.begin(2)
    for _ in range(50):
        survival.add([Judged(1, 2, 0, 1)])
    usual = survival.usual(np.array([1, 2]))
    assert sorted((usual[:, 0] > 0.5).tolist()) == [False, True, True]
    survival.fade()
    assert len(survival.usual(np.array([1]))) == 1


def test_times_are_told_apart() -> None:
    """Rows of drafts, rows of prompts and drafting itself are never seen alone, and yet their prices are found. Beside
    prompts a row may take longer than all that a smaller round takes: that says nothing of rounds without."""
    times, chance = Times(), random.Random(0)
    for _ in range(300):
        for depth in (0, 5):
            rows, prompt = 8 + (chance.randint(0, 40) if depth else 0), chance.choice([0, 64, 128])
            seconds = 1 + 0.1 * depth + (0.003 * (rows + prompt) - 0.5 if prompt else 0.01 * (rows - 8))
            times.add(3, depth, (rows, prompt), seconds * (1 + 0.05 * chance.random()), rests=depth == 0)
    line = times.line(3, 5, 8)
    assert line is not None
    assert line.seconds == pytest.approx(1.5, rel=0.06)
    assert line.row == pytest.approx(0.01, rel=0.2)
    assert line.prompt == pytest.approx(0.003, rel=0.2)
    middle = times.line(3, 2, 8)
    assert middle is not None
    assert middle.seconds == pytest.approx(1.2, rel=0.1)
    larger = times.line(5, 5, 20)
    assert larger is None  # not even plain rounds of that size are known
    times.add(5, 0, (20, 0), 2.0, rests=True)
    larger = times.line(5, 5, 20)
    assert larger is not None
    assert larger.seconds == pytest.approx(3.0, rel=0.1)


def test_depths() -> None:
    assert depths_up_to(1) == (0, 1)
    assert depths_up_to(5) == (0, 1, 2, 5)
    assert depths_up_to(16) == (0, 1, 2, 4, 8, 16)


@pytest.mark.parametrize("recorded", [False, True])
def test_an_engine_in_made_up_time(recorded: bool, request: pytest.FixtureRequest) -> None:
    """Two requests whose drafts stand, two whose drafts do not: rows go to the former, and while they are all there as
    many tokens come of a second as with the best fixed depth, or more."""
    if recorded:
        request.getfixturevalue("recording")
    settings = {"model": str(DEFAULT_DIRECTORY / "drafter"), "synthetic_acceptance_rates": [0.9, 0.0]}
    params = SamplingParams(max_tokens=400, temperature=0, ignore_eos=True)
    rates = {}
    for depth in (0, 2, 5, None) if recorded else (0, 1, 2, 3, 5, None):
        with (
            LLM(None, settings, device="cpu", max_num_seqs=4, max_model_len=512, watchdog=None) as llm,
            ExitStack() as how,
        ):
            if depth is not None:
                how.enter_context(llm.engine.drafting_with(FixedDepth(depth)))
            llm.engine.stopwatch = watch = MadeUpTime()
            asked = [llm.requests_for("Once upon a time", replace(params, seed=seed), 0)[0] for seed in range(4)]
            for each in asked:
                llm.engine.add(each)
            while not any(each.finished for each in asked):
                llm.engine.step()
            rates[depth] = sum(each.num_outputs for each in asked) / watch.total
    judged = [each.speculation.drafted for each in asked]
    assert recorded or min(judged[0], judged[2]) > 2 * max(judged[1], judged[3])  # so few seats have rows for all
    assert rates[None] > 0.95 * max(rate for depth, rate in rates.items() if depth is not None)  # so short a run


def test_an_engine_adapts() -> None:
    """A drafter whose drafts are always wrong soon rests; what is said is the same."""
    params = SamplingParams(max_tokens=200, temperature=0, ignore_eos=True)
    with LLM(None, None) as llm:
        plain = llm.generate("Once upon a time", params)[0].outputs[0].token_ids
    with LLM() as llm:
        assert llm.drafter is not None
        propose = llm.drafter.propose

        def wrong(*arguments: Any) -> Draft:
            draft = propose(*arguments)
            return replace(draft, tokens=torch.zeros_like(draft.tokens))

        llm.drafter.propose = wrong  # type: ignore[method-assign]
        output = llm.generate("Once upon a time", params)[0]
        assert output.outputs[0].token_ids == plain
        spent = total_speculation([output]).drafted
        assert 0 < spent < 5 * 60
    with LLM(None, {"method": "ngram", "adaptive": False}) as llm:
        assert isinstance(llm.engine.drafting.policy, FixedDepth)
    with pytest.raises(ValueError, match="adaptive must be true or false"):
        LLM(None, {"method": "ngram", "adaptive": 1})


def test_rounds_with_prompts_say_nothing_of_those_without() -> None:
    """Beside a prompt a row takes as long as it takes to compute, in other rounds hardly anything: an H200's times of
    an 8B, in milliseconds. A line through both would say that rounds without prompts take half of what they do."""
    times = Times()
    size = size_of(32)
    for number in range(60):
        for rows, milliseconds in ((256, 8.0), (512, 12.0), (1024, 22.0)):
            times.add(size, 0, (32, rows), milliseconds / 1e3, rests=True)
        if number % 10 == 0:
            times.add(size, 0, (32, 0), 5.57e-3, rests=True)
    line = times.line(size, 0, 32)
    assert line is not None
    assert line.seconds == pytest.approx(5.57e-3, rel=0.03)
    more = times.line(size, 0, 31)  # with a request less
    assert more is not None
    assert more.seconds == pytest.approx(5.5e-3, rel=0.05)
    assert times.prompt_seconds(size, rests=True) == pytest.approx(18e-6, rel=0.15)
