"""The differential fuzz: in random worlds every request must say, in company and drafted for, what it says plainly and
alone. Whatever a world does to its requests follows from its seed, so a failure can be had again."""

from __future__ import annotations

import importlib.util
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from outrider.certify.comparison import LOGPROB_TOLERANCE
from outrider.certify.trial import Answers, Failure, FuzzFigures, Pair, WorldTrial, settled
from outrider.certify.worlds import MAX_MODEL_LEN, Ground, World, WorldRequest, draw_world
from outrider.engine.request import Request
from outrider.kernels import native_library
from outrider.llm import LLM

MAX_TRIALS = 60  # worlds that are tried to make one that fails smaller
REFERENCE = {"page_size": 16, "enable_prefix_caching": False, "enforce_eager": True, "num_snapshots": 0}


@dataclass
class FuzzReport:
    figures: FuzzFigures = field(default_factory=FuzzFigures)
    failures: list[Failure] = field(default_factory=list)

    @property
    def exit_status(self) -> int:
        return 1 if self.failures else 3 if self.figures.doubts else 0


class Truth:
    """What the target says, asked plainly, one request at a time."""

    def __init__(self, pair: Pair) -> None:
        self.llm = LLM.from_config(settled(pair.config, None, {**REFERENCE, "max_model_len": MAX_MODEL_LEN}))
        tokenizer = self.llm.tokenizer
        grammars = tokenizer is not None and bool(self.llm.end_ids) and importlib.util.find_spec("xgrammar") is not None
        self.ground = Ground(self.llm.target.vocab_size, tokenizer is not None, grammars)
        same_bits = self.llm.config.exact or (
            self.llm.config.torch_device.type == "cpu" and native_library.library() is not None
        )
        self.tolerance = 0.0 if same_bits else LOGPROB_TOLERANCE[self.llm.target.embed.weight.dtype]

    def answers(self, asked: WorldRequest) -> list[Request]:
        """The answers to one request: one for each of its n."""
        requests = self.llm.requests_for(list(asked.prompt), asked.params, asked.number)
        for request in requests:
            self.llm.engine.add(request)
            while not request.finished:
                self.llm.engine.step()
        return requests

    def close(self) -> None:
        self.llm.close()


def run_world(world: World, pair: Pair, truth: Truth, answers: Answers) -> tuple[FuzzFigures, Failure | None]:
    """Lets a world happen, and compares."""
    begin, trial = time.perf_counter(), None
    try:
        trial = WorldTrial(world, pair, answers)
        trial.happen()
        failure = trial.first_difference(truth.tolerance) or trial.leftovers()
    except Exception:
        failure = Failure(pair.name, world, None, traceback.format_exc())
    figures = trial.figures if trial is not None else FuzzFigures(worlds=1)
    if trial is not None:
        trial.close()
    return replace(figures, seconds=time.perf_counter() - begin), failure


Note = Callable[[str, int, int], None]  # what, done, total


def fuzz(
    pairs: Sequence[Pair],
    seed: int,
    num_requests: int,
    *,
    records: bool = False,
    progress: Note | None = None,
    most_failures: int = 3,
) -> FuzzReport:
    """Worlds of all pairs by turns, until so many requests were asked. `records`: rounds can be recorded there."""
    report, truths = FuzzReport(), {}
    try:
        number = 0
        while report.figures.requests < num_requests and len(report.failures) < most_failures:
            pair = pairs[number % len(pairs)]
            if pair.name not in truths:
                truths[pair.name] = Truth(pair)
            figures, failure = try_world(f"{seed}-{number}", pair, truths[pair.name], records=records)
            report.figures.add(figures)
            if failure is not None:
                report.failures.append(failure)
            if progress is not None:
                progress(pair.name, report.figures.requests, num_requests)
            number += 1
    finally:
        for truth in truths.values():
            truth.close()
    return report


def try_world(
    seed: str, pair: Pair, truth: Truth, only: Sequence[int] | None = None, *, records: bool = False
) -> tuple[FuzzFigures, Failure | None]:
    """The world of a seed, with all of its requests or some. One that fails comes back smaller, where that can be."""
    world = draw_world(seed, truth.ground, records=records)
    if only is not None:
        world = world.with_only(only)
    answers = {asked.number: truth.answers(asked) for asked in world.asked}
    figures, failure = run_world(world, pair, truth, answers)
    if failure is not None and only is None:
        failure = shrink(failure, pair, truth, answers)
    return figures, failure


def shrink(failure: Failure, pair: Pair, truth: Truth, answers: Answers) -> Failure:
    """The same world with as few requests as still fail, as far as can be found soon."""
    trials, kept = 0, failure
    half = max(len(failure.numbers) // 2, 1)
    while half and trials < MAX_TRIALS:
        numbers = kept.numbers
        for first in range(0, len(numbers), half):
            left = numbers[:first] + numbers[first + half :]
            if not left or trials >= MAX_TRIALS:
                continue
            trials += 1
            _, found = run_world(kept.world.with_only(left), pair, truth, {each: answers[each] for each in left})
            if found is not None:
                kept = found
                break
        else:
            half //= 2
    return kept
