"""A grammar that takes too long to follow fails its own request, and nobody waits long for it."""

import time
from collections.abc import Callable, Iterator

import pytest

from outrider import LLM, SamplingParams
from outrider.engine import guidance
from outrider.engine.request import Request
from outrider.grammar.guide import Guide
from outrider.sampling_params import Guided

pytest.importorskip("xgrammar")

PLAIN = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
BOUND = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, guided=Guided(regex="[a-z ]{40,}"))
SLOW = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, guided=Guided(regex="[0-9]{40,}"))


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(max_num_seqs=4) as llm:
        yield llm


def _run(llm: LLM, slow_down: Callable[[Request], None]) -> tuple[list[Request], float]:
    """A plain, a guided and a slow request together; and what the longest step took."""
    requests = [llm.requests_for("Once upon a time", params, 0)[0] for params in (PLAIN, BOUND, SLOW)]
    slow_down(requests[2])
    for request in requests:
        llm.engine.add(request)
    longest = 0.0
    while llm.engine.has_work:
        begin = time.monotonic()
        llm.engine.step()
        longest = max(longest, time.monotonic() - begin)
    return requests, longest


def _sleeping(method: str, seconds: float) -> Callable[[Request], None]:
    def slow_down(request: Request) -> None:
        guide = request.guide
        assert guide is not None
        honest = getattr(guide, method)

        def slow(*given: object) -> object:
            if request.num_outputs >= 3:
                time.sleep(seconds)
            return honest(*given)

        setattr(guide, method, slow)

    return slow_down


def _computing(seconds: float, most: int) -> Callable[[Request], None]:
    """So many tokens take longer than they should; none so long that somebody would stop waiting."""

    def slow_down(request: Request) -> None:
        guide = request.guide
        assert guide is not None
        honest, slowed = guide._taken, list[int]()

        def slow(token: int) -> bool:
            if len(slowed) < most:
                slowed.append(token)
                end = time.thread_time() + seconds
                while time.thread_time() < end:
                    pass
            return honest(token)

        guide._taken = slow  # type: ignore[method-assign]

    return slow_down


@pytest.mark.parametrize("slow_down", [_sleeping("masks", 5.0), _computing(0.2, 99)], ids=["one mask", "all tokens"])
def test_a_slow_grammar_fails_alone(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, slow_down: Callable[[Request], None]
) -> None:
    monkeypatch.setattr(guidance, "MAX_SECONDS", 0.5)
    alone = [llm.generate("Once upon a time", params)[0].outputs[0].token_ids for params in (PLAIN, BOUND)]
    requests, longest = _run(llm, slow_down)
    plain, bound, slow = requests
    assert [plain.outputs, bound.outputs] == alone
    assert (slow.finish_reason, slow.error) == ("error", guidance.TOO_SLOW)
    assert slow.num_outputs < 12
    assert longest < 3
    assert llm.engine.scheduler.pool.num_free == llm.engine.scheduler.pool.capacity


def test_a_machine_that_stood_still_fails_nobody(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing was computed meanwhile: it is waited for once more."""
    monkeypatch.setattr(guidance, "MAX_SECONDS", 0.5)
    alone = llm.generate("Once upon a time", SLOW)[0].outputs[0].token_ids
    slept = []

    def slow_down(request: Request) -> None:
        guide = request.guide
        assert guide is not None
        masks = guide.masks

        def late(draft: list[int]) -> object:
            if request.num_outputs == 3 and not slept:
                slept.append(time.sleep(0.7))
            return masks(draft)

        guide.masks = late  # type: ignore[assignment]

    *_, slow = _run(llm, slow_down)[0]
    assert slept
    assert slow.error is None
    assert slow.outputs == alone


def test_one_slow_moment_fails_nobody(llm: LLM) -> None:
    """Of so much computing at once it may not be the grammar's: garbage is collected then, too."""
    *_, slow = _run(llm, _computing(0.7, 1))[0]
    assert slow.error is None


def test_masks_that_are_filled_together(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody knows whose takes so long: they are filled once more, one by one."""
    monkeypatch.setattr(guidance, "MAX_SECONDS", 0.5)
    honest = guidance.fill_masks
    slow_ends = []

    def fill(masks: list[object]) -> object:
        if any(id(mask) in slow_ends for mask in masks):
            time.sleep(2.0)
        return honest(masks)  # type: ignore[arg-type]

    def slow_down(request: Request) -> None:
        guide = request.guide
        assert guide is not None
        masks = guide.masks

        def watched(draft: list[int]) -> list[object]:
            found = masks(draft)
            slow_ends.extend(id(mask) for _, mask in found)
            kept.append(found)  # or another could have its id
            return found  # type: ignore[return-value]

        guide.masks = watched  # type: ignore[assignment]

    kept: list[object] = []
    monkeypatch.setattr(guidance, "fill_masks", fill)
    plain, bound, slow = _run(llm, slow_down)[0]
    assert slow.error == guidance.TOO_SLOW
    assert (plain.finish_reason, bound.finish_reason) == ("length", "length")


def test_an_honest_grammar_has_time_to_spare(llm: LLM) -> None:
    params = SamplingParams(max_tokens=64, temperature=0, guided=Guided(json_object=True))
    (request,) = llm.requests_for("A JSON object:", params, 0)
    llm.engine.add(request)
    while llm.engine.has_work:
        llm.engine.step()
    assert isinstance(request.guide, Guide)
    assert request.error is None
    assert request.guide._seconds_left > 0.3
