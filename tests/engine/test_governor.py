"""The governor in made-up worlds, where what rounds cost and bring is known: it must find the depth that is best there,
and never be much slower than plain decoding on the way."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider import LLM, SamplingParams
from outrider.engine.governor import Governor, depths_up_to
from outrider.engine.policy import FixedDepth
from outrider.llm import total_speculation
from outrider.types import Draft


@dataclass
class World:
    """A round without drafts takes one second."""

    chance: float  # that a draft token is right, if all before it are
    begin: float  # seconds that drafting takes at all
    each: float  # and for each token
    noise: float = 0.0
    lookahead: int = 5

    def seconds(self, depth: int) -> float:
        return 1 + (self.begin + self.each * depth if depth else 0.0)

    def tokens(self, depth: int) -> float:
        return sum(self.chance**number for number in range(depth + 1))

    def rate(self, depth: int) -> float:
        return self.tokens(depth) / self.seconds(depth)

    @property
    def best(self) -> float:
        return max(self.rate(depth) for depth in depths_up_to(self.lookahead))


starts = itertools.count(1)  # time goes on from run to run


def run(world: World, governor: Governor, num_rounds: int, chance: random.Random, num_requests: int = 1) -> float:
    """Tokens a second of a request. As in the engine, a round judges what the one before has drafted."""
    begun = now = 1e6 * next(starts)
    tokens = drafted = 0
    for _ in range(num_rounds):
        depth = governor.depth(num_requests)
        accepted = []
        for _ in range(num_requests):
            right = 0
            while right < drafted and chance.random() < world.chance:
                right += 1
            accepted.append(right)
        took = world.seconds(depth) * (1 + world.noise * chance.random() + 4 * world.noise * (chance.random() < 0.02))
        governor.note(accepted, depth, now, now + took)
        now += took
        tokens += sum(accepted) + num_requests
        drafted = depth
    return tokens / num_requests / (now - begun)


worlds = st.builds(
    World,
    chance=st.floats(0, 1),
    begin=st.floats(0, 1),
    each=st.floats(0, 0.4),
    noise=st.floats(0, 0.3),
    lookahead=st.integers(1, 12),
)


@given(worlds, st.integers(0, 1000), st.sampled_from([1, 3, 20]))
@settings(max_examples=150, deadline=None, derandomize=True)
def test_it_finds_the_best_depth(world: World, seed: int, num_requests: int) -> None:
    governor, chance = Governor(world.lookahead), random.Random(seed)
    early = run(world, governor, 200, chance, num_requests)
    late = run(world, governor, 3000, chance, num_requests)
    slowdown = 1 + 0.58 * world.noise  # of all rounds alike
    assert late * slowdown > 0.88 * world.best
    assert late * slowdown > 0.97  # of plain decoding
    assert early * slowdown > 0.78


def test_a_dead_drafter_costs_almost_nothing() -> None:
    world = World(chance=0.0, begin=0.3, each=0.1)
    governor, chance = Governor(5), random.Random(0)
    run(world, governor, 300, chance)
    assert run(world, governor, 5000, chance) > 0.98


def test_a_good_drafter_is_hardly_interrupted() -> None:
    world = World(chance=0.8, begin=0.1, each=0.05)
    governor, chance = Governor(5), random.Random(0)
    assert run(world, governor, 5000, chance) > 0.98 * world.rate(5)
    assert governor.depth(1) == 5


@pytest.mark.parametrize(("before", "after"), [(0.0, 0.9), (0.9, 0.0)])
def test_it_notices_when_the_text_changes(before: float, after: float) -> None:
    governor, chance = Governor(5), random.Random(1)
    run(World(before, 0.2, 0.08), governor, 2000, chance)
    world = World(after, 0.2, 0.08)
    run(world, governor, 2100, chance)  # it looks again now and then
    assert run(world, governor, 500, chance) > 0.95 * world.best


def test_sizes_are_judged_alone() -> None:
    """With many requests the same drafts are dear."""
    cheap, dear = World(0.6, 0.05, 0.05), World(0.6, 0.5, 0.4)
    governor, chance = Governor(5), random.Random(2)
    for _ in range(20):
        run(cheap, governor, 50, chance, num_requests=1)
        run(dear, governor, 50, chance, num_requests=64)
    assert governor.depth(1) >= 2
    assert governor.depth(64) == 0


def test_requests_may_want_fewer() -> None:
    """Then a trial of more ends as well, and whoever comes later finds a governor at work."""
    world, governor, chance = World(0.0, 0.3, 0.1), Governor(5), random.Random(3)
    for number in range(200):
        depth = min(governor.depth(1), 1)
        governor.note([0], depth, number * 2.0, number * 2.0 + world.seconds(depth))
    run(world, governor, 300, chance)
    assert governor.depth(1) == 0


def test_depths() -> None:
    assert depths_up_to(1) == (0, 1)
    assert depths_up_to(5) == (0, 1, 2, 5)
    assert depths_up_to(16) == (0, 1, 2, 4, 8, 16)


@pytest.mark.adaptive
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
