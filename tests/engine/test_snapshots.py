"""Snapshots of recurrent states on the host's side: what a request goes on from is always the state after exactly its
own tokens, whatever rounds are under way; and no place is lost."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.pages import PagePool
from outrider.engine.request import Request, Work
from outrider.engine.scheduler import Plan, Scheduler, SchedulerLimits
from outrider.engine.snapshot_pool import SnapshotPool
from outrider.engine.snapshots import Snapshots
from outrider.sampling_params import SamplingParams

PAGE_SIZE, NUM_MISSABLE = 4, 24
GARBAGE = ("after a draft that was rejected",)


def scheduler_of(limits: SchedulerLimits, num_pages: int, num_places: int, interval: int) -> Scheduler:
    snapshots = Snapshots(num_places, limits.page_size, interval)
    return Scheduler(limits, PagePool(num_pages, snapshots.pool.forget), snapshots)


def next_token(text: Sequence[int]) -> int:
    """What a target would say: the same after the same text."""
    return (7 * text[-1] + len(text)) % 5


class Device:
    """Knows texts as a device would, rounds ahead of the host. A state is the tokens that made it; the target's and the
    drafter's are kept apart."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance
        self.text: dict[int, list[int]] = {}  # by slot
        self.computed: dict[int, int] = {}
        self.followed: dict[int, int] = {}
        self.drafts: dict[int, int] = {}
        self.wanted: dict[int, dict[int, tuple[int, int]]] = {}  # by slot and column
        self.kept: list[dict[int, tuple[object, ...]]] = [{}, {}]  # by place: the target's, the drafter's
        self.num_restored = 0
        self.resting = False

    def place(self, plan: Plan) -> None:
        for request in plan.admitted:
            start, place = request.num_computed, request.marks.restored
            assert (start > 0) == (place > 0)
            if place:
                self.num_restored += 1
                for kept in self.kept if request.is_followed else self.kept[:1]:
                    assert kept[place] == tuple(request.tokens[:start]), "another text's state"
            slot = request.slot
            self.text[slot], self.wanted[slot], self.drafts[slot] = list(request.tokens), {}, 0
            self.computed[slot] = self.followed[slot] = start
        for each in plan.wanted:
            assert each.place not in [place for end, place in self.wanted[each.slot].values() if end > each.end]
            self.wanted[each.slot][each.column] = (each.end, each.place)

    def _pass(self, which: int, slot: int, begin: int, end: int, num_true: int) -> None:
        """Rows from `begin` to `end`, of which only tokens up to `num_true` are what was said."""
        for until, place in self.wanted[slot].values():
            if begin < until <= end:
                self.kept[which][place] = tuple(self.text[slot][:until]) if until <= num_true else GARBAGE

    def catch_up(self, request: Request) -> None:
        slot = request.slot
        if request.is_followed and self.followed[slot] < self.computed[slot]:
            self._pass(1, slot, self.followed[slot], self.computed[slot] + 1, len(self.text[slot]))
            self.followed[slot] = self.computed[slot]
            request.num_followed = request.num_computed
            for work in request.flying:
                work.rests = False

    def run(self, plan: Plan) -> list[tuple[Work, list[int], int, int]]:
        """Of each: tokens committed, rows kept, drafts made."""
        self.place(plan)
        if self.chance.random() < 0.1:
            self.resting = not self.resting
        rests = self.resting and all(
            not work.request.is_followed or (work.is_round and work.end - work.request.num_followed <= NUM_MISSABLE)
            for work in plan.work
        )
        for work in plan.work:
            work.rests = rests
            if not rests:
                self.catch_up(work.request)
        return [self._run(work) for work in plan.work]

    def _run(self, work: Work) -> tuple[Work, list[int], int, int]:
        slot = work.request.slot
        start, drafts = self.computed[slot], min(self.drafts[slot], work.allowed) if work.emits else 0
        accepted = self.chance.randint(0, drafts)
        kept = work.pending + accepted
        tokens: list[int] = []
        for _ in range(accepted + 1 if work.emits else 0):
            tokens.append(next_token(self.text[slot] + tokens))
        self.text[slot] += tokens
        self.computed[slot] = start + kept
        self._pass(0, slot, start, start + work.pending + drafts, start + kept)
        if not work.rests:  # it runs one row more, the first of which it has run before
            self._pass(1, slot, start, start + work.pending + drafts + 1, len(self.text[slot]))
            self.followed[slot] = self.computed[slot]
        self.drafts[slot] = self.chance.randint(0, work.depth) if work.emits else 0
        return work, tokens, kept, self.drafts[slot]


def run(scheduler: Scheduler, requests: Sequence[Request], chance: random.Random, max_flying: int) -> Device:
    """Until all requests have ended; they join, are given up, start over and go unfollowed at random."""
    device, coming, limits = Device(chance), deque(requests), scheduler.limits
    flights: deque[list[tuple[Work, list[int], int, int]]] = deque()
    assert scheduler.snapshots is not None
    for _ in range(4000):
        if coming and chance.random() < 0.3:
            scheduler.add(coming.popleft())
        while len(flights) < max_flying and scheduler.has_work:
            plan = scheduler.next(
                limits.lookahead, flying=bool(flights), follows=lambda *_: chance.random() < 0.7
            )  # fmt: skip
            if not plan.work:
                break
            flights.append(device.run(plan))
            scheduler.launched(plan.work)
        for work, tokens, kept, drafts in flights.popleft() if flights else ():
            if not work.is_current:
                continue
            for token in tokens:
                work.request.append(token, limits.max_model_len)
                if work.request.finished:
                    break
            scheduler.update(work, kept, drafts)
        running = list(scheduler.running)
        if running and chance.random() < 0.02:
            scheduler.abort(chance.choice(running))
        elif running and chance.random() < 0.01:
            scheduler.restart(chance.choice(running))
        scheduler.pool.check()
        wanted = [place for request in scheduler.running for place in request.marks.wanted.values()]
        scheduler.snapshots.pool.check(wanted)
        if not scheduler.has_work and not coming:
            break
    assert all(request.finished for request in requests)
    return device


def texts(chance: random.Random, count: int) -> list[list[int]]:
    """Prompts that share beginnings, or are what another's answer came to."""
    made = [[chance.randrange(5) for _ in range(chance.randint(1, 40))]]
    while len(made) < count:
        begun = chance.choice(made)[: chance.randint(1, 120)]
        if chance.random() < 0.6:
            for _ in range(chance.randint(1, 40)):
                begun = [*begun, next_token(begun)]
        made.append([*begun, *(chance.randrange(5) for _ in range(chance.randint(0, 9)))][:90])
    return made


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    lookahead=st.integers(0, 4),
    num_pages=st.integers(40, 120),
    num_places=st.integers(2, 24),
    interval=st.sampled_from([4, 8, 20]),
    budget=st.sampled_from([20, 40, 100]),
    max_flying=st.integers(1, 3),
    seats=st.sampled_from([1, 2, 4]),
)
def test_what_is_restored_is_the_state_of_the_text(
    seed: int, lookahead: int, num_pages: int, num_places: int, interval: int, budget: int, max_flying: int, seats: int
) -> None:
    chance = random.Random(seed)
    limits = SchedulerLimits(seats, max(budget, 4 * (1 + lookahead)), 140, PAGE_SIZE, lookahead)
    scheduler = scheduler_of(limits, num_pages, num_places, interval)
    params = SamplingParams(max_tokens=20)
    prompts = texts(chance, 14)
    requests = [
        Request(f"{number}", prompt, replace(params, max_tokens=chance.randint(1, 50)), seed=0)
        for number, prompt in enumerate(prompts)
    ]
    run(scheduler, requests, chance, max_flying)
    assert scheduler.snapshots is not None
    pool = scheduler.snapshots.pool
    assert pool.num_kept + pool.num_free == num_places - 1
    assert scheduler.pool.num_free == scheduler.pool.capacity


def test_many_are_restored() -> None:
    """So that the test above is about something."""
    total = 0
    for seed in range(20):
        chance = random.Random(seed)
        scheduler = scheduler_of(SchedulerLimits(4, 40, 110, PAGE_SIZE, 3), 100, 20, 8)
        params = SamplingParams(max_tokens=16)
        requests = [Request(f"{n}", text, params, seed=0) for n, text in enumerate(texts(chance, 14))]
        total += run(scheduler, requests, chance, 2).num_restored
    assert total > 60


def test_the_least_recently_used_goes_first() -> None:
    pool = SnapshotPool(4)
    for name in (b"a", b"b", b"c"):
        place = pool.reserve()
        assert place is not None
        assert pool.keep(name, place)
    assert pool.num_free == 0
    pool.use(b"a")
    assert pool.reserve() is not None  # b's
    assert [pool.deepest([name]) for name in (b"a", b"b", b"c")] == [1, 0, 1]
    pool.demote(b"a")
    taken = pool.reserve()
    assert [pool.deepest([name]) for name in (b"a", b"b", b"c")] == [0, 0, 1]
    assert taken is not None
    assert not pool.keep(b"c", taken), "the one that is there stays"
    assert pool.num_free == 1
    pool.forget(b"c")
    assert (pool.num_kept, pool.num_free) == (0, 2)
    assert [pool.reserve(), pool.reserve()].count(None) == 0
    assert pool.reserve() is None, "all are being waited for"


def wanted_by(scheduler: Scheduler, prompt: list[int], say: int = 8) -> list[list[int]]:
    """Round by round, the ends of the snapshots that one request has taken; it says so many tokens."""
    request = Request("one", prompt, SamplingParams(max_tokens=say), seed=0)
    scheduler.add(request)
    found = []
    while not request.finished:
        plan = scheduler.next(0)
        scheduler.launched(plan.work)
        found.append([each.end for each in plan.wanted])
        (work,) = plan.work
        if work.emits:
            request.append(next_token(request.tokens), scheduler.limits.max_model_len)
        scheduler.update(work, work.pending, 0)
    return found


def test_where_they_are_taken() -> None:
    """At the prompt's last page end; at intervals, but not right before that one; and where another text parted."""
    limits = SchedulerLimits(4, 64, 400, 4, 0)
    scheduler = scheduler_of(limits, 400, 40, 16)
    prompt = list(range(100))
    # the second part has 36 rows; 112 is in the answer, and 96 the last page end that leaves a token to run
    assert wanted_by(scheduler, prompt) == [[16, 32, 48, 64], [96, 80], *[[]] * 7]
    assert wanted_by(scheduler, prompt) == [[]] * 8, "all is there"
    assert wanted_by(scheduler, prompt[:70] + [0] * 30) == [[96, 68, 80], *[[]] * 7]  # one page more is shared
    assert scheduler.prefixes.stats.hit == 96 + 64
    assert wanted_by(scheduler, prompt[:50], say=40) == [[], *[[]] * 13, [64], *[[]] * 15, [80], *[[]] * 9]
    assert scheduler.prefixes.stats.hit == 96 + 64 + 48
    coarse = scheduler_of(limits, 400, 40, 64)
    wanted_by(coarse, prompt)
    assert wanted_by(coarse, prompt[:56] + [0] * 44) == [[56, 64], [96], *[[]] * 7]
    assert wanted_by(coarse, prompt[:56] + [1] * 44)[0] == [96, 64]
    assert coarse.prefixes.stats.hit == 56
    long = scheduler_of(replace(limits, max_num_batched_tokens=400), 400, 40, 16)
    ends = wanted_by(long, list(range(200)))[0]
    assert ends == [196, 64, 128, 192], "no more than there are columns for"


def test_passing_ones_give_way() -> None:
    """A long text keeps its end, and takes no more than two places of others for what is on the way."""
    scheduler = scheduler_of(SchedulerLimits(4, 32, 4000, 4, 0), 2000, 9, 16)
    for number in range(6):
        wanted_by(scheduler, [number] * 14 + [1], say=1)
    assert scheduler.snapshots is not None
    assert scheduler.snapshots.pool.num_kept == 6
    wanted_by(scheduler, [9] * 800)
    hits = []
    for number in range(6):
        before = scheduler.prefixes.stats.hit
        wanted_by(scheduler, [number] * 14 + [1], say=1)
        hits.append(scheduler.prefixes.stats.hit - before)
    assert hits == [0, 0, 12, 12, 12, 12]
    before = scheduler.prefixes.stats.hit
    wanted_by(scheduler, [9] * 800)
    assert scheduler.prefixes.stats.hit - before == 796


def test_a_page_that_goes_takes_its_snapshot_along() -> None:
    scheduler = scheduler_of(SchedulerLimits(2, 64, 60, 4, 0), 20, 10, 16)
    wanted_by(scheduler, list(range(30)), say=1)
    assert scheduler.snapshots is not None
    pool = scheduler.snapshots.pool
    assert pool.num_kept == 2  # at 16 and 28
    wanted_by(scheduler, list(range(100, 148)), say=1)  # 13 of 19 pages: the last of those seven goes first
    assert pool.num_kept == 1 + 4  # at 16; at 16, 32, 44 and 48
    wanted_by(scheduler, list(range(30)), say=1)
    assert scheduler.prefixes.stats.hit == 16
    pool.check()


def test_starting_over_forgets_them() -> None:
    """Those that it went on from, and those that it has had taken, also where the pages' names are another's."""
    scheduler = scheduler_of(SchedulerLimits(2, 64, 200, 4, 0), 100, 10, 64)
    wanted_by(scheduler, list(range(40)), say=1)
    assert scheduler.snapshots is not None
    pool = scheduler.snapshots.pool
    spoilt = list(range(60))
    for _ in range(2):
        request = Request("spoilt", spoilt, SamplingParams(max_tokens=8), seed=0)
        scheduler.add(request)
        plan = scheduler.next(0)
        assert request.num_computed == 36
        scheduler.launched(plan.work)
        request.append(1, 200)
        scheduler.update(plan.work[0], 24, 0)
        assert pool.num_kept == 2  # at 36 and 56
        scheduler.restart(request)
        assert pool.num_kept == 0
        assert scheduler.next(0).work[0].request is request
        assert (request.num_computed, request.marks.restored) == (0, 0)
        scheduler.abort(request)
        wanted_by(scheduler, list(range(40)), say=1)
    pool.check()


def test_the_device_is_told_of_no_more_while_the_drafter_rests() -> None:
    """It must still find, when the drafter has caught up, where each was wanted."""
    scheduler = scheduler_of(SchedulerLimits(1, 64, 200, 4, 0), 100, 30, 4)
    request = Request("one", [1, 2], SamplingParams(max_tokens=60), seed=0)
    scheduler.add(request)
    found = []
    for number in range(60):
        plan = scheduler.next(0)
        found += [each.end for each in plan.wanted]
        (work,) = plan.work
        work.rests = 4 <= number < 30
        if number == 30:
            request.num_followed = request.num_computed
        scheduler.launched(plan.work)
        request.append(1, 200)
        scheduler.update(work, work.pending, 0)
    assert found == [4, 8, 12, 16, 20, *range(36, 64, 4)]
    assert scheduler.snapshots is not None
    assert scheduler.snapshots.pool.num_kept == len(found)
