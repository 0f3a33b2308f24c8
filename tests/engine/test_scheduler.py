"""The scheduler under random requests, verdicts, aborts and little memory: everyone finishes, nothing leaks."""

from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.engine.pages import PagePool
from outrider.engine.request import Request, Status
from outrider.engine.scheduler import Limits, Scheduler
from outrider.sampling_params import SamplingParams


def make_request(number: int, prompt_len: int, max_tokens: int) -> Request:
    prompt = [(number + place) % 5 for place in range(prompt_len)]
    return Request(f"r{number}", prompt, SamplingParams(max_tokens=max_tokens), seed=0)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=10),
    lookahead=st.integers(0, 4),
    num_pages=st.integers(14, 30),
    budget=st.integers(5, 40),
    caching=st.booleans(),
    data=st.data(),
)
def test_everyone_finishes(
    sizes: list[tuple[int, int]], lookahead: int, num_pages: int, budget: int, caching: bool, data: st.DataObject
) -> None:
    limits = Limits(4, max(budget, 4 * (1 + lookahead)), 48, 4, lookahead, caching)
    scheduler = Scheduler(limits, PagePool(num_pages))
    requests = [make_request(number, *size) for number, size in enumerate(sizes)]
    for request in requests:
        scheduler.add(request)
    first_admitted = None
    for _ in range(3000):
        if not scheduler.has_work:
            break
        plan = scheduler.next()
        assert plan, "work is waiting, but nothing is planned"
        assert sum(work.num_rows for work in plan) <= limits.max_num_batched_tokens
        assert len({work.request.slot for work in plan}) == len(plan)
        first_admitted = first_admitted or plan[0].request
        for work in plan:
            request = work.request
            assert work.num_rows >= 1
            assert work.start == request.num_computed
            assert len(request.pages) * 4 >= work.start + work.num_rows + lookahead, "no room for rows and draft"
            assert work.emits == (work.start + work.num_rows >= len(request.tokens))
            accepted = data.draw(st.integers(0, work.num_drafts)) if work.emits else 0
            for token in range(accepted + 1 if work.emits else 0):
                request.append(token % 5, limits.max_model_len)
                assert request.num_outputs <= (request.params.max_tokens or 0)
                if request.finished:
                    break
            kept = work.num_rows - work.num_drafts + accepted if work.emits else work.num_rows
            scheduler.update(request, kept, data.draw(st.integers(0, lookahead)) if work.emits else 0)
        scheduler.pool.check()
    assert all(request.finished for request in requests)
    assert first_admitted is requests[0], "first come, first served"
    assert scheduler.pool.num_free == scheduler.pool.capacity
    assert not scheduler.running


def test_abort_frees_everything() -> None:
    scheduler = Scheduler(Limits(2, 64, 48, 4, 0), PagePool(20))
    requests = [make_request(number, 6, 4) for number in range(3)]
    for request in requests:
        scheduler.add(request)
    scheduler.next()
    assert [request.status for request in requests] == [Status.RUNNING, Status.RUNNING, Status.WAITING]
    for request in requests:
        scheduler.abort(request)
        scheduler.abort(request)  # twice does no harm
    assert [request.finish_reason for request in requests] == ["abort"] * 3
    assert not scheduler.has_work
    assert scheduler.pool.num_free == scheduler.pool.capacity


def test_decoding_is_not_delayed_by_long_prompts() -> None:
    scheduler = Scheduler(Limits(4, 8, 400, 4, 0), PagePool(200))
    short, long = make_request(0, 2, 50), make_request(1, 300, 5)
    scheduler.add(short)
    (work,) = scheduler.next()
    short.append(1, 400)
    scheduler.update(short, work.num_rows, 0)
    scheduler.add(long)
    for _ in range(20):
        plan = scheduler.next()
        assert [each.request for each in plan] == [short, long]
        assert [each.num_rows for each in plan] == [1, 7]
        short.append(1, 400)
        for each in plan:
            scheduler.update(each.request, each.num_rows, 0)
