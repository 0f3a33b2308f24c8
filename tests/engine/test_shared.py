"""Several threads on one LLM: everyone gets the answer that he would get alone, and nobody waits for ever."""

import itertools
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny

from outrider import LLM, SamplingParams
from outrider.engine.request import Request
from outrider.outputs import CompletionOutput
from outrider.sampling_params import Guided

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
NUM_THREADS = 8
PATIENCE = 60.0  # seconds after which something is taken to hang


@pytest.fixture(scope="module", params=["plain", "draft_model"])
def llm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tiny.save_target(tmp_path_factory.mktemp("text"), "llama")
    tiny.save_tokenizer(path)
    drafted = {"method": "draft_model", "model": str(path), "num_speculative_tokens": 4}
    settings = drafted if request.param == "draft_model" else None
    with LLM(path, settings, max_model_len=128, page_size=4, max_num_seqs=6) as made:
        yield made


def in_threads(works: list[Callable[[], Any]]) -> list[Any]:
    """All at once, each in a thread of its own."""
    start = threading.Barrier(len(works))

    def run(work: Callable[[], Any]) -> Any:
        start.wait(PATIENCE)
        return work()

    with ThreadPoolExecutor(len(works)) as pool:
        futures: list[Future[Any]] = [pool.submit(run, work) for work in works]
        return [future.result(PATIENCE) for future in futures]


def added_together(llm: LLM, works: list[Callable[[], Any]]) -> list[Any]:
    """All at once, and nobody steps before the requests of all are in the engine."""
    step, add, everybody = llm._shared.step, llm.engine.add, threading.Event()
    num_added = itertools.count(1)

    def counted_add(request: Request) -> None:
        add(request)
        if next(num_added) == len(works):
            everybody.set()

    def patient_step() -> None:
        assert everybody.wait(PATIENCE)
        step()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llm.engine, "add", counted_add)
        patch.setattr(llm._shared, "step", patient_step)
        return in_threads(works)


def generated(llm: LLM, prompt: list[int], params: SamplingParams) -> CompletionOutput:
    return llm.generate([prompt], params)[0].outputs[0]


def streamed(llm: LLM, prompt: list[int], params: SamplingParams) -> CompletionOutput:
    """The last output of a stream; every earlier one must be a beginning of it."""
    seen = [output.outputs[0] for output in llm.stream(prompt, params)]
    last = seen[-1]
    for output in seen:
        assert output.token_ids == last.token_ids[: len(output.token_ids)]
        assert last.text.startswith(output.text)
        assert len(output.token_ids) == len(output.text_ends) == len(output.draft_positions)
        assert output.text_ends[-1] == len(output.text)
    return last


def answer(output: CompletionOutput) -> tuple[list[int], str, str | None]:
    return output.token_ids, output.text, output.finish_reason


def is_idle(llm: LLM) -> bool:
    scheduler = llm.engine.scheduler
    return not llm.engine.has_work and scheduler.pool.num_free == scheduler.pool.capacity


def test_threads_get_their_own_answers(llm: LLM) -> None:
    """Generating and streaming by turns, more threads than the engine runs at once, lengths that differ."""
    params = [replace(GREEDY, max_tokens=4 + 5 * number, temperature=number % 2, seed=number) for number in range(8)]
    prompts = [[number + 3, 7, 11 + number] for number in range(NUM_THREADS)]
    alone = [answer(generated(llm, *asked)) for asked in zip(prompts, params, strict=True)]
    for turn in range(3):
        kinds = [(generated, streamed)[(number + turn) % 2] for number in range(NUM_THREADS)]
        works = [
            (lambda kind=kind, prompt=prompt, each=each: answer(kind(llm, prompt, each)))
            for kind, prompt, each in zip(kinds, prompts, params, strict=True)
        ]
        assert in_threads(works) == alone
        assert is_idle(llm)


def test_chats_and_grammars_in_threads(llm: LLM) -> None:
    """Templates, the tokenizer and the making of grammars are shared as well."""
    params = [replace(GREEDY, ignore_eos=False, guided=Guided(regex=f"[a-{end}]{{6}}")) for end in "bcdefghi"]
    asked = [{"role": "user", "content": "hello"}]
    alone = [llm.chat(asked, each)[0].outputs[0].text for each in params]
    works = [(lambda each=each: llm.chat(asked, each)[0].outputs[0].text) for each in params]
    assert in_threads(works) == alone


def test_threads_share_steps(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of several threads are in one batch."""
    sizes: list[int] = []
    step = llm.engine.step

    def counted_step() -> list[Any]:
        scheduler = llm.engine.scheduler
        sizes.append(len(scheduler.running) + len(scheduler.waiting))
        return step()

    monkeypatch.setattr(llm.engine, "step", counted_step)
    works = [(lambda number=number: generated(llm, [3 + number, 5], GREEDY)) for number in range(6)]
    assert [len(output.token_ids) for output in added_together(llm, works)] == [24] * 6
    assert max(sizes) == 6
    assert len(sizes) < 6 * 24 / 2, "most steps moved several requests"


def test_a_stream_left_standing_blocks_nobody(llm: LLM) -> None:
    """One that is not read goes on with the steps of others; once it is closed or forgotten, it no longer runs."""
    long = replace(GREEDY, max_tokens=100)
    alone = answer(generated(llm, [3, 4, 5], long))
    standing = llm.stream([3, 4, 5], long)
    next(standing)
    forgotten = llm.stream([4, 5, 6], long)
    next(forgotten)
    assert len(in_threads([lambda: generated(llm, [9, 9], GREEDY)])[0].token_ids) == 24
    del forgotten
    assert len(llm.engine.scheduler.running) == 1
    *_, last = standing
    assert answer(last.outputs[0]) == alone
    left = llm.stream([3, 4, 5], long)
    next(left)
    left.close()
    assert is_idle(llm)


def test_a_stream_may_be_closed_in_the_middle_of_a_step(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the garbage collector does, in whatever thread it runs: in the one that steps, or in another."""
    long = replace(GREEDY, max_tokens=100)
    streams = [llm.stream([3 + number, 5], long) for number in range(2)]
    for stream in streams:
        next(stream)
    step = llm.engine.step

    def closing_step() -> list[Any]:
        if streams:
            streams.pop().close()  # type: ignore[attr-defined]
            other = threading.Thread(target=streams.pop().close)  # type: ignore[attr-defined]
            other.start()
            other.join(PATIENCE)
            assert not other.is_alive()
        return step()

    monkeypatch.setattr(llm.engine, "step", closing_step)
    expected = in_threads([lambda: answer(generated(llm, [9, 9], GREEDY))])[0]
    assert is_idle(llm)
    assert expected == answer(generated(llm, [9, 9], GREEDY))


def test_a_step_that_breaks_leaves_nobody_waiting(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that made it gets the error; the others go on."""
    alone = answer(generated(llm, [3, 4], GREEDY))
    step, broken = llm.engine.step, threading.Event()

    def breaking_step() -> list[Any]:
        if len(llm.engine.scheduler.waiting) + len(llm.engine.scheduler.running) == 4 and not broken.is_set():
            broken.set()
            raise RuntimeError("it broke")
        return step()

    def ask() -> Any:
        try:
            return answer(generated(llm, [3, 4], GREEDY))
        except RuntimeError as error:
            return str(error)

    monkeypatch.setattr(llm.engine, "step", breaking_step)
    found = added_together(llm, [ask] * 4)
    assert sorted(found, key=str) == sorted(["it broke", alone, alone, alone], key=str)
    assert is_idle(llm)


def test_closing_ends_those_who_wait(tmp_path: Path) -> None:
    llm = LLM(tiny.save_target(tmp_path, "llama"), None, max_model_len=128)
    stream = llm.stream([3, 4], GREEDY)
    next(stream)
    llm.close()
    with pytest.raises(ValueError, match="closed"):
        next(stream)
    with pytest.raises(ValueError, match="closed"):
        llm.generate([[3, 4]], GREEDY)
