"""How long rounds take: what disturbs them is not counted as theirs."""

from __future__ import annotations

import time
from types import SimpleNamespace

import pytest
from environment import MEASURED_LAP
from replay import Replays

from outrider import LLM, SamplingParams
from outrider.engine.flight import Flight
from outrider.engine.governor import Governor
from outrider.engine.graphs import GraphKey, Recording
from outrider.engine.policy import Landed
from outrider.engine.stopwatch import Stopwatch

RECORDING = 0.5  # seconds that a recording takes: longer than any round of a tiny model


class Watch(Stopwatch):
    lap = MEASURED_LAP


def test_a_round_takes_from_its_planning_or_the_end_of_the_one_before_to_its_end() -> None:
    watch, first, second = Watch(), launched(1.0), launched(1.5)
    assert watch.lap(first, 3.0) == 2.0
    assert watch.lap(second, 4.0) == 1.0


def test_rounds_under_way_while_something_else_is_done_are_not_timed() -> None:
    now = 0.0
    watch = Watch(lambda: now)
    first, second, third = launched(1.0), launched(2.0), launched(9.5)
    now = 9.0
    watch.disturb()  # the second one was recorded first, while the other was under way
    assert watch.lap(first, 9.1) == 0
    assert watch.lap(second, 10.0) == pytest.approx(0.9)  # since the end of the first
    assert watch.lap(third, 11.0) == 1.0


def launched(when: float) -> Flight:
    return SimpleNamespace(launched=when)  # type: ignore[return-value]


class Noted(Governor):
    """One that keeps what it is told."""

    def __init__(self, lookahead: int, num_slots: int) -> None:
        super().__init__(lookahead, num_slots)
        self.heard: list[Landed] = []

    def note(self, landed: Landed) -> None:
        self.heard.append(landed)
        super().note(landed)


@pytest.mark.usefixtures("recording")
def test_a_governor_is_not_told_what_recordings_take(monkeypatch: pytest.MonkeyPatch) -> None:
    record = Replays._record

    def slowly(graphs: Replays, key: GraphKey) -> Recording:
        time.sleep(RECORDING)
        return record(graphs, key)

    monkeypatch.setattr(Replays, "_record", slowly)
    params = SamplingParams(max_tokens=40, temperature=0, ignore_eos=True)
    with LLM(device="cpu", max_num_seqs=2, max_model_len=256, watchdog=None) as llm:
        engine = llm.engine
        engine.stopwatch = Watch()
        policy = Noted(engine.lookahead, engine.cache.shape.num_slots)
        with engine.drafting_with(policy):
            llm.generate("Once upon a time", params)
        assert engine.num_recordings >= 3
    disturbed = [each for each in policy.heard if each.seconds == 0]
    assert disturbed
    assert any(each.judged for each in disturbed)  # what drafts were worth counts all the same
    assert all(each.seconds < RECORDING for each in policy.heard)
