"""A drafter that goes on learning from what its engine says, a step whenever the engine has nothing to do.
What it has become is served only if it foresees recent answers better that it has not learnt from; every version is a
drafter on disk, and an earlier one can be taken back at any time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from outrider.engine.request import Request
from outrider.engine.text_pass import PAGE_SIZE
from outrider.llm import LLM
from outrider.training.checkpoint import copy_into, exported, read_fresh, write_drafter
from outrider.training.optimizer import Rates
from outrider.training.run import training_copy
from outrider.training.teacher import Teacher
from outrider.training.texts import Rows, Text, fill
from outrider.training.trainer import Lessons, Trainer

CURRENT = "current"  # a file with the number of the version that is served
LEAST_TOKENS = 8  # of an answer that is learnt from
HELD_OUT = 5  # one text in so many is for judging only


@dataclass(frozen=True)
class OnlineOptions:
    directory: Path
    row_len: int = 512  # tokens; longer texts are not learnt from
    num_rows: int = 8  # texts of a step
    steps_per_text: float = 0.5
    steps_per_version: int = 16  # from one judgement to the next
    num_kept: int = 512  # the latest texts, from which steps are drawn
    num_judged: int = 32  # the latest of those held out
    rates: Rates = field(default_factory=lambda: Rates(matrices=3e-3, others=2e-4, averaging=0.98))
    seed: int = 0


@dataclass(frozen=True)
class Judgement:
    """Expected accept lengths on the latest texts that nothing was learnt from."""

    version: int
    before: float
    after: float
    swapped: bool


def check_online(llm: LLM) -> None:
    """A ValueError where nothing could learn."""
    settings, drafter = llm.config.speculative, llm.drafter
    if settings is None or drafter is None or settings.model is None or not drafter.trainable:
        raise ValueError("--learn needs a drafter that can learn: one of eagle3, p_eagle, dflash or dspark")
    if llm.engine.orders is not None:
        raise ValueError("--learn is for one process: a drafter that several share does not learn")


class OnlineLearner:
    """heard() is told of answers, work() learns a step. Whoever calls them lets no step of the engine run meanwhile."""

    def __init__(
        self, llm: LLM, options: OnlineOptions, on_judged: Callable[[Judgement], None] = lambda judgement: None
    ) -> None:
        check_online(llm)
        settings = llm.config.speculative
        assert settings is not None
        assert settings.model is not None
        self.options, self._on_judged, self._llm = options, on_judged, llm
        self._fresh = read_fresh(Path(settings.model))
        nothing = fill([[]] * options.num_rows, options.row_len)
        copy = training_copy(llm.target, settings)
        self._trainer = Trainer(
            copy,
            Teacher(llm.engine, llm.target, copy.taps, nothing, most_documents=1),
            nothing,
            Lessons(options.num_rows, llm.engine.lookahead, seed=options.seed),
            options.rates,
        )
        self._texts: deque[Text] = deque(maxlen=options.num_kept)
        self._held_out: deque[Text] = deque(maxlen=options.num_judged)
        self._source = torch.Generator().manual_seed(options.seed)
        self._num_heard, self._due = 0, 0.0
        self.judgements: list[Judgement] = []
        self._serve(self._write(0, self._trainer.optimizer.average))

    # what it is told

    def heard(self, request: Request) -> None:
        """An answer is complete. Only those are learnt from whose request allows it."""
        allowed = request.params.learn and request.num_outputs >= LEAST_TOKENS
        if not allowed or len(request.tokens) > self.options.row_len:
            return
        tokens, count = list(request.tokens), len(request.tokens) - request.num_outputs
        text = Text.of(tokens, [place >= count for place in range(len(tokens))])
        self._num_heard += 1
        (self._held_out if self._num_heard % HELD_OUT == 0 else self._texts).append(text)
        self._due = min(self._due + self.options.steps_per_text, float(2 * self.options.steps_per_version))

    # what it does

    def work(self) -> bool:
        """One step, and now and then a judgement; whether there was anything to do."""
        self._heed()
        if self._due < 1 or not self._texts:
            return False
        self._due -= 1
        trainer = self._trainer
        picked = torch.randint(len(self._texts), (self.options.num_rows,), generator=self._source).tolist()
        trainer.rows = self._rows([self._texts[number] for number in picked])
        trainer.step(trainer.rates.warm_up)
        if trainer.step_number % self.options.steps_per_version == 0 and self._held_out:
            self._judge()
        return True

    def _rows(self, texts: list[Text]) -> Rows:
        """As long as the longest of them: whoever comes meanwhile waits for the step."""
        longest = max(len(text.tokens) for text in texts)
        return fill([[text] for text in texts], -(-longest // PAGE_SIZE) * PAGE_SIZE)

    def _judge(self) -> None:
        now = {name: value.clone() for name, value in self._trainer.optimizer.average.items()}
        before, after = self.expected_length(self._values), self.expected_length(now)
        swapped = after > before
        if swapped:
            self._serve(self._write(self.version + 1, now))
        judgement = Judgement(self.version, before, after, swapped)
        self.judgements.append(judgement)
        self._on_judged(judgement)

    def expected_length(self, values: Mapping[str, Tensor]) -> float:
        """Tokens of a greedy round on the texts held out: how often each place of a draft agrees with the target, those
        before it being right."""
        texts = list(self._held_out)
        counts = torch.zeros(2, self._trainer.lessons.depth)
        with self._having(values), torch.no_grad():
            for first in range(0, len(texts), self.options.num_rows):
                rows = self._rows(texts[first : first + self.options.num_rows])
                loss = self._trainer.loss(rows, torch.arange(len(rows)))
                counts += torch.stack([loss.agreed, loss.asked]).cpu()
        shares = counts[0] / counts[1].clamp(min=1)
        return 1 + float(shares.cumprod(0).sum())

    @contextmanager
    def _having(self, values: Mapping[str, Tensor]) -> Iterator[None]:
        """The network that learns has these weights for a while."""
        parameters = self._trainer.trained()
        mine = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(values[name])
            try:
                yield
            finally:
                for name, parameter in parameters.items():
                    parameter.copy_(mine[name])

    # versions

    @property
    def directory(self) -> Path:
        return self.options.directory

    def roll_back(self, version: int) -> None:
        """An earlier version is served again, and learning goes on from it."""
        assert self._llm.config.speculative is not None
        settings = replace(self._llm.config.speculative, model=str(self.directory / str(version)))
        kept = dict(training_copy(self._llm.target, settings).named_parameters())
        values = {name: kept[name].detach() for name in self._trainer.trained()}
        self._trainer.optimizer.begin_again(values)
        self._due = 0.0
        self._serve((version, values))

    def _heed(self) -> None:
        """Whoever writes an earlier version's number into the file wants that one back."""
        try:
            wanted = int((self.directory / CURRENT).read_text())
        except (OSError, ValueError):
            return
        if 0 <= wanted < self.version:
            self.roll_back(wanted)

    def _write(self, version: int, values: Mapping[str, Tensor]) -> tuple[int, dict[str, Tensor]]:
        tensors = exported(self._trainer.drafter, values, self._fresh)
        write_drafter(self.directory / str(version), self._fresh.config, tensors)
        return version, {name: value.clone() for name, value in values.items()}

    def _serve(self, version: tuple[int, dict[str, Tensor]]) -> None:
        self.version, self._values = version
        copy_into(self._llm.engine, self._values)
        (self.directory / CURRENT).write_text(f"{self.version}\n")

    def report(self) -> dict[str, Any]:
        return {"version": self.version, "heard": self._num_heard, "steps": self._trainer.step_number}
