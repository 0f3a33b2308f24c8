"""The operations of a round in Triton against the torch code that says what they do, on rounds of all kinds: parts of
prompts, drafts of several lengths, empty seats, rows that only fill up."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_triton import DEVICE

from outrider.engine.cache import Cache, CacheShape
from outrider.engine.options import Flags
from outrider.engine.runner import Runner
from outrider.kernels import dispatch
from outrider.kernels import round as reference
from outrider.kernels import taps as taps_reference
from outrider.kernels.gpu import round as gpu
from outrider.kernels.gpu import taps as gpu_taps
from outrider.types import Draft, Guidance, RoundShape, Seats, Step, Verdict

TAPS, HIDDEN, PAGE_SIZE, NUM_SLOTS, LOOKAHEAD = 2, 24, 4, 6, 5
# seats: slot, known tokens, drafts allowed, whether it emits
DECODING = [[2, 1, 5, 1], [0, 1, 1, 1], [4, 1, 5, 1]]
MIXED = [[2, 1, 5, 1], [3, 4, 0, 0], [0, 1, 1, 1], [1, 3, 0, 1]]
READING = [[3, 6, 0, 0]]
EMPTY = [NUM_SLOTS - 1, 0, 0, 0]
ROUNDS = [
    (DECODING, RoundShape(4, 24, 24, 5, 5, 6, 45)),
    (DECODING, RoundShape(3, 13, 13, 5, 2, 6, 45)),
    (MIXED, RoundShape(6, 40, 20, 5, 5, 40, 45)),
    (READING, RoundShape(1, 6, 0, 0, 0, 6, 45)),
    (READING, RoundShape(9, 100, 9, 0, 0, 100, 45)),
]


@pytest.fixture(autouse=True)
def references(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is compared with the kernels must not use them itself."""
    for module in (dispatch, reference, taps_reference):
        monkeypatch.setattr(module, "use_triton", lambda x: False)


def make_cache(num_carried: int = 1, seed: int = 0) -> Cache:
    """Slots in the middle of something: a text, a draft, pages all over the place, taps."""
    shape = CacheShape(
        num_pages=60,
        page_size=PAGE_SIZE,
        num_slots=NUM_SLOTS,
        max_len=45,
        num_taps=TAPS,
        hidden_size=HIDDEN,
        lookahead=LOOKAHEAD,
        num_carried=num_carried,
        num_missable=16,
    )
    cache = Cache(shape, [], torch.device(DEVICE), torch.float32)
    generator = torch.Generator().manual_seed(seed)

    def whole(high: int, *size: int) -> torch.Tensor:
        return torch.randint(high, size, generator=generator).to(DEVICE)

    state = cache.state
    state.tokens[:] = whole(50, *state.tokens.shape)
    state.lengths[:-1] = 12 + whole(10, NUM_SLOTS - 1)
    state.computed[:-1] = state.lengths[:-1] - 1
    state.computed[3] = state.lengths[3] - 9  # still reading
    state.computed[1] = state.lengths[1] - 3
    state.followed[:-1] = state.computed[:-1] - whole(6, NUM_SLOTS - 1)
    state.draft_count[:-1] = 1 + whole(LOOKAHEAD, NUM_SLOTS - 1)
    width = cache.page_table.shape[1]
    pages = torch.randperm(59, generator=generator)[: 5 * 11].view(5, 11) + 1
    cache.page_table[:-1] = pages.repeat(1, 2)[:, :width].int().to(DEVICE)
    cache.carry.copy_(torch.randn(cache.carry.shape, generator=generator))
    cache.tails.copy_(torch.randn(cache.tails.shape, generator=generator))
    return cache


def seats_of(people: list[list[int]], shape: RoundShape) -> Seats:
    rows = people + [EMPTY] * (shape.num_seats - len(people))
    return Seats.of(torch.tensor(rows).T.contiguous().to(DEVICE))


def make_step(cache: Cache, people: list[list[int]], shape: RoundShape) -> Step:
    runner = Runner(cache, 50, torch.device(DEVICE))
    sampling = runner.options.recorded(Flags(filtered=False, adjusted=False))
    return runner.pack_seats(seats_of(people, shape), shape, sampling)


def right_choices(step: Step, seed: int) -> torch.Tensor:
    """Choices of which about two of three agree with the draft."""
    generator = torch.Generator().manual_seed(seed)
    ids, judged = step.batch.input_ids.cpu(), step.judged.cpu()
    follows = ids[(judged + 1).clamp(max=len(ids) - 1)]
    agrees = torch.rand(len(judged), generator=generator) < 0.7
    return torch.where(agrees, follows, torch.randint(50, judged.shape, generator=generator)).to(DEVICE)


def check_layout(found: reference.Layout, wanted: reference.Layout) -> None:
    for name, value in vars(wanted).items():
        if name != "rows":
            assert vars(found)[name].equal(value), name
    for name, value in vars(wanted.rows).items():
        assert vars(found.rows)[name].equal(value), name


@pytest.mark.parametrize("missed", [False, True])
@pytest.mark.parametrize(("people", "shape"), ROUNDS)
def test_lay_out(people: list[list[int]], shape: RoundShape, missed: bool) -> None:
    check_lay_out(gpu.lay_out, people, shape, missed)


def check_lay_out(
    lay_out: Callable[..., reference.Layout], people: list[list[int]], shape: RoundShape, missed: bool
) -> None:
    """Against the reference, on the next rows of these people, or on those that a drafter has missed."""
    if missed:
        people = [[slot, 1, 0, 0] for slot, *_ in people]
        shape = RoundShape(shape.num_seats, 40, 0, 0, 0, 40, 45)
    cache, seats = make_cache(), seats_of(people, shape)
    pages = cache.page_table, PAGE_SIZE
    found = lay_out(seats, shape, cache.state, pages, missed=missed)
    wanted = reference.lay_out_reference(seats, shape, cache.state, pages, missed=missed)
    check_layout(found, wanted)
    assert int(wanted.rows.query_start[-1]) > 0


@pytest.mark.parametrize(("people", "shape"), ROUNDS)
def test_taps_that_a_drafter_misses(people: list[list[int]], shape: RoundShape) -> None:
    batch = make_step(make_cache(1), people, shape).batch
    taps = torch.randn(shape.num_rows, TAPS, HIDDEN, device=DEVICE)
    ours, theirs = torch.zeros(2, NUM_SLOTS, 7, TAPS, HIDDEN, device=DEVICE)
    gpu_taps.keep_missed(batch, taps, ours)
    taps_reference.keep_missed_reference(batch, taps, theirs)
    assert ours[:-1].equal(theirs[:-1])  # the last one is nobody's
    assert ours[:-1].any()


@pytest.mark.parametrize("num_carried", [1, 3, 0])
@pytest.mark.parametrize(("people", "shape"), ROUNDS)
def test_judge_and_keep_taps(people: list[list[int]], shape: RoundShape, num_carried: int) -> None:
    ours, theirs = make_cache(num_carried), make_cache(num_carried)
    steps = make_step(ours, people, shape), make_step(theirs, people, shape)
    choice = right_choices(steps[0], 3)
    taps = torch.randn(shape.num_rows, TAPS, HIDDEN, device=DEVICE)
    carried = ours.carry[steps[0].batch.slots]
    verdict = gpu.judge(steps[0], choice)
    gpu_taps.keep_taps(steps[0], taps, carried, verdict, (ours.carry, ours.tails))
    wanted = reference.judge_reference(steps[1], choice)
    taps_reference.keep_taps_reference(steps[1], taps, carried, wanted, (theirs.carry, theirs.tails))
    for name, value in vars(wanted).items():
        assert vars(verdict)[name].equal(value), name
    for name in ("lengths", "computed", "kept_state"):
        assert vars(ours.state)[name].equal(vars(theirs.state)[name]), name
    assert ours.state.tokens[:, :-1].equal(theirs.state.tokens[:, :-1])
    assert ours.carry[:-1].equal(theirs.carry[:-1])
    assert ours.tails[1:].equal(theirs.tails[1:])


def test_some_drafts_are_accepted_and_some_are_not() -> None:
    counts = set()
    for people, shape in ROUNDS[:3]:
        step = make_step(make_cache(), people, shape)
        counts |= set((gpu.judge(step, right_choices(step, 3)).count - step.num_drafts).tolist())
    assert {1, 0} <= counts  # one more than there were drafts, or fewer


CATCHING = [(0, 0, 0, 0), (1, 1, 0, 0), (1, 1, 2, 0), (0, 0, 0, 4)]


@pytest.mark.parametrize("catching", CATCHING)
@pytest.mark.parametrize(("people", "shape"), ROUNDS)
def test_extension(people: list[list[int]], shape: RoundShape, catching: tuple[int, int, int, int]) -> None:
    cache = make_cache(3)
    step = make_step(cache, people, shape)
    reference.judge_reference(step, right_choices(step, 4))
    how = reference.Catching(*catching)
    rows, positions, last = gpu.extension_rows(step, how)
    wanted, wanted_positions, wanted_last = reference.extension_rows_reference(step, how)
    assert last.equal(wanted_last)
    assert positions.equal(wanted_positions)
    for name, value in vars(wanted).items():
        if name != "locations":
            assert vars(rows)[name].equal(value), name
    kept = wanted.locations >= PAGE_SIZE  # the others go to the dump, anywhere in it
    assert rows.locations[kept].equal(wanted.locations[kept])
    assert bool((rows.locations[~kept] < PAGE_SIZE).all())
    taps = torch.randn(shape.num_rows, TAPS, HIDDEN, device=DEVICE)
    carried = cache.carry[step.batch.slots]
    batch = step.batch
    batch.request, batch.query_start, old = rows.request, rows.query_start, batch.query_start
    extended, step.batch = batch, make_step(make_cache(3), people, shape).batch
    assert step.batch.query_start.equal(old)
    found = gpu_taps.shift_taps(step, taps, carried, extended, how.back)
    expected = taps_reference.shift_taps_reference(step, taps, carried, extended, how.back)
    inside = int(rows.query_start[-1])
    assert found[:inside].equal(expected[:inside])


@pytest.mark.parametrize(
    "kind", ["none", "draft", "predicted", *(f"forced {first}" for first in range(6)), "forced, predicted 3"]
)
@pytest.mark.parametrize(("people", "shape"), ROUNDS)
def test_outcome(people: list[list[int]], shape: RoundShape, kind: str) -> None:
    ours, theirs = make_cache(), make_cache()
    steps = make_step(ours, people, shape), make_step(theirs, people, shape)
    verdicts = [reference.judge_reference(step, right_choices(step, 5)) for step in steps]
    tokens = torch.arange(shape.num_seats * LOOKAHEAD, device=DEVICE).view(-1, LOOKAHEAD)
    count = torch.where(steps[0].emits, torch.arange(shape.num_seats, device=DEVICE) % (LOOKAHEAD + 1), 0)
    draft = None if kind == "none" else Draft(tokens, count, count > 2 if "predicted" in kind else None)
    if draft is not None and "forced" in kind:
        for step in steps:
            step.guidance = forced_guidance(verdicts[0], draft, int(kind[-1]))
        draft = check_forced(steps[0], verdicts[0], draft)
    table = gpu.write_outcome(steps[0], verdicts[0], draft)
    wanted = reference.write_outcome_reference(steps[1], verdicts[1], draft)
    assert table.equal(wanted)
    for name in ("draft_count", "followed"):
        assert vars(ours.state)[name].equal(vars(theirs.state)[name]), name
    assert ours.state.tokens[:, :-1].equal(theirs.state.tokens[:, :-1])
    for number, row in enumerate(table.tolist()[: len(people)]):
        check_outcome(row, shape, number, steps[0], (verdicts[0], draft))


def forced_guidance(verdict: Verdict, draft: Draft, first: int) -> Guidance:
    """Of seats in turn, from the `first` kind on: nothing is forced; the verdict goes another way; it ends there; it
    goes on otherwise than the draft; as the draft does, but longer; as the draft does, and not as far."""
    num_judged, rows = 1 + LOOKAHEAD, []
    for seat, (said, made) in enumerate(zip(verdict.tokens.tolist(), draft.tokens.tolist(), strict=True)):
        said, own = said[: int(verdict.count[seat])], made[: int(draft.count[seat])]
        other, longer = [*said, 7, 8, 9], [*said, *made[: len(own) + 1]]
        runs = [[], [*(each + 1 for each in said), 7], said, other, longer, [*said, *own[:1]]]
        run = runs[(first + seat) % 6]
        rows.append(([0] * num_judged + [len(run)] + run + [0] * 40)[: 3 * num_judged])
    return Guidance.of(torch.tensor(rows, dtype=torch.int32, device=DEVICE), torch.zeros(1, 2, device=DEVICE).int())


def check_forced(step: Step, verdict: Verdict, draft: Draft) -> Draft:
    """The torch code against a loop."""
    assert step.guidance is not None
    found = reference.with_forced(step, verdict, draft)
    for seat, count in enumerate(verdict.count.tolist()):
        run = step.guidance.forced[seat, : int(step.guidance.num_forced[seat])].tolist()
        said, own = verdict.tokens[seat, :count].tolist(), draft.tokens[seat, : int(draft.count[seat])].tolist()
        left = run[count:][: step.depth]
        is_forced = count > 0 and bool(left) and run[:count] == said
        is_forced &= draft.predicted is None or not bool(draft.predicted[seat])
        expected = own if not is_forced or own[: len(left)] == left else left
        assert found.tokens[seat, : int(found.count[seat])].tolist() == expected
        assert found.forced is not None
        assert bool(found.forced[seat]) == is_forced
    return draft


def test_some_drafts_are_forced() -> None:
    """Others are not, and a draft that says the same and more stays."""
    seen = set()
    for first in range(6):
        step = make_step(make_cache(), DECODING, ROUNDS[0][1])
        verdict = reference.judge_reference(step, right_choices(step, 5))
        draft = Draft(torch.arange(20, device=DEVICE).view(4, LOOKAHEAD), torch.tensor([2, 2, 2, 0], device=DEVICE))
        step.guidance = forced_guidance(verdict, draft, first)
        found = reference.with_forced(step, verdict, draft)
        assert found.forced is not None
        seen |= set(zip(found.forced.tolist(), found.count.tolist(), strict=True))
    assert seen == {(False, 2), (False, 0), (True, 3), (True, 2)}


def check_outcome(
    row: list[int], shape: RoundShape, number: int, step: Step, made: tuple[Verdict, Draft | None]
) -> None:
    """The host reads what the device wrote."""
    verdict, draft = made
    outcome = reference.read_outcome(row, shape)
    count = int(verdict.count[number])
    assert outcome.num_judged == int(step.num_drafts[number])
    assert (outcome.tokens, outcome.kept) == (verdict.tokens[number, :count].tolist(), int(verdict.kept[number]))
    draft = None if draft is None else reference.with_forced(step, verdict, draft)
    drafted = [] if draft is None else draft.tokens[number, : int(draft.count[number])].tolist()
    assert outcome.draft == drafted
    assert outcome.forced is (draft is not None and draft.forced is not None and bool(draft.forced[number]))
    assert outcome.predicted is (draft is not None and draft.predicted is not None and bool(draft.predicted[number]))
