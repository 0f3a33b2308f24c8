"""What host and device tell each other of recorded rounds, where a draft's rows go, and what is made up where rounds
are measured: in Triton, against torch."""

from __future__ import annotations

import random

import pytest
import torch
from test_triton import DEVICE
from test_triton_round import LOOKAHEAD, PAGE_SIZE, ROUNDS, make_cache, make_step, right_choices

from outrider.engine import verify
from outrider.engine.mailbox import LEAST_ROUNDS, Mailbox
from outrider.kernels import ahead, mail, round
from outrider.kernels.gpu import ahead as gpu_ahead
from outrider.kernels.gpu import mail as gpu_mail
from outrider.kernels.gpu import round as gpu_round
from outrider.kernels.gpu import synthetic as gpu_synthetic
from outrider.types import Draft, RoundShape

WIDTH = round.NUM_COUNTS + 1 + 2 * LOOKAHEAD


@pytest.fixture(autouse=True)
def references(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared with the kernels must not use them itself."""
    for module in (ahead, mail, round):
        monkeypatch.setattr(module, "use_triton", lambda x: False)


def new_pages() -> torch.Tensor:
    return torch.zeros(9, 20, dtype=torch.int32, device=DEVICE)


@pytest.mark.parametrize("take", [gpu_mail.take_seats, mail.take_seats_reference])
def test_every_round_finds_its_own_seats(take: object) -> None:
    if DEVICE == "cuda" and take is mail.take_seats_reference:
        pytest.skip("torch cannot look into the host's memory from there")
    box, chance = Mailbox(torch.device(DEVICE), 6, WIDTH), random.Random(0)
    pages, wanted = new_pages(), new_pages().cpu()
    for number in range(1, 2 * LEAST_ROUNDS + 4):
        num_seats, num_new = 1 + number % 6, [0, 1, 32, 33, box.max_pages][number % 5]
        table, seats = torch.randint(99, (4, num_seats)), torch.zeros(4, num_seats, dtype=torch.long, device=DEVICE)
        spots = chance.sample([(slot, place) for slot in range(9) for place in range(20)], num_new)
        new = [(*spot, chance.randrange(1, 99)) for spot in spots]
        place = box.tell(table, new)
        take(box.mail, seats, pages)  # type: ignore[operator]
        assert seats.cpu().equal(table)
        assert int(box.mail.number) == number
        for slot, column, page in new:
            wanted[slot, column] = page
        assert pages.cpu().equal(wanted)
        over = box.ended(place)
        if over is not None:
            over.synchronize()


def test_rounds_that_are_told_wait_for_their_turn() -> None:
    """Several are told before the first begins."""
    box, tables = Mailbox(torch.device(DEVICE), 3, WIDTH), [torch.randint(99, (4, 3)) for _ in range(LEAST_ROUNDS)]
    places = [box.tell(table) for table in tables]
    assert sorted(places) == list(range(LEAST_ROUNDS))
    for table in tables:
        seats = torch.zeros(4, 3, dtype=torch.long, device=DEVICE)
        gpu_mail.take_seats(box.mail, seats, new_pages())
        assert seats.cpu().equal(table)


def test_a_round_that_is_repeated_has_the_same_seats() -> None:
    box, table = Mailbox(torch.device(DEVICE), 3, WIDTH), torch.randint(99, (4, 3))
    seats = torch.zeros(4, 3, dtype=torch.long, device=DEVICE)
    for each in (torch.zeros_like(table), table):
        box.ended(box.tell(each))
        gpu_mail.take_seats(box.mail, seats, new_pages())
    box.repeat(LEAST_ROUNDS + 3)
    for _ in range(LEAST_ROUNDS + 3):
        gpu_mail.take_seats(box.mail, seats, new_pages())
        assert seats.cpu().equal(table)
    other = torch.randint(99, (4, 3))
    box.tell(other)
    gpu_mail.take_seats(box.mail, seats, new_pages())
    assert seats.cpu().equal(other)


@pytest.mark.parametrize("has_draft", [False, True])
@pytest.mark.parametrize(("people", "shape"), ROUNDS)
def test_outcomes_go_where_the_host_looks(people: list[list[int]], shape: RoundShape, has_draft: bool) -> None:
    box = Mailbox(torch.device(DEVICE), 9, WIDTH)
    for _ in range(LEAST_ROUNDS + 2):
        place = box.tell(torch.zeros(4, shape.num_seats, dtype=torch.long))
        gpu_mail.take_seats(box.mail, torch.zeros(4, shape.num_seats, dtype=torch.long, device=DEVICE), new_pages())
        box.ended(place)
    ours, theirs = (make_step(make_cache(), people, shape) for _ in range(2))
    verdict = round.judge_reference(ours, right_choices(ours, 5))
    round.judge_reference(theirs, right_choices(theirs, 5))
    # as draft_chain() makes it: places in a row, requests in columns
    tokens = torch.arange(shape.num_seats * LOOKAHEAD, device=DEVICE).view(LOOKAHEAD, -1).T
    draft = Draft(tokens, torch.where(ours.emits, 3, 0)) if has_draft else None
    found = gpu_round.write_outcome(ours, verdict, draft, box.mail)
    wanted = round.write_outcome_reference(theirs, verdict, draft)
    over = box.ended(place)
    if over is not None:
        over.synchronize()
    assert not found.is_cuda
    assert found[place].equal(wanted.cpu())
    assert not found[(place + 1) % LEAST_ROUNDS].any()
    if DEVICE == "cpu":
        assert round.write_outcome(theirs, verdict, draft, box.mail)[place].equal(wanted)


@pytest.mark.parametrize("depth", [1, 3, 5])
@pytest.mark.parametrize(("people", "shape"), ROUNDS)
def test_rows_ahead(people: list[list[int]], shape: RoundShape, depth: int) -> None:
    step = make_step(make_cache(), people, shape)
    round.judge_reference(step, right_choices(step, 4))
    step.state.lengths[step.batch.slots[0]] = 1  # nothing is before its newest token
    found, wanted = gpu_ahead.rows_ahead(step, depth), ahead.rows_ahead(step, depth)
    for name in ("indices", "request", "query_start", "count"):
        assert vars(found)[name].equal(vars(wanted)[name]), name
    is_kept = step.emits[None, :].expand(depth, -1)
    assert found.locations[is_kept].equal(wanted.locations[is_kept])
    assert bool((found.locations[~is_kept] < PAGE_SIZE).all())
    for lag in (0, 1, 2):
        assert found.lagging(lag).equal(wanted.lagging(lag))
    assert found.following().equal(wanted.following())


@pytest.mark.parametrize("length", [1.0, 1.5, 1.9, 2.4, 3.0])
@pytest.mark.parametrize(("people", "shape"), [ROUNDS[0], ROUNDS[2]])
def test_made_up_acceptance(people: list[list[int]], shape: RoundShape, length: float) -> None:
    step = make_step(make_cache(), people, shape)
    choice, count = right_choices(step, 4), int(step.judged_start[-1])
    found = gpu_synthetic.accept_first(choice, step, int(length - 1), (length - 1) % 1, verify.SPREAD)
    wanted = verify._changed(verify._by_length(length), choice, step)
    assert found[:count].equal(wanted[:count])
    assert not found[:count].equal(choice[:count])
