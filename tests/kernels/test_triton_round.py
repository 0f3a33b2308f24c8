"""The kernels around a round's networks against the torch code that says what they do."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from test_triton import DEVICE

from outrider.drafters import base
from outrider.engine.cache import Cache, CacheShape
from outrider.engine.runner import Runner, write_locations
from outrider.engine.seats import Kind, Seats
from outrider.engine.verify import verify
from outrider.kernels import dispatch
from outrider.kernels.gpu import bookkeeping
from outrider.types import Draft, Hidden, Step

TAPS, HIDDEN, PAGE_SIZE, NUM_SLOTS = 2, 24, 4, 6


@pytest.fixture(autouse=True)
def references(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared with the kernels must not use them itself."""
    for module in (base, dispatch):
        monkeypatch.setattr(module, "use_triton", lambda x: False)


def make_cache(num_carried: int, seed: int = 0) -> Cache:
    """Slots in the middle of something: a text, a draft, pages all over the place, taps."""
    shape = CacheShape(
        num_pages=60,
        page_size=PAGE_SIZE,
        num_slots=NUM_SLOTS,
        max_len=45,
        num_taps=TAPS,
        hidden_size=HIDDEN,
        lookahead=5,
        num_carried=num_carried,
    )
    cache = Cache(shape, [], torch.device(DEVICE), torch.float32)
    generator = torch.Generator().manual_seed(seed)

    def whole(high: int, *size: int) -> torch.Tensor:
        return torch.randint(high, size, generator=generator).to(DEVICE)

    state = cache.state
    state.tokens[:] = whole(50, *state.tokens.shape)
    state.lengths[:-1] = 6 + whole(15, NUM_SLOTS - 1)
    state.computed[:] = state.lengths - 1
    state.draft_count[:-1] = whole(5, NUM_SLOTS - 1)
    cache.page_table[:-1] = (torch.randperm(59, generator=generator) + 1)[: 5 * 11].view(5, 11).repeat(1, 2)[
        :, : cache.page_table.shape[1]
    ].int().to(DEVICE)  # fmt: skip
    cache.carry.copy_(torch.randn(cache.carry.shape, generator=generator))
    cache.tails.copy_(torch.randn(cache.tails.shape, generator=generator))
    return cache


def make_step(cache: Cache, num_drafts: int = 3) -> Step:
    count = 4
    kind = Kind(count, num_drafts, greedy=True, filtered=False, adjusted=False)
    device = torch.device(DEVICE)
    seats = Seats.of(kind, NUM_SLOTS - 1, 50, device)
    seats.slots.copy_(torch.tensor([2, 0, 4, NUM_SLOTS - 1]))
    seats.allowed.copy_(torch.tensor([5, 1, 5, 0]))
    seats.taken.copy_(torch.tensor([True, True, True, False]))
    return Runner(cache, 50, device).pack_round(seats, num_drafts, num_drafts)


def test_pack() -> None:
    cache = make_cache(1)
    step, state = make_step(cache), cache.state
    slots, request = step.batch.slots, step.batch.request
    starts = torch.tensor([*state.computed[slots[:3]].tolist(), 0], device=DEVICE)
    indices = starts[request] + torch.arange(16, device=DEVICE) % 4
    assert step.starts.equal(starts)
    assert step.batch.indices.equal(indices)
    assert step.batch.input_ids.equal(state.tokens[slots[request], indices])
    assert step.batch.page_table.equal(cache.page_table[slots])
    assert step.batch.write_locations.equal(write_locations(cache.page_table[slots], request, indices, PAGE_SIZE))
    wanted = torch.minimum(state.draft_count[slots], torch.tensor([5, 1, 5, 0], device=DEVICE)).clamp(max=3)
    assert step.num_valid.equal(wanted)


@pytest.mark.parametrize("num_carried", [1, 3])
def test_settle_and_keep_taps(num_carried: int) -> None:
    ours, theirs = make_cache(num_carried), make_cache(num_carried)
    steps = make_step(ours), make_step(theirs)
    generator = torch.Generator().manual_seed(3)
    choice = torch.randint(50, (4, 4), generator=generator).to(DEVICE)
    choice[:2, 0] = steps[0].batch.input_ids.view(4, 4)[:2, 1]  # some drafts are right
    choice[0, 1] = steps[0].batch.input_ids.view(4, 4)[0, 2]
    taps = torch.randn(16, TAPS, HIDDEN, generator=generator).to(DEVICE)
    hidden = Hidden(last=taps[:, 0], taps=taps, carry=ours.carry[steps[0].batch.slots])
    verdict = bookkeeping.settle(steps[0], choice)
    assert hidden.carry is not None
    bookkeeping.keep_taps(steps[0], taps, hidden.carry, verdict, (ours.carry, ours.tails))
    wanted = verify(steps[1], choice)
    theirs.commit(steps[1], wanted)
    theirs.keep_taps(steps[1], hidden, wanted)
    assert verdict.count.equal(wanted.count)
    assert verdict.kept.equal(wanted.kept)
    assert set(verdict.count.tolist()) > {0, 1}
    for name in ("lengths", "computed", "kept_state"):
        assert vars(ours.state)[name].equal(vars(theirs.state)[name]), name
    assert ours.state.tokens[:, :-1].equal(theirs.state.tokens[:, :-1])
    assert ours.carry.equal(theirs.carry)
    assert ours.tails[1:].equal(theirs.tails[1:])


FOLLOWING = [(0, 0, 0, 0), (1, 1, 0, 0), (1, 1, 2, 0), (0, 0, 0, 4)]


@pytest.mark.parametrize(("first_key", "lag", "back", "extra"), FOLLOWING)
def test_follow_and_shift(first_key: int, lag: int, back: int, extra: int) -> None:
    cache = make_cache(3)
    step = make_step(cache)
    verdict = verify(step, step.batch.input_ids.view(4, 4).roll(-1, dims=1))
    taps = torch.randn(16, TAPS, HIDDEN, device=DEVICE)
    hidden = Hidden(last=taps[:, 0], taps=taps, carry=cache.carry[step.batch.slots])
    cache.commit(step, verdict)
    cache.keep_taps(step, hidden, verdict)
    wanted = base.extend(step, first_key, lag, back=back, extra=extra)
    found = bookkeeping.follow(step, first_key, lag, back, extra)
    for name, batch_name in (("query_start",) * 2, ("request",) * 2, ("indices",) * 2, ("positions",) * 2):
        assert vars(found)[name].equal(vars(wanted.batch)[batch_name]), name
    assert found.input_ids.equal(wanted.batch.input_ids)
    assert found.last.equal(wanted.last)
    kept = wanted.batch.write_locations >= PAGE_SIZE  # the others go to the dump, anywhere in it
    assert found.locations[kept].equal(wanted.batch.write_locations[kept])
    assert bool((found.locations[~kept] < PAGE_SIZE).all())
    extension = replace(wanted, back=back)
    shifted = base.shifted(hidden, extension, step)
    assert hidden.carry is not None
    assert bookkeeping.shift(step, taps, hidden.carry, wanted.batch, back).equal(shifted)


@pytest.mark.parametrize("drafts", [True, False])
def test_note(drafts: bool) -> None:
    ours, theirs = make_cache(1), make_cache(1)
    step = make_step(ours)
    choice = step.batch.input_ids.view(4, 4).roll(-1, dims=1)
    verdict = bookkeeping.settle(step, choice)
    theirs.commit(make_step(theirs), verdict)
    made = Draft(torch.arange(20, device=DEVICE).view(4, 5), torch.tensor([5, 0, 3, 0], device=DEVICE))
    table = bookkeeping.note(step, verdict, made.tokens if drafts else None, made.count if drafts else None)
    count = made.count if drafts else torch.zeros_like(made.count)
    columns = [step.num_valid, count, verdict.count, verdict.kept]
    wanted = torch.cat([torch.stack(columns, dim=1), choice, *([made.tokens] if drafts else [])], dim=1)
    assert table.equal(wanted)
    if drafts:
        theirs.keep_draft(step.batch.slots, made)
        assert ours.state.tokens[:, :-1].equal(theirs.state.tokens[:, :-1])
        assert ours.state.draft_count.equal(theirs.state.draft_count)
    else:
        assert not ours.state.draft_count[step.batch.slots].any()
