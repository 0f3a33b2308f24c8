"""The scheduler under random requests, verdicts, aborts and little memory, with rounds planned before the outcome of
those under way is known: everyone finishes, nothing leaks."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.pages import PagePool
from outrider.engine.request import Request, Residence, Status, Work
from outrider.engine.scheduler import Scheduler, SchedulerLimits
from outrider.sampling_params import SamplingParams

NOWHERE = {name: value for name, value in vars(Residence()).items() if name not in ("marks", "is_followed")}


def make_request(number: int, prompt_len: int, max_tokens: int) -> Request:
    prompt = [(number + place) % 5 for place in range(prompt_len)]
    return Request(f"r{number}", prompt, SamplingParams(max_tokens=max_tokens), seed=0)


class Device:
    """What a device would know of every request: how far it has come, and how many drafts are waiting."""

    def __init__(self, data: st.DataObject) -> None:
        self._data = data
        self._computed: dict[Request, int] = {}
        self._known: dict[Request, int] = {}
        self._drafts: dict[Request, int] = {}

    def run(self, plan: list[Work], admitted: list[Request], page_size: int) -> list[tuple[Work, int, int, int]]:
        """Of each: tokens committed, rows kept, drafts made."""
        for request in admitted:
            self._computed[request], self._known[request] = request.num_computed, len(request.tokens)
            self._drafts[request] = 0
        outcomes = []
        for work in plan:
            request = work.request
            start = self._computed[request]
            drafts = min(self._drafts[request], work.allowed) if work.emits else 0
            end = start + work.pending + drafts
            assert end <= work.end, "the rows reach beyond what was said"
            assert work.emits == (start + work.pending == self._known[request])
            final = len(request.prompt) + (request.params.max_tokens or 0)
            assert len(request.pages) * page_size >= min(end, final), "rows without a page"
            accepted = self._data.draw(st.integers(0, drafts)) if work.emits else 0
            kept = work.pending + accepted
            count = accepted + 1 if work.emits else 0
            self._computed[request] += kept
            self._known[request] += count
            self._drafts[request] = self._data.draw(st.integers(0, work.depth)) if work.emits else 0
            outcomes.append((work, count, kept, self._drafts[request]))
        return outcomes


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=10),
    lookahead=st.integers(0, 4),
    num_pages=st.integers(14, 30),
    budget=st.integers(5, 40),
    caching=st.booleans(),
    max_flying=st.integers(1, 3),
    num_prompt_rows=st.integers(1, 20),
    grouped=st.booleans(),
    data=st.data(),
)
def test_everyone_finishes(
    sizes: list[tuple[int, int]],
    lookahead: int,
    num_pages: int,
    budget: int,
    caching: bool,
    max_flying: int,
    num_prompt_rows: int,
    grouped: bool,
    data: st.DataObject,
) -> None:
    limits = SchedulerLimits(
        *(4, max(budget, 4 * (1 + lookahead)), 48, 4, lookahead, caching, num_prompt_rows),
        round_sizes=(4, 8, 16),
        num_groups=max_flying if grouped else 1,
    )
    scheduler, device = Scheduler(limits, PagePool(num_pages)), Device(data)
    requests = [make_request(number, *size) for number, size in enumerate(sizes)]
    for request in requests:
        scheduler.add(request)
    first_admitted = None
    flights: deque[list[tuple[Work, int, int, int]]] = deque()
    for _ in range(3000):
        if not scheduler.has_work:
            break
        while len(flights) < max_flying:
            plan = scheduler.next(lookahead, flying=bool(flights))
            if not plan.work:
                assert flights or not scheduler.has_work, "work is waiting, but nothing is planned"
                break
            assert sum(work.num_rows for work in plan.work) <= limits.max_num_batched_tokens
            assert len({work.request.slot for work in plan.work}) == len(plan.work)
            assert all(work.pending >= 1 for work in plan.work)
            assert not grouped or max_flying == 1 or not any(work.request.flying for work in plan.work)
            first_admitted = first_admitted or plan.work[0].request
            flights.append(device.run(plan.work, plan.admitted, limits.page_size))
            scheduler.launched(plan.work)
        for work, count, kept, drafts in flights.popleft() if flights else ():
            if not work.is_current:
                continue
            request = work.request
            for token in range(count):
                request.append(token % 5, limits.max_model_len)
                assert request.num_outputs <= (request.params.max_tokens or 0)
                if request.finished:
                    break
            scheduler.update(work, kept, drafts)
        if data.draw(st.integers(0, 40)) == 0:
            scheduler.abort(data.draw(st.sampled_from(requests)))
        for request in requests:
            if request.status is not Status.RUNNING:  # nothing is left of where it was
                assert vars(request).items() >= NOWHERE.items()
        scheduler.pool.check()
    assert all(request.finished for request in requests)
    assert first_admitted is requests[0], "first come, first served"
    assert scheduler.pool.num_free == scheduler.pool.capacity
    assert not scheduler.running


def test_prompts_beside_decoding_are_read_in_parts() -> None:
    """Alone a burst is read as fast as it can be; once somebody decodes, rounds are filled up to the largest size that
    leaves about so many rows to prompts."""
    limits = SchedulerLimits(9, 100, 48, 4, 0, prefix_caching=False, num_prompt_rows=24, round_sizes=(8, 16, 32))
    scheduler = Scheduler(limits, PagePool(200))
    first = make_request(0, 40, 4)
    scheduler.add(first)
    assert [work.num_rows for work in run_round(scheduler)] == [40]
    for number in range(1, 9):
        scheduler.add(make_request(number, 20, 4))
    for rows in ([1, 20, 11], [1, 1, 9, 20, 1]):
        assert [work.num_rows for work in run_round(scheduler)] == rows, "a crowd is read in larger rounds"
    assert [work.num_rows for work in run_round(scheduler)] == [1, 1, 1, 1, 12]
    assert [work.num_rows for work in run_round(scheduler)] == [1, 1, 1, 7, 6]


def test_where_more_prompts_wait_than_can_be_read_it_is_crowded() -> None:
    """Once somebody decodes; unless drafts are few beside the prompts."""
    limits = SchedulerLimits(64, 4096, 4096, 16, 4, prefix_caching=False, num_prompt_rows=256)
    scheduler = Scheduler(limits, PagePool(4096))
    for number in range(5):
        scheduler.add(make_request(number, 10, 4))
    assert not scheduler.is_crowded(2), "nobody decodes"
    run_round(scheduler)
    assert not scheduler.is_crowded(2), "nobody waits"
    scheduler.add(make_request(5, 200, 4))
    assert not scheduler.is_crowded(2), "all that waits can be read at once"
    scheduler.add(make_request(6, 200, 4))
    assert scheduler.is_crowded(2)
    assert not scheduler.is_crowded(1), "five rows of drafts beside 256 of prompts"
    plan = scheduler.next(0, flying=True)
    scheduler.launched(plan.work)
    assert sum(work.num_rows for work in plan.work) == 5 + 256
    assert not scheduler.is_crowded(2), "what a round under way reads does not wait"


def test_who_decodes_beside_prompts() -> None:
    """And how many rows of them: drafts are shared out by that, where a round can read all that wait."""
    limits = SchedulerLimits(8, 4096, 4096, 16, 4, prefix_caching=False, num_prompt_rows=256)
    scheduler = Scheduler(limits, PagePool(4096))
    decoding = [make_request(number, 10, 4) for number in range(3)]
    for request in decoding:
        scheduler.add(request)
    assert scheduler.beside_prompts == ([], 30), "nobody decodes yet"
    run_round(scheduler)
    assert scheduler.beside_prompts == ([], 0), "there are no prompts"
    decoding.append(make_request(3, 200, 4))
    scheduler.add(decoding[-1])
    assert scheduler.beside_prompts == (decoding[:-1], 200)
    scheduler.add(make_request(4, 100, 4))
    assert scheduler.beside_prompts == ([], 0), "more than a round reads: it will be filled with them"
    scheduler.launched(scheduler.next(0, flying=True).work)
    assert scheduler.beside_prompts == (decoding, 44), "what a round under way reads does not count"


def run_round(scheduler: Scheduler) -> list[Work]:
    """Plans a round in which everybody who emits gets one token."""
    plan = scheduler.next(0)
    for work in plan.work:
        if work.emits:
            work.request.append(1, scheduler.limits.max_model_len)
        scheduler.update(work, work.num_rows, 0)
    return plan.work


def test_groups_are_even() -> None:
    """Whoever comes or goes, and also where somebody waits for whom there are no pages."""
    limits = SchedulerLimits(20, 100, 48, 4, 0, prefix_caching=False, num_groups=2)
    scheduler = Scheduler(limits, PagePool(28))  # three pages each
    requests = [make_request(number, 6, 6) for number in range(12)]
    flights: deque[list[Work]] = deque()
    rounds: list[set[Request]] = []

    def sizes(count: int) -> list[int]:
        """Of the next rounds: one lands whenever two are under way."""
        for _ in range(count):
            plan = scheduler.next(0, flying=bool(flights))
            scheduler.launched(plan.work)
            flights.append(plan.work)
            rounds.append({work.request for work in plan.work})
            for work in flights.popleft() if len(flights) == 2 else ():
                if work.is_current:
                    work.request.append(1, limits.max_model_len)
                    scheduler.update(work, work.num_rows, 0)
        return [len(each) for each in rounds[-count:]]

    scheduler.add(requests[0])
    assert sizes(1) == [1]
    for request in requests[1:7]:
        scheduler.add(request)
    assert sizes(3) == [4, 3, 4]
    scheduler.add(requests[7])
    scheduler.add(requests[8])
    assert sizes(2) == [5, 4]
    for work in flights[0][:3]:
        scheduler.abort(work.request)
    assert sizes(3) == [3, 3, 3], "they were five and one"
    assert rounds[-1] | rounds[-2] == rounds[-2] | rounds[-3] == set(scheduler.running), "all take their turn"
    for number in range(20, 26):
        scheduler.add(make_request(number, 40, 6))  # for whom there are no pages
    assert sizes(2) == [3, 3]


def test_abort_frees_everything() -> None:
    scheduler = Scheduler(SchedulerLimits(2, 64, 48, 4, 0), PagePool(20))
    requests = [make_request(number, 6, 4) for number in range(3)]
    for request in requests:
        scheduler.add(request)
    scheduler.launched(scheduler.next(0).work)
    assert [request.status for request in requests] == [Status.RUNNING, Status.RUNNING, Status.WAITING]
    for request in requests:
        scheduler.abort(request)
        scheduler.abort(request)  # twice does no harm
    assert [request.finish_reason for request in requests] == ["abort"] * 3
    assert not scheduler.has_work
    assert scheduler.pool.num_free == scheduler.pool.capacity


def test_decoding_is_not_delayed_by_long_prompts() -> None:
    scheduler = Scheduler(SchedulerLimits(4, 8, 400, 4, 0), PagePool(200))
    short, long = make_request(0, 2, 50), make_request(1, 300, 5)
    scheduler.add(short)
    (work,) = scheduler.next(0).work
    short.append(1, 400)
    scheduler.update(work, work.num_rows, 0)
    scheduler.add(long)
    for _ in range(20):
        plan = scheduler.next(0).work
        assert [each.request for each in plan] == [short, long]
        assert [each.num_rows for each in plan] == [1, 7]
        short.append(1, 400)
        for each in plan:
            scheduler.update(each, each.num_rows, 0)


def test_no_round_is_planned_for_what_surely_ends() -> None:
    """A round under way brings one token at least, so one that may bring only one more is left alone."""
    scheduler = Scheduler(SchedulerLimits(4, 64, 400, 4, 0), PagePool(200))
    request = make_request(0, 6, 2)
    scheduler.add(request)
    for expected in (6, 1):
        (work,) = scheduler.next(0, flying=bool(request.flying)).work
        assert work.num_rows == expected
        scheduler.launched([work])
    assert scheduler.next(0, flying=True).work == []


def test_whoever_does_without_the_drafter_finds_what_it_has_seen() -> None:
    """And not the other way round: its own memory of those pages would be missing. How much would have to be read again
    is said before it is decided."""
    limits = SchedulerLimits(4, 64, 48, 4, 0, prefix_caching=True)
    scheduler = Scheduler(limits, PagePool(60))

    def run(number: int, prompt: list[int], *, followed: bool, unseen: int = 0) -> int:
        def follows(num_running: int, num_unseen: int, num_left: int) -> bool:
            assert (num_running, num_unseen, num_left) == (0, unseen, 1)
            return followed

        request = Request(str(number), prompt, SamplingParams(max_tokens=1), seed=0)
        scheduler.add(request)
        plan = scheduler.next(0, follows=follows)
        scheduler.launched(plan.work)
        (work,) = plan.work
        request.append(1, limits.max_model_len)
        scheduler.update(work, work.pending, 0)
        assert request.finished
        scheduler.pool.check()
        return request.num_cached

    text = list(range(40))
    assert run(0, text[:18], followed=True) == 0
    assert run(1, text[:30], followed=False) == 16
    assert run(2, text[:32], followed=False, unseen=12) == 28  # the first pages of the one, the others of the other
    assert run(3, text, followed=True, unseen=16) == 16  # but nothing of what only the target has seen
    assert run(4, text, followed=False) == 36
    other = list(range(100, 140))
    assert run(5, other, followed=False) == 0
    assert run(6, other, followed=True, unseen=36) == 0
    assert run(7, other, followed=False) == 36


def test_what_a_drafter_at_rest_has_missed_is_found_without_it() -> None:
    """The end of a text, which the drafter would have been shown later."""
    limits = SchedulerLimits(4, 64, 96, 4, 0, prefix_caching=True)
    scheduler, asked = Scheduler(limits, PagePool(60)), list[int]()

    def run(prompt: list[int], num_tokens: int, *, followed: bool) -> Request:
        def follows(num_running: int, num_unseen: int, num_left: int) -> bool:
            asked.append(num_unseen)
            return followed

        request = Request(str(len(asked)), prompt, SamplingParams(max_tokens=num_tokens), seed=0)
        scheduler.add(request)
        while not request.finished:
            (work,) = scheduler.next(0, follows=follows).work
            scheduler.launched([work])
            work.rests = request.num_outputs > 0
            request.append(200 + request.num_outputs, limits.max_model_len)
            scheduler.update(work, work.pending, 0)
        scheduler.pool.check()
        return request

    first = run(list(range(18)), 13, followed=True)  # 18 rows are seen, and 12 missed; the last token has none
    longer = [*first.tokens, 1, 2, 3, 4]
    assert run(longer, 1, followed=True).num_cached == 16
    assert run(longer, 1, followed=False).num_cached == 32  # by now seen as well
    other = run([100, *range(17)], 13, followed=True)
    longer = [*other.tokens, 1, 2, 3, 4]
    assert run(longer, 1, followed=False).num_cached == 28
    assert asked == [0, 12, 0, 0, 12]
