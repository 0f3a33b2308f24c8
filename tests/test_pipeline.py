"""As many groups of requests are under way as a pipeline has stages: while one is in a stage, others are in the others.
And they say what one process says, whoever comes and goes meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from fuzz_pairs import Pairs
from samples import Oracle
from test_conformance import SMALL, ids, make_prompts
from thread_ranks import Meeting, ThreadWorkers

from outrider import LLM, SamplingParams, pair
from outrider.certify import trial
from outrider.certify.fuzz import Truth, run_world
from outrider.certify.trial import FuzzFigures, Pair, open_engine
from outrider.certify.worlds import MAX_MODEL_LEN, World, draw_world
from outrider.config import EngineConfig
from outrider.engine import engine, team
from outrider.engine.pages import PagePool
from outrider.engine.round import CHECKS, Pass
from outrider.engine.stages import StagedRound
from outrider.engine.team import RankPlace, Team, join
from outrider.types import Step

SECONDS = 15.0


class GlooThreadWorkers(ThreadWorkers):
    """Ranks are threads, but talk over sockets as processes do: there, who sends may have to wait for who receives."""

    def _meet(self, config: EngineConfig) -> tuple[list[Team], list[Meeting]]:
        store, size = dist.HashStore(), config.num_ranks
        places = [RankPlace(rank, size, config.pipeline_parallel_size, "cpu", True, "secret") for rank in range(size)]
        with ThreadPoolExecutor(size) as pool:
            return list(pool.map(lambda place: join(store, place), places)), []


@pytest.fixture(autouse=True)
def _threads(monkeypatch: pytest.MonkeyPatch) -> None:
    use(ThreadWorkers, monkeypatch)


def use(workers: type[ThreadWorkers], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "take_workers", workers)
    for module in (pair, engine):
        monkeypatch.setattr(module, "return_workers", ThreadWorkers.end)


class Gate:
    """Keeps a stage in the middle of a round until the first stage has sent as many more as there are stages between
    them. If rounds did not overlap, nobody would ever get through."""

    def __init__(self, num_stages: int) -> None:
        self.num_stages, self.num_rounds = num_stages, 10**9
        self._changed = threading.Condition()
        self.sent = 0  # rounds that the first stage has sent
        self.slots: dict[int, set[int]] = {}
        self.overlaps: set[tuple[int, int]] = set()  # stage, round

    def has_sent(self, step: Step) -> None:
        with self._changed:
            self.sent = step.number
            self.slots[step.number] = set(step.batch.slots.tolist())
            self._changed.notify_all()

    def pass_through(self, stage: int, number: int) -> None:
        if number + stage > self.num_rounds:
            return  # the last rounds have nobody behind them
        with self._changed:
            assert self._changed.wait_for(lambda: self.sent >= number + stage, SECONDS), f"{stage}: {number} is alone"
            self.overlaps.add((stage, number))


@pytest.mark.parametrize("num_stages", [2, 3])
def test_stages_are_at_work_on_different_groups(
    num_stages: int, target_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    use(GlooThreadWorkers, monkeypatch)
    monkeypatch.setattr(team, "FOREVER", timedelta(seconds=2 * SECONDS))
    gate, forward = Gate(num_stages), StagedRound.forward
    num_tokens, count = 6, 2 * num_stages
    gate.num_rounds = num_tokens * num_stages

    def gated(self: StagedRound, step: Step, out: Pass | None = None) -> Pass:
        passed = forward(self, step, out)
        if self._stage.number:
            gate.pass_through(self._stage.number, step.number)
        else:
            gate.has_sent(step)
        return passed

    monkeypatch.setattr(StagedRound, "forward", gated)
    params = SamplingParams(max_tokens=num_tokens, temperature=0.8, seed=1, ignore_eos=True)
    found = []
    for size in (1, num_stages):
        with LLM(target_path("llama"), None, pipeline_parallel_size=size, **SMALL) as llm:
            found.append(ids(llm.generate(make_prompts(count), params)))
    assert found[0] == found[1]
    assert gate.sent == gate.num_rounds, "every group has a round for every token"
    for number in range(1, gate.num_rounds - num_stages + 2):
        assert all((stage, number) in gate.overlaps for stage in range(1, num_stages))
        together = [gate.slots[number + ahead] for ahead in range(num_stages)]
        assert [len(slots) for slots in together] == [2] * num_stages
        assert len(set.union(*together)) == count, "nobody is in two rounds at once"


def test_the_slot_of_a_request_that_was_given_up(
    target_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first stage has yet to hear of its round: whoever is given the slot must not be mistaken for it. And what is
    under way when all give up harms neither those who come later nor the end."""
    use(GlooThreadWorkers, monkeypatch)
    monkeypatch.setattr(team, "FOREVER", timedelta(seconds=2 * SECONDS))
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    prompts = make_prompts(3)
    with LLM(target_path("llama"), None, **SMALL) as llm:
        expected = ids(llm.generate(prompts, params))
    with LLM(target_path("llama"), None, pipeline_parallel_size=2, **SMALL) as llm:
        short, given_up, last = (llm.requests_for(prompt, params, 0)[0] for prompt in prompts)
        short.params = replace(params, max_tokens=1)
        llm.engine.add(short)
        llm.engine.add(given_up)
        llm.engine.step()
        assert short.finished
        assert given_up.flying
        slot = given_up.slot
        llm.engine.abort(given_up)
        llm.engine.add(last)
        llm.engine.step()
        llm.engine.step()
        assert last.slot == slot
        while llm.engine.has_work:
            llm.engine.step()
        assert last.outputs == expected[2]
        for prompt in prompts:
            llm.engine.add(llm.requests_for(prompt, params, 0)[0])
        llm.engine.step()
        for request in list(llm.engine.scheduler.running):
            llm.engine.abort(request)
        assert ids(llm.generate(prompts, params)) == expected
        llm.engine.add(llm.requests_for(prompts[0], params, 0)[0])
        llm.engine.add(llm.requests_for(prompts[1], params, 0)[0])
        llm.engine.step()


# random worlds: requests come and go, are preempted, start over, find the pages of others


def open_staged(world: World, pair: Pair) -> LLM:
    """Few pages where the world has few: the first rank alone keeps the books."""
    llm = open_engine(replace(world, spare_pages=None), pair)
    if world.spare_pages is not None:
        scheduler = llm.engine.scheduler
        num_pages = scheduler._pages_for(MAX_MODEL_LEN) + world.spare_pages
        smaller = PagePool(min(num_pages + 1, scheduler.pool.num_pages), scheduler.pool._forgets)
        scheduler.pool = scheduler.prefixes.pool = smaller
    return llm


def run_staged(seed: str, pair: Pair, sizes: tuple[int, int], truth: Truth, patch: pytest.MonkeyPatch) -> FuzzFigures:
    """The world of a seed where there are so many ranks and stages. A step that is broken off would end the engine."""
    world = replace(draw_world(seed, truth.ground), faults={})
    answers = {asked.number: truth.answers(asked) for asked in world.asked}
    patch.setattr(Oracle, "truth", [[*each.prompt, *each.outputs] for made in answers.values() for each in made])
    patch.setattr(Oracle, "skill", world.skill)
    patch.setattr(trial, "open_engine", open_staged)
    truth.tolerance = 0.0 if sizes[0] == 1 else 1e-4  # ranks add up otherwise than one does, stages do not
    config = replace(pair.config, tensor_parallel_size=sizes[0], pipeline_parallel_size=sizes[1])
    figures, failure = run_world(world, replace(pair, config=config), truth, answers)
    assert failure is None, f"world {seed}, {pair.name}, {sizes}: request {failure.request}, {failure.what}"
    return figures


WORLDS = [
    ("llama oracle", (1, 2)),
    ("nemotron_h oracle", (1, 3)),
    ("qwen3 ngram+eagle3", (2, 2)),
    ("llama suffix", (1, 2)),
]


def test_in_random_worlds_everybody_is_told_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pairs, total = Pairs(tmp_path), FuzzFigures()
    for number, (name, sizes) in enumerate(WORLDS):
        pair = pairs.pair(name)
        truth = Truth(pair)
        monkeypatch.setenv(CHECKS, "1" if number % 2 else "")
        total.add(run_staged(f"3-{number}", pair, sizes, truth, monkeypatch))
        truth.close()
    happened = vars(total)
    assert [name for name, value in happened.items() if not value] == ["faults", "recorded_rounds"], happened
