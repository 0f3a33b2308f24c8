"""The governor in the traffic of a server, in simulated time: many requests that come and go, with what rounds take on
a GPU. It is compared with plain decoding and with every depth that is the same for all."""

from __future__ import annotations

import functools
import random
import statistics

import pytest
from simulated import LOOKAHEAD, Rate, SimulatedEngine, Traffic, cpu_milliseconds, small_milliseconds

from outrider.engine.governor import Governor
from outrider.engine.policy import FixedDepth

RATES: dict[str, Rate] = {
    "mixed": lambda number, now: (0.9, 0.1)[number % 2],
    "good": lambda number, now: 0.9,
    "bad": lambda number, now: 0.1,
    "never": lambda number, now: 0.0,
    "changing": lambda number, now: (0.1, 0.9)[int(now / 6) % 2],
}
NUM_REQUESTS = {8: 64, 32: 256, 128: 512}


class Plain(FixedDepth):
    """No drafter: nothing follows a text."""

    def __init__(self) -> None:
        super().__init__(0)

    def wants(self, num_requests: int, num_unseen: int = 0, num_left: int = 0) -> bool:
        return False


class NewcomersFirst(FixedDepth):
    """Beside prompts it drafts as far as the governor may, and pauses where more prompts wait than a round can read:
    that is not the governor's to decide."""

    adaptive = True
    depths = property(lambda self: Governor(LOOKAHEAD, 1).depths)  # type: ignore[assignment]


def traffic(rates: str, clients: int) -> Traffic:
    many = 2 if rates == "changing" else 1
    return Traffic(clients, RATES[rates], many * NUM_REQUESTS[clients])


@functools.cache
def fixed(rates: str, clients: int, kind: type[FixedDepth]) -> list[float]:
    """Tokens a second: plain, and with each depth."""
    asked = traffic(rates, clients)
    return [asked.run(Plain())[0], *(asked.run(kind(depth))[0] for depth in range(1, LOOKAHEAD + 1))]


def adaptive(rates: str, clients: int, seed: int) -> float:
    """After as many requests as there are clients."""
    governor = Governor(LOOKAHEAD, clients + 1)
    Traffic(clients, RATES[rates], clients).run(governor, seed=9)
    return traffic(rates, clients).run(governor, seed=seed)[0]


@pytest.mark.parametrize("seed", [0, 1, 2, 5, 7])  # the last two: at 32 clients a moment's rest that forgot all
@pytest.mark.parametrize(("clients", "low", "gain"), [(8, 0.96, 1.15), (32, 1.0, 1.1), (128, 1.0, 1.03)])
def test_drafts_that_stand_for_some_and_not_for_others(clients: int, low: float, gain: float, seed: int) -> None:
    """Those whose drafts stand leave soon, so that often hardly one of them is there. That is no reason to stop: who
    comes is good again. (The warm-up ends with none of them: what they were like must not be forgotten.) At eight
    clients no round can leave out anybody's rows; a fixed depth is the best there is. At 128 no depth brings much."""
    found, others = adaptive("mixed", clients, seed), fixed("mixed", clients, FixedDepth)
    assert found > gain * others[0]
    assert found > low * max(others)


def test_how_far_is_drafted_beside_prompts() -> None:
    """A policy of one depth has no other."""
    for policy, depth in ((FixedDepth(3), 3), (FixedDepth(1), 1), (Governor(LOOKAHEAD, 1), 2)):
        assert SimulatedEngine(policy, 1, RATES["good"], 64).graphs.reading_depth == depth


@pytest.mark.parametrize("clients", [8, 32, 128])
def test_drafts_that_stand_for_all(clients: int) -> None:
    found, others = adaptive("good", clients, 0), fixed("good", clients, NewcomersFirst)
    assert found > 0.97 * max(others)


@pytest.mark.parametrize("rates", ["bad", "never"])
@pytest.mark.parametrize("clients", [8, 32, 128])
def test_drafts_that_stand_for_nobody(rates: str, clients: int) -> None:
    assert adaptive(rates, clients, 0) > 0.98 * traffic(rates, clients).run(Plain())[0]


def test_it_is_found_out_what_a_drafter_takes_to_follow_prompts() -> None:
    """All prompts are of one length, and no draft pays: nor does it pay to show them to the drafter."""
    asked = Traffic(1, alike(0.5), 192, 256, 32, 0.02, cpu_milliseconds)
    plain = asked.run(Plain())[0]
    assert max(asked.run(FixedDepth(depth))[0] for depth in (1, 2, 5)) < plain
    assert asked.run(Governor(LOOKAHEAD, 2))[0] > 0.988 * plain


@pytest.mark.parametrize("clients", [1, 2, 4])
def test_few_clients_whose_drafts_pay_a_little(clients: int) -> None:
    """A few drafts that fall by bad luck do not end it: whoever rests would not find out for long."""
    asked = Traffic(clients, lambda number, now: 0.3, 24 * clients)
    best = max(asked.run(FixedDepth(depth))[0] for depth in range(1, LOOKAHEAD + 1))
    assert best > 1.1 * asked.run(Plain())[0]
    for seed in (0, 1, 2):
        assert asked.run(Governor(LOOKAHEAD, clients + 1), seed=seed)[0] > 0.97 * best


def alike(mean: float) -> Rate:
    """Requests that differ a little."""
    return lambda number, now: mean + random.Random(number).uniform(-0.2, 0.2)


def test_a_bad_beginning_does_not_end_it() -> None:
    """Beside a small target a rest is decided on within a twentieth of a second, and an answer's first words say little
    of the others: drafts that seem to lose a little are made a little longer."""
    asked = Traffic(1, alike(0.5), 24, 64, 128, 0.0, small_milliseconds)
    plain = asked.run(Plain())[0]
    assert max(asked.run(FixedDepth(depth))[0] for depth in (1, 2, 5)) > 1.15 * plain
    assert all(asked.run(Governor(LOOKAHEAD, 2), seed=seed)[0] > 1.12 * plain for seed in range(8))


@pytest.mark.parametrize("clients", [1, 8])
def test_patience_costs_little(clients: int) -> None:
    asked = Traffic(clients, alike(0.2), 24 * clients, 64, 128, 0.0, small_milliseconds)
    plain = asked.run(Plain())[0]
    assert (
        statistics.mean(asked.run(Governor(LOOKAHEAD, clients + 1), seed=seed)[0] for seed in range(4)) > 0.975 * plain
    )


def test_sizes_that_pass_too_soon_to_be_judged() -> None:
    """All 32 answers end together: on the way back there are 20 requests for a few rounds, which read prompts. It has
    been found out by then that drafts do not pay for 32."""
    asked = Traffic(32, alike(0.05), 18 * 32, 100, 128, 0.0001, small_milliseconds)
    plain = asked.run(Plain())[0]
    for seed in (0, 1):
        assert asked.run(Governor(LOOKAHEAD, 33), seed=seed)[0] > 0.97 * plain


@pytest.mark.parametrize("clients", [1, 2, 4])
def test_few_clients_whose_drafts_stand_seldom(clients: int) -> None:
    asked = Traffic(clients, lambda number, now: 0.1, 24 * clients)
    plain = asked.run(Plain())[0]
    for seed in (0, 1, 2):
        assert asked.run(Governor(LOOKAHEAD, clients + 1), seed=seed)[0] > 0.975 * plain


@pytest.mark.parametrize("clients", [8, 32])
def test_texts_that_change(clients: int) -> None:
    assert adaptive("changing", clients, 0) > 0.98 * traffic("changing", clients).run(Plain())[0]
