"""Answers with a clock beside them: one run, and drafted against plain decoding of the same prompt.
Ctrl-C ends a run between two steps."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, cast

from outrider.drafters.base import Drafter, drafters
from outrider.drafters.suffix import Suffix
from outrider.engine.stages import AbsentDrafter
from outrider.llm import LLM
from outrider.outputs import CompletionOutput, RequestOutput
from outrider.processes import frozen_heap
from outrider.prompts import Prompt
from outrider.sampling_params import SamplingParams

# Runs of each side of a comparison: short ones are timed more often, until both sides together have taken so long
NUM_TIMED_RUNS, MOST_TIMED_RUNS, TIMED_SECONDS = 3, 15, 3.0


@dataclass(frozen=True)
class Question:
    """What a model is asked, and how it is to choose its words."""

    prompt: Prompt
    params: SamplingParams


@dataclass(frozen=True)
class Run:
    """One answer and how long it took."""

    completion: CompletionOutput
    seconds: float  # time to first token included, loading and display excluded
    ttft: float  # seconds to the first token
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    interrupted: bool = False

    @property
    def num_tokens(self) -> int:
        return len(self.completion.token_ids)

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    def report(self) -> dict[str, Any]:
        """The run as values that JSON knows."""
        return {
            "text": self.completion.text,
            "token_ids": self.completion.token_ids,
            "num_tokens": self.num_tokens,
            "seconds": self.seconds,
            "ttft": self.ttft,
            "tokens_per_second": self.tokens_per_second,
        }


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Ctrl-C sets the event, so that a step is never torn apart; pressed again, it interrupts as usual."""
    interrupted = threading.Event()

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        if interrupted.is_set():
            raise KeyboardInterrupt
        interrupted.set()

    before = signal.signal(signal.SIGINT, on_interrupt)
    try:
        yield interrupted
    finally:
        signal.signal(signal.SIGINT, before)


def run(llm: LLM, question: Question, show: Callable[[CompletionOutput], None] | None = None) -> Run:
    """Generates and measures. The clock stands still while `show` writes: a slow terminal is not a slow engine."""
    seconds = ttft = 0.0
    output: RequestOutput | None = None
    outputs = cast("Generator[RequestOutput, None, None]", llm.stream(question.prompt, question.params))
    with interruptible() as interrupted, closing(outputs):
        begin = time.perf_counter()
        for output in outputs:
            seconds += time.perf_counter() - begin
            ttft = ttft or seconds
            if show is not None:
                show(output.outputs[0])
            if interrupted.is_set():
                break
            begin = time.perf_counter()
    assert output is not None, "a request that ends without a token"
    return Run(
        completion=output.outputs[0],
        seconds=seconds,
        ttft=ttft,
        num_prompt_tokens=len(output.prompt_token_ids),
        num_cached_tokens=output.num_cached_tokens,
        interrupted=interrupted.is_set() and not output.finished,
    )


def run_to_end(llm: LLM, question: Question) -> Run:
    """A run that counts only if nobody interrupts it."""
    result = run(llm, question)
    if result.interrupted:
        raise KeyboardInterrupt
    return result


@dataclass(frozen=True)
class Comparison:
    """Medians of both sides, and the first place where any two of all the runs differ."""

    drafted: Run
    plain: Run
    difference: int | None

    @property
    def speedup(self) -> float:
        return self.plain.seconds / self.drafted.seconds


@frozen_heap()
def compare(drafted: LLM, plain: LLM, question: Question, first: Run) -> Comparison:
    """Timed runs in turn, so that both sides meet the same weather; `first` warmed the drafted side up. What a drafter
    has learnt from the question's earlier answers is forgotten before each."""
    warm_up = run_to_end(plain, question)
    timed: tuple[list[Run], list[Run]] = ([], [])
    spent = 0.0
    while len(timed[1]) < NUM_TIMED_RUNS or (len(timed[1]) < MOST_TIMED_RUNS and spent < TIMED_SECONDS):
        for runs, llm in zip(timed, (drafted, plain), strict=True):
            forget_requests(llm)
            runs.append(run_to_end(llm, question))
            spent += runs[-1].seconds
    expected = first.completion.token_ids
    places = [first_difference(expected, other.completion.token_ids) for other in (warm_up, *timed[0], *timed[1])]
    return Comparison(
        drafted=median_run(timed[0]),
        plain=median_run(timed[1]),
        difference=min((place for place in places if place is not None), default=None),
    )


def first_difference(left: list[int], right: list[int]) -> int | None:
    """Where two texts part; a text that ends early parts at its end."""
    if left == right:
        return None
    shared = min(len(left), len(right))
    return next((place for place in range(shared) if left[place] != right[place]), shared)


def median_run(runs: list[Run]) -> Run:
    return sorted(runs, key=lambda each: each.seconds)[len(runs) // 2]


def forget_requests(llm: LLM) -> bool:
    """Empties the drafter's memory of earlier requests; whether it has one. Before a question is asked again for
    timing, it must: a drafter that learnt the answer would be measured on what it has just been told."""
    return forget_all(llm.drafter)


def forget_all(drafter: Drafter | None) -> bool:
    """Lets a drafter forget all that it has learnt from earlier requests."""
    parts = [part for part in (drafter.modules() if drafter is not None else ()) if isinstance(part, Suffix)]
    for part in parts:
        part.forget()
    return bool(parts)


def method_of(llm: LLM) -> str | None:
    """The name to which the drafter's class answers."""
    drafter = llm.drafter
    if drafter is None:
        return None
    return drafters.name_of(drafter.kind if isinstance(drafter, AbsentDrafter) else type(drafter))
