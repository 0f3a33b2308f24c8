"""Teaching a drafter: steps, and now and then the engine's own judgement, which says what is kept and when to stop."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from outrider.drafters.fresh import Fresh
from outrider.llm import LLM
from outrider.training.checkpoint import Saved, copy_into, exported, save_state, write_drafter
from outrider.training.options import TrainOptions
from outrider.training.trainer import Trainer
from outrider.training.validation import Served, served

MAX_AHEAD = 2  # steps that the host may be ahead of a GPU
SHOW_SECONDS = 1.0  # from one look at the loss to the next: a look waits for the device


@dataclass
class Progress:
    """What a bar shows."""

    what: str
    done: float = 0.0
    total: float = 1.0
    tokens_per_second: float = 0.0
    loss: float | None = None
    accept_length: float | None = None


OnProgress = Callable[[Progress], None]


@dataclass
class Result:
    """What came of a run, and all that is written about it."""

    options: TrainOptions
    before: Served
    best: Served
    best_step: int
    curve: list[dict[str, Any]] = field(default_factory=list)  # one entry a validation
    losses: list[dict[str, Any]] = field(default_factory=list)
    coverage: float = 1.0
    num_texts: int = 0
    num_prompts: int = 0  # held out
    num_tokens: int = 0
    num_learnt: int = 0
    num_steps: int = 0
    tokens_per_second: float = 0.0
    seconds: dict[str, float] = field(default_factory=dict)
    interrupted: bool = False
    stopped_early: bool = False

    def report(self) -> dict[str, Any]:
        options = self.options
        return {
            "method": options.method,
            "target": str(options.target),
            "drafter": str(options.out),
            "depth": options.depth,
            "accept_length_before": round(self.before.accept_length, 4),
            "accept_length_after": round(self.best.accept_length, 4),
            "before": self.before.report(),
            "after": self.best.report(),
            "best_step": self.best_step,
            "steps": self.num_steps,
            "texts": self.num_texts,
            "tokens": self.num_tokens,
            "learnt_tokens": self.num_learnt,
            "coverage": round(self.coverage, 5),
            "tokens_per_second": round(self.tokens_per_second, 1),
            "seconds": {name: round(value, 2) for name, value in self.seconds.items()},
            "seed": options.seed,
            "interrupted": self.interrupted,
            "stopped_early": self.stopped_early,
            "curve": self.curve,
        }


class Course:
    def __init__(
        self,
        options: TrainOptions,
        llm: LLM,
        trainer: Trainer,
        fresh: Fresh,
        prompts: Sequence[Sequence[int]],
        on_progress: OnProgress,
    ) -> None:
        self.options, self.llm, self.trainer, self.fresh = options, llm, trainer, fresh
        self.prompts, self.on_progress = prompts, on_progress
        self.folder = options.out / "training"
        self.seconds: dict[str, float] = {}
        self.facts: dict[str, Any] = {}
        self.spent = 0.0  # seconds of training, those of a run that is resumed included
        self._validations = 0
        self._flying: deque[Any] = deque()

    def go(self, saved: Saved | None) -> Result:
        trainer, rows = self.trainer, self.trainer.rows
        before = self._served()
        self.result = Result(
            self.options, before, before, 0, num_texts=self.facts["texts"], coverage=self.facts["coverage"],
            num_prompts=len(self.prompts),
            num_tokens=rows.num_tokens, num_learnt=rows.num_learnt, seconds=self.seconds,
        )  # fmt: skip
        if saved is not None:
            self._resume(saved)
        elif trainer.world.rank == 0:
            self._export()
        try:
            self._steps()
        except KeyboardInterrupt:
            self.result.interrupted = True
        self.result.num_steps = trainer.step_number
        if trainer.world.rank == 0:
            self._save()
        return self.result

    def _steps(self) -> None:
        trainer, begin, shown = self.trainer, time.monotonic(), time.monotonic()
        before, first = self.spent, trainer.step_number
        num_waiting, validating = 0, 0.0
        while (progress := self._share()) < 1:
            trainer.step(progress)
            self._keep_pace()
            now = time.monotonic()
            self.spent = before + now - begin - validating
            if now - shown >= SHOW_SECONDS:
                shown = now
                self.result.tokens_per_second = (
                    (trainer.step_number - first) * trainer.tokens_per_step / max(now - begin - validating, 1e-9)
                )
                self._look()
            if self._share() * self.options.num_validations >= self._validations + 1:
                self._validations += 1
                better = self._validate()
                validating += time.monotonic() - now
                num_waiting = 0 if better else num_waiting + 1
                if self.options.patience and num_waiting >= self.options.patience:
                    self.result.stopped_early = True
                    return

    def _share(self) -> float:
        """Of the run that is done."""
        if self.options.max_steps is not None:
            return self.trainer.step_number / self.options.max_steps
        assert self.options.minutes is not None
        return self.spent / (self.options.minutes * 60)

    def _keep_pace(self) -> None:
        """The host does not run far ahead of a device: time would be counted that has not been spent yet."""
        if self.trainer.device.type != "cuda":
            return
        event = torch.cuda.Event()
        event.record()
        self._flying.append(event)
        if len(self._flying) > MAX_AHEAD:
            self._flying.popleft().synchronize()

    def _look(self) -> None:
        found = self.trainer.record.read()
        self.result.losses.append({"step": self.trainer.step_number, "seconds": round(self.spent, 2), **found})
        progress = Progress("training", self._share(), 1.0, self.result.tokens_per_second, found["loss"])
        self.on_progress(self._with_length(progress))

    def _with_length(self, progress: Progress) -> Progress:
        progress.accept_length = self.result.curve[-1]["accept_length"] if self.result.curve else None
        return progress

    # judgement

    def _served(self) -> Served:
        with self._timed("validate"):
            return served(self.llm, self.prompts, self.options.validation_tokens)

    def _validate(self) -> bool:
        """Whether the drafter has become better. If so, it is written down."""
        trainer = self.trainer
        if trainer.record.num_steps:
            self._look()
        copy_into(self.llm.engine, trainer.optimizer.average)
        found = self._served()
        better = trainer.world.agreed(found.accept_length > self.result.best.accept_length, trainer.device)
        self.result.curve.append(
            {"step": trainer.step_number, "seconds": round(self.spent, 2), **found.report(), "best": better}
        )
        if better:
            self.result.best, self.result.best_step = found, trainer.step_number
            if trainer.world.rank == 0:
                self._export()
        if trainer.world.rank == 0:
            self._save()
        return better

    # what is kept

    def _export(self) -> None:
        tensors = exported(self.trainer.drafter, self.trainer.optimizer.average, self.fresh)
        write_drafter(self.options.out, self.fresh.config, tensors)

    def _save(self) -> None:
        facts = {
            "step": self.trainer.step_number,
            "spent": self.spent,
            "validations": self._validations,
            "best_step": self.result.best_step,
            "curve": self.result.curve,
            "losses": self.result.losses,
            "options": self.options.identity(),
        }
        save_state(self.folder, self.trainer.state(), facts)

    def _resume(self, saved: Saved) -> None:
        facts, mine = saved.facts, self.options.identity()
        odd = sorted(name for name in mine if facts["options"].get(name) != mine[name])
        if odd:
            said = ", ".join(f"{name} was {facts['options'].get(name)!r}, is {mine[name]!r}" for name in odd)
            raise ValueError(f"the run in {self.options.out} was another one ({said}): resume with the same options")
        self.trainer.restore(saved.tensors, facts["step"])
        self.spent, self._validations = facts["spent"], facts["validations"]
        self.result.curve, self.result.losses = facts["curve"], facts["losses"]
        self.result.best_step = facts["best_step"]
        best = [entry for entry in self.result.curve if entry["best"]]
        if best:
            self.result.best = Served(best[-1]["by_temperature"])

    @contextmanager
    def _timed(self, what: str) -> Iterator[None]:
        begin = time.monotonic()
        yield
        self.seconds[what] = self.seconds.get(what, 0.0) + time.monotonic() - begin
