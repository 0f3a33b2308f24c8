"""The operations of a round in C against the torch code that says what they do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_triton import DEVICE
from test_triton_round import (
    CATCHING,
    HIDDEN,
    LOOKAHEAD,
    NUM_SLOTS,
    ROUNDS,
    TAPS,
    check_lay_out,
    make_cache,
    make_step,
    right_choices,
)

from outrider.kernels import native_round
from outrider.kernels import round as rounds
from outrider.kernels import taps as taps_reference
from outrider.kernels.ahead import rows_ahead_reference
from outrider.kernels.dispatch import use_native_round
from outrider.kernels.lookup import Lookup, lookup_reference
from outrider.types import Draft, RoundShape

pytestmark = pytest.mark.skipif(
    DEVICE != "cpu" or not use_native_round(torch.zeros(1)), reason="no native kernels for this device"
)


@pytest.mark.parametrize("missed", [False, True])
@pytest.mark.parametrize(("people", "shape"), ROUNDS)
def test_lay_out(people: list[list[int]], shape: RoundShape, missed: bool) -> None:
    check_lay_out(rounds.lay_out, people, shape, missed)


@pytest.mark.parametrize("kind", ["none", "draft", "predicted", "forced", "rest"])
@pytest.mark.parametrize(("people", "shape"), ROUNDS)
def test_judge_and_outcome(people: list[list[int]], shape: RoundShape, kind: str) -> None:
    shape = RoundShape(**{**vars(shape), "rests": kind == "rest"})
    ours, theirs = make_cache(), make_cache()
    steps = make_step(ours, people, shape), make_step(theirs, people, shape)
    choice = right_choices(steps[0], 6)
    verdict, wanted = native_round.judge(steps[0], choice), rounds.judge_reference(steps[1], choice)
    for name, value in vars(wanted).items():
        assert vars(verdict)[name].equal(value), name
    tokens = torch.arange(shape.num_seats * LOOKAHEAD).view(LOOKAHEAD, -1).T  # drafters make them so
    count = torch.where(steps[0].emits, torch.arange(shape.num_seats) % (LOOKAHEAD + 1), 0)
    draft = None if kind in ("none", "rest") else Draft(tokens, count, count > 2 if kind == "predicted" else None)
    if draft is not None and kind == "forced":
        draft.forced = count < 2
    table = native_round.write_outcome(steps[0], verdict, draft, rounds.NUM_COUNTS)
    assert table.equal(rounds.write_outcome_reference(steps[1], wanted, draft))
    for name in ("lengths", "computed", "kept_state", "draft_count", "followed"):
        assert vars(ours.state)[name].equal(vars(theirs.state)[name]), name
    assert ours.state.tokens[:, :-1].equal(theirs.state.tokens[:, :-1])


@pytest.mark.parametrize("catching", CATCHING)
@pytest.mark.parametrize(("people", "shape"), ROUNDS)
def test_extension(people: list[list[int]], shape: RoundShape, catching: tuple[int, int, int, int]) -> None:
    cache = make_cache(3)
    step = make_step(cache, people, shape)
    rounds.judge_reference(step, right_choices(step, 4))
    rows, positions, last = rounds.extension_rows(step, rounds.Catching(*catching))
    wanted, wanted_positions, wanted_last = rounds.extension_rows_reference(step, rounds.Catching(*catching))
    assert positions.equal(wanted_positions)
    assert last.equal(wanted_last)
    for name, value in vars(wanted).items():
        assert vars(rows)[name].equal(value), name


@pytest.mark.parametrize("num_carried", [1, 3])
@pytest.mark.parametrize(("people", "shape"), ROUNDS)
def test_taps_that_are_kept(people: list[list[int]], shape: RoundShape, num_carried: int) -> None:
    ours, theirs = make_cache(num_carried), make_cache(num_carried)
    step = make_step(ours, people, shape)
    verdict = rounds.judge_reference(step, right_choices(step, 3))
    taps, carried = torch.randn(shape.num_rows, TAPS, HIDDEN), ours.carry[step.batch.slots]
    native_round.keep_taps(step, taps, carried, verdict, (ours.carry, ours.tails))
    taps_reference.keep_taps_reference(step, taps, carried, verdict, (theirs.carry, theirs.tails))
    assert ours.carry[:-1].equal(theirs.carry[:-1])
    assert ours.tails[1:].equal(theirs.tails[1:])


@pytest.mark.parametrize(("people", "shape"), ROUNDS)
def test_taps_that_a_drafter_misses(people: list[list[int]], shape: RoundShape) -> None:
    batch = make_step(make_cache(1), people, shape).batch
    taps = torch.randn(shape.num_rows, TAPS, HIDDEN)
    ours, theirs = torch.zeros(2, NUM_SLOTS, 7, TAPS, HIDDEN)
    native_round.keep_missed(batch, taps, ours)
    taps_reference.keep_missed_reference(batch, taps, theirs)
    assert ours[:-1].equal(theirs[:-1])  # the last one is nobody's
    assert ours[:-1].any()


@pytest.mark.parametrize("catching", CATCHING)
@pytest.mark.parametrize(("people", "shape"), ROUNDS)
def test_taps_of_the_rows_before(people: list[list[int]], shape: RoundShape, catching: tuple[int, ...]) -> None:
    cache, how = make_cache(3), rounds.Catching(*catching)
    step = make_step(cache, people, shape)
    rounds.judge_reference(step, right_choices(step, 4))
    rows, _, _ = rounds.extension_rows_reference(step, how)
    batch = replace(step.batch, request=rows.request, query_start=rows.query_start)
    taps, carried = torch.randn(shape.num_rows, TAPS, HIDDEN), cache.carry[step.batch.slots]
    found = native_round.shift_taps(step, taps, carried, batch, how.back)
    inside = int(rows.query_start[-1])
    assert found[:inside].equal(taps_reference.shift_taps_reference(step, taps, carried, batch, how.back)[:inside])


@pytest.mark.parametrize(("people", "shape"), ROUNDS)
def test_rows_ahead(people: list[list[int]], shape: RoundShape) -> None:
    step = make_step(make_cache(), people, shape)
    rounds.judge_reference(step, right_choices(step, 4))
    found, wanted = native_round.rows_ahead(step, 3), rows_ahead_reference(step, 3)
    assert all(one.equal(other) for one, other in zip(found, wanted, strict=True))


@given(
    texts=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=24), min_size=1, max_size=4),
    depth=st.integers(1, 5),
    more=st.integers(0, 3),
    shortest=st.integers(1, 3),
    wider=st.integers(0, 6),
)
def test_lookup(texts: list[list[int]], depth: int, more: int, shortest: int, wider: int) -> None:
    """Of three tokens, so that much stands there twice, and with other texts' ends in the same places."""
    how, width = Lookup(depth, depth + more, shortest, shortest + wider), 26
    tokens = torch.arange(2 * len(texts) * width).view(-1, width) % 3
    slots, lengths = torch.arange(len(texts)) * 2, torch.tensor([len(text) for text in texts])
    for slot, text in zip(slots.tolist(), texts, strict=True):
        tokens[slot, : len(text)] = torch.tensor(text)
    found, count = native_round.lookup(tokens, slots, lengths, how)
    wanted, wanted_count = lookup_reference(tokens, slots, lengths, int(lengths.max()), how)
    assert count.tolist() == wanted_count.tolist()
    for row, other, size in zip(found, wanted, count.tolist(), strict=True):
        assert row[:size].tolist() == other[:size].tolist()
