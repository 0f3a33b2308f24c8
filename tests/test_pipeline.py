"""As many groups of requests are under way as a pipeline has stages: while one is in a stage, others are in the others.
And they say what one process says, whoever comes and goes meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from made_up_time import MadeUpTime
from samples import drafter_settings
from test_conformance import SMALL, fixed, ids, make_prompts
from thread_ranks import Meeting, ThreadWorkers

from outrider import LLM, SamplingParams, pair
from outrider.config import EngineConfig
from outrider.engine import engine, team
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
