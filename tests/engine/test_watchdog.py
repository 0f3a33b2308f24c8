"""The watchdog with the embedded pair: a drafter is broken on purpose, acceptance comes back, and nobody can tell from
the text."""

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider import LLM, SamplingParams
from outrider.config import SpeculativeConfig, WatchdogConfig
from outrider.drafters.base import Drafter
from outrider.engine.pages import PagePool
from outrider.engine.request import Request
from outrider.engine.scheduler import Scheduler, SchedulerLimits
from outrider.engine.watchdog import (
    CONTEXTS,
    LONGEST_PAUSE,
    MAX_FAILED_REBUILDS,
    RequestHealth,
    Watchdog,
    context_bucket,
)
from outrider.layers.cached import cached_layers
from outrider.pair import DEFAULT_DIRECTORY
from outrider.types import Draft, Hidden, Step, Verdict

# otherwise drafts that do not pay are not even made, and there is nothing to watch
ALWAYS = {"model": str(DEFAULT_DIRECTORY / "drafter"), "adaptive": False}

ASKED = [{"role": "user", "content": "Tell me about walking in nature."}]
OTHERS = [[{"role": "user", "content": f"What is a good way to {way}?"}] for way in ("rest", "travel")]
LONG = SamplingParams(temperature=0.8, seed=3, max_tokens=300, ignore_eos=True)


@pytest.fixture
def remembering(tmp_path: Path) -> dict[str, Any]:
    """The same without its window: it never forgets what was spoilt."""
    shutil.copytree(DEFAULT_DIRECTORY / "drafter", tmp_path / "drafter")
    config = json.loads((tmp_path / "drafter" / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in ("layer_types", "sliding_window")}
    (tmp_path / "drafter" / "config.json").write_text(json.dumps(kept))
    return {**ALWAYS, "model": str(tmp_path / "drafter")}


@pytest.fixture(scope="module")
def truth() -> dict[int, list[int]]:
    """What the target says alone, by seed; the same question with all of them."""
    with LLM(None, None) as llm:
        params = [replace(LONG, seed=seed) for seed in range(3, 6)]
        outputs = llm.generate([llm.chat_prompt(ASKED)] * 3, params)
    return {seed: output.outputs[0].token_ids for seed, output in zip(range(3, 6), outputs, strict=True)}


def start(llm: LLM, params: SamplingParams = LONG, messages: Any = None) -> Request:
    (request,) = llm.requests_for(llm.chat_prompt(messages or ASKED), params, 0)
    llm.engine.add(request)
    return request


def run(llm: LLM, until: Callable[[], bool]) -> None:
    for _ in range(2000):
        if until():
            return
        llm.engine.step()
        llm.engine.scheduler.pool.check()
    raise AssertionError("waited in vain")


def spoil(llm: LLM) -> None:
    """All that the drafter remembers becomes noise, loud enough for any head."""
    assert llm.drafter is not None
    layers = cached_layers(llm.drafter)
    assert layers
    for layer in layers:
        assert layer.pages is not None
        for pages in layer.pages:
            pages.copy_(1000 * torch.randn(pages.shape, generator=torch.Generator().manual_seed(1)))


@contextmanager
def babbling(drafter: Drafter | None) -> Iterator[None]:
    """It follows the text as always, and drafts nonsense."""
    assert drafter is not None
    propose = drafter.propose

    def babble(step: Step, hidden: Hidden, verdict: Verdict) -> Draft:
        draft = propose(step, hidden, verdict)
        return replace(draft, tokens=torch.full_like(draft.tokens, 1))

    drafter.propose = babble  # type: ignore[method-assign]
    try:
        yield
    finally:
        drafter.propose = propose  # type: ignore[method-assign]


class Since:
    """Acceptance of a request from some moment on."""

    def __init__(self, request: Request) -> None:
        self.request, self.before = request, request.speculation

    @property
    def accept_length(self) -> float:
        now = self.request.speculation
        return 1 + (now.accepted - self.before.accepted) / (now.rounds - self.before.rounds)


def test_a_spoilt_memory_is_rebuilt(truth: dict[int, list[int]], remembering: dict[str, Any]) -> None:
    found = {}
    for watchdog in (True, False):
        with LLM(None, remembering, watchdog=watchdog) as llm:
            request = start(llm)
            run(llm, lambda: request.num_outputs > 60)  # noqa: B023
            assert request.speculation.accept_length > 1.5
            spoil(llm)
            run(llm, lambda: request.num_outputs > 150)  # noqa: B023
            late = Since(request)
            run(llm, lambda: request.finished)  # noqa: B023
            assert request.outputs == truth[3]
            found[watchdog] = late.accept_length
            scheduler = llm.engine.scheduler
            assert scheduler.pool.num_free == scheduler.pool.capacity
            assert request.num_preemptions == watchdog
            if llm.engine.watchdog is not None:
                counts = llm.engine.watchdog.counts
                assert (counts.rebuilds, counts.fallbacks, counts.recoveries) == (1, 0, 1)
                events = [notice.event for notice in llm.engine.watchdog.take_notices()]
                assert events == ["drafter_rebuild", "drafter_recovered"]
                assert not llm.engine.watchdog.take_notices()
    assert found[False] < 1.05, "what was broken stays broken, or this test says nothing"
    assert found[True] > 1.5


def test_spoilt_pages_are_found_by_nobody(truth: dict[int, list[int]]) -> None:
    """A request that finds spoilt pages of an earlier one is dead from its beginning; whoever comes after it is not."""
    with LLM(None, ALWAYS, page_size=4) as llm:
        first = start(llm, replace(LONG, max_tokens=30))
        run(llm, lambda: first.finished)
        spoil(llm)
        second = start(llm, replace(LONG, seed=4))
        run(llm, lambda: second.finished)
        third = start(llm, replace(LONG, seed=5))
        run(llm, lambda: third.finished)
        assert second.num_cached > 0
        assert third.num_cached > 0
        assert llm.engine.watchdog is not None
        assert llm.engine.watchdog.counts.rebuilds == 1
        assert [second.num_preemptions, third.num_preemptions] == [1, 0]
        assert third.speculation.accept_length > 1.5
    assert [second.outputs, third.outputs] == [truth[4], truth[5]]


def test_in_company_only_the_dead_start_over(truth: dict[int, list[int]]) -> None:
    """Chunks of prompts, little memory and others that decode: all the same."""
    with LLM(None, ALWAYS, max_num_batched_tokens=24, max_num_seqs=3, page_size=4) as llm:
        requests = [start(llm, replace(LONG, seed=seed)) for seed in (3, 4)]
        run(llm, lambda: all(request.num_outputs > 60 for request in requests))
        spoil(llm)
        late = start(llm, replace(LONG, max_tokens=250), OTHERS[0])  # with pages of its own
        run(llm, lambda: all(request.finished for request in [*requests, late]))
        assert [request.num_preemptions for request in [*requests, late]] == [1, 1, 0]
        assert [request.outputs for request in requests] == [truth[3], truth[4]]


def test_a_drafter_beyond_repair_rests_and_is_tried_again(truth: dict[int, list[int]]) -> None:
    settings = WatchdogConfig(pause=10)
    with LLM(None, ALWAYS, watchdog=settings) as llm:
        request = start(llm, replace(LONG, trace=True))
        with babbling(llm.drafter):
            run(llm, lambda: request.standing.is_paused)
            assert llm.engine.watchdog is not None
            counts = llm.engine.watchdog.counts
            assert (counts.rebuilds, counts.fallbacks, counts.recoveries) == (1, 1, 0)
            begin = len(request.trace)
            run(llm, lambda: len(request.trace) > begin + 100)
        drafted = [bool(entry["draft"]) for entry in request.trace[begin:]]
        assert sum(drafted) <= 16, "few rounds have a draft"
        assert drafted[1:10] == [False] * 9
        assert any(drafted[10:]), "it is tried again now and then"
        run(llm, lambda: counts.recoveries == 1)
        recovered = Since(request)
        run(llm, lambda: request.finished)
        assert recovered.accept_length > 1.5
        assert request.outputs == truth[3]
        assert (counts.rebuilds, counts.fallbacks) == (1, 1)


def test_predictions_are_used_while_the_drafter_rests(truth: dict[int, list[int]]) -> None:
    prediction = truth[3][:10] + [5] * 3 + truth[3][150:]
    with LLM(None, ALWAYS) as llm, babbling(llm.drafter):
        request = start(llm, replace(LONG, prediction=prediction))
        run(llm, lambda: request.standing.is_paused)
        assert request.num_outputs < 150
        run(llm, lambda: request.finished)
        assert request.num_predicted_accepted > 100
        assert request.outputs == truth[3]
        assert request.standing.pause > 0, "what was predicted says nothing about the drafter"


def test_without_memory_there_is_nothing_to_rebuild(truth: dict[int, list[int]]) -> None:
    with LLM(None, {"method": "ngram", "prompt_lookup_min": 1, "adaptive": False}) as llm, babbling(llm.drafter):
        request = start(llm)
        run(llm, lambda: request.finished)
        assert llm.engine.watchdog is not None
        assert (llm.engine.watchdog.counts.rebuilds, llm.engine.watchdog.counts.fallbacks) == (0, 1)
        assert request.outputs == truth[3]


def test_who_forces_a_drafter_has_it(truth: dict[int, list[int]]) -> None:
    with LLM() as embedded:
        settings = embedded.config.speculative
        assert settings is not None
    with LLM(None, replace(settings, force=True)) as llm, babbling(llm.drafter):
        request = start(llm)
        run(llm, lambda: request.finished)
        assert llm.engine.watchdog is not None
        assert llm.engine.watchdog.counts.rebuilds == llm.engine.watchdog.counts.fallbacks == 0
        assert llm.engine.watchdog.is_dead, "it is told all the same"
        assert request.outputs == truth[3]


def test_who_starts_over_takes_no_page_of_others() -> None:
    """Two requests with the same prompt: pages of the first are found under the names that those of the second had."""
    scheduler = Scheduler(SchedulerLimits(2, 64, 48, 4, 0), PagePool(40))
    first, second = (Request(name, list(range(10)), SamplingParams(max_tokens=20), seed=0) for name in ("a", "b"))
    for request in (first, second):
        scheduler.add(request)

    def step() -> list[int]:
        plan = scheduler.next(0).work
        for work in plan:
            work.request.append(1, 48)
            scheduler.update(work, work.num_rows, 0)
        return [work.num_rows for work in plan if work.request is second]

    assert step() == [10]
    scheduler.restart(second)
    assert step() == [11], "all of it is computed again"
    assert not set(first.pages) & set(second.pages)
    scheduler.preempt(second)
    assert step() == [4], "once: what was computed again may be reused"
    scheduler.pool.check()


# the rules alone


def watchdog(clock: Callable[[], float] | None = None, **settings: Any) -> Watchdog:
    return Watchdog(
        WatchdogConfig(**settings), acts=True, rebuilds=True, clock=clock or itertools.count(step=1000).__next__
    )


def rounds(dog: Watchdog, standing: RequestHealth, count: int, accepted: int, context_len: int = 100) -> None:
    for _ in range(count):
        standing.needs_rebuild = False
        if standing.is_paused:
            dog.plain_round(standing)
        else:
            dog.drafted_round(standing, "r", context_len, (5, accepted))


def test_when_a_request_counts_as_dead() -> None:
    dog = watchdog()
    beginner, veteran = RequestHealth(), RequestHealth()
    rounds(dog, beginner, 35, 0)
    assert not beginner.rebuilt
    rounds(dog, beginner, 1, 0)
    assert beginner.rebuilt
    rounds(dog, veteran, 500, 2)
    rounds(dog, veteran, 40, 0)
    assert not veteran.rebuilt
    rounds(dog, veteran, 10, 0)
    assert veteran.rebuilt
    now_and_then = RequestHealth()
    for _ in range(200):  # one token in four rounds is little, and not nothing
        rounds(dog, now_and_then, 3, 0)
        rounds(dog, now_and_then, 1, 1)
    assert not now_and_then.rebuilt


def test_rests_grow_and_end() -> None:
    dog, standing = watchdog(pause=4), RequestHealth()
    lengths, resting = [], 0
    for _ in range(2000):
        rounds(dog, standing, 1, 0)
        if standing.is_paused:
            resting = max(resting, standing.plain_rounds)
        elif resting:
            lengths.append(resting)
            resting = 0
    assert lengths[:5] == [4, 8, 16, 32, 64]
    assert set(lengths[4:]) == {4 * LONGEST_PAUSE}
    assert dog.counts.fallbacks == dog.counts.rebuilds == 1
    rounds(dog, standing, 300, 3)
    assert dog.counts.recoveries == 1
    assert not standing.is_paused
    rounds(dog, standing, 60, 0)
    assert (dog.counts.fallbacks, dog.counts.rebuilds) == (2, 1), "it is rebuilt once in its life"


def test_rebuilds_that_never_help_are_given_up() -> None:
    dog = watchdog()
    for _ in range(10):
        rounds(dog, RequestHealth(), 80, 0, context_len=5000)
    assert dog.counts.rebuilds == MAX_FAILED_REBUILDS
    assert dog.counts.fallbacks == 10
    rounds(dog, RequestHealth(), 80, 0, context_len=100)
    assert dog.counts.rebuilds == MAX_FAILED_REBUILDS + 1, "other lengths are another matter"
    rounds(dog, RequestHealth(), 200, 2, context_len=5000)
    rounds(dog, RequestHealth(), 50, 0, context_len=5000)
    assert dog.counts.rebuilds == MAX_FAILED_REBUILDS + 2, "where drafts are accepted, memory may be what ails"


def test_alarms() -> None:
    dog = watchdog()

    def events() -> list[tuple[str, bool]]:
        return [(each.event, each.is_alarm) for each in dog.take_notices() if each.event.startswith("acceptance")]

    rounds(dog, RequestHealth(), 100, 1)
    assert events() == []
    for _ in range(10):
        rounds(dog, RequestHealth(), 30, 0)  # none of them lives long enough to be judged alone
    assert dog.is_dead
    assert events() == [("acceptance_dead", True)]
    rounds(dog, RequestHealth(), 100, 2)
    assert not dog.is_dead
    assert events() == [("acceptance_alive", False)]
    looping = RequestHealth()
    rounds(dog, looping, 100, 5)
    assert events() == [("acceptance_suspicious", True)], "once for each request"
    assert not looping.is_paused
    rounds(dog, RequestHealth(), 400, 5)
    assert events() == [("acceptance_suspicious", True)] * 2, "this one, and then all together"
    assert dog.is_suspicious
    rounds(dog, RequestHealth(), 400, 5)
    assert events() == []


def test_suspicions_are_told_now_and_then() -> None:
    """However many requests are in a loop; and never where acceptance is made up."""
    moments = iter(range(10**6))
    dog = watchdog(clock=lambda: next(moments) / 10, engine_window=10**6)
    for _ in range(1200):
        rounds(dog, RequestHealth(), 80, 5)
    told = [each.event for each in dog.take_notices()]
    seconds = next(moments) / 10
    assert told == ["acceptance_suspicious"] * len(told)
    assert 2 <= len(told) <= 1 + seconds / 60
    made_up = SpeculativeConfig(method="ngram", synthetic_acceptance_rates=(1.0,))
    for settings, suspects in ((made_up, False), (SpeculativeConfig(method="ngram"), True)):
        with LLM(None, vars(settings) | {"adaptive": False}, max_model_len=256) as llm:
            dog = llm.engine.watchdog
            assert dog is not None
            rounds(dog, RequestHealth(), 200, 5)
            assert bool(dog.take_notices()) is suspects


def test_notices_are_bounded_and_settings_are_checked() -> None:
    dog = watchdog(window=1, engine_window=1)
    rounds(dog, RequestHealth(), 3000, 0)
    for _ in range(3000):
        rounds(dog, RequestHealth(), 1, 5)
        rounds(dog, RequestHealth(), 1, 0)
    assert len(dog.take_notices()) == 1000
    for wrong in (
        {"window": 0},
        {"pause": 1.5},
        {"dead_acceptance": 0},
        {"suspicious_share": 2},
        {"engine_window": True},
    ):
        with pytest.raises(ValueError, match=f"watchdog: {next(iter(wrong))} must be"):
            WatchdogConfig(**wrong)  # type: ignore[arg-type]


def test_buckets_hold_every_length() -> None:
    names = [context_bucket(length) for length in (1, 256, 257, 65536, 65537, 10**7)]
    assert names == ["<=256", "<=256", "<=1024", "<=65536", ">65536", ">65536"]
    assert len({context_bucket(end) for end in CONTEXTS}) == len(CONTEXTS)
