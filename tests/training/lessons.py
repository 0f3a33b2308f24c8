"""A tiny target, texts that it wrote, and a new drafter of any method, for tests of training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.config import SpeculativeConfig
from outrider.drafters import dflash, lesson
from outrider.drafters.base import Drafter, drafters
from outrider.drafters.dflash import DFlash
from outrider.drafters.dflash_training import corrected
from outrider.drafters.fresh import Plan
from outrider.drafters.lesson import Guess, Lesson, Teaching, teaching
from outrider.training.checkpoint import write_drafter
from outrider.training.optimizer import Rates
from outrider.training.run import training_copy
from outrider.training.teacher import Teacher
from outrider.training.texts import Rows, Text, fill
from outrider.training.trainer import Lessons, Trainer

DEPTH, ROW_LEN, PROMPT_LEN = 3, 64, 5
IDS = torch.arange(256)[torch.arange(256) % 5 != 3]  # a reduced vocabulary
FORMS: dict[str, tuple[str, Plan]] = {
    "eagle3": ("eagle3", Plan(taps=(1, 2, 4))),
    "eagle3, few tokens": ("eagle3", Plan(taps=(1, 2, 4), draft_ids=IDS, num_layers=2)),
    "eagle3, post-norm, windowed": ("eagle3", Plan(taps=(1, 4), post_norm=True, window=9, intermediate_size=40)),
    "p_eagle": ("p_eagle", Plan(taps=(1, 2, 4), mask_token=7)),
    "dflash": ("dflash", Plan(mask_token=7)),
    "dspark": ("dspark", Plan(mask_token=7, draft_ids=IDS)),
    "mtp": ("mtp", Plan()),
    "mtp, one module": ("mtp", Plan(num_layers=1)),
}


@dataclass
class School:
    llm: LLM
    drafter: Drafter  # the one that learns
    path: Path
    texts: list[list[int]]

    def trainer(self, rows: Rows, **lessons: Any) -> Trainer:
        how = Lessons(**{"num_rows": len(rows), "depth": DEPTH, **lessons})
        teacher = Teacher(self.llm.target, self.drafter.taps, rows)
        return Trainer(self.drafter, teacher, rows, how, Rates(matrices=0.05, others=0.01, averaging=0.9))

    def lesson(self, rows: Rows) -> Lesson:
        return self.trainer(rows).lesson(rows, torch.arange(len(rows)))


def written(target: Path, count: int, length: int) -> list[list[int]]:
    """Texts of the target's own."""
    prompts = [[(11 * n + 7 * place) % 251 for place in range(PROMPT_LEN)] for n in range(count)]
    with LLM(target, None, device="cpu") as llm:
        params = SamplingParams(max_tokens=length - PROMPT_LEN, temperature=1.0, seed=3, ignore_eos=True)
        outputs = llm.generate(prompts, params)
    return [[*output.prompt_token_ids, *output.outputs[0].token_ids] for output in outputs]


def text_of(tokens: Sequence[int]) -> Text:
    return Text.of(tokens, [place >= PROMPT_LEN for place in range(len(tokens))])


def open_school(form: str, target: Path, directory: Path, texts: list[list[int]], device: str = "cpu") -> School:
    method, plan = FORMS[form]
    plan = replace(plan, method=method, depth=DEPTH)
    with LLM(target, None, device="cpu") as llm:
        fresh = drafters[method].fresh(llm.target, plan)
    noise = torch.Generator().manual_seed(5)  # a copied or empty weight would hide mistakes
    tensors = {
        name: tensor + 0.05 * torch.randn(tensor.shape, generator=noise) if tensor.is_floating_point() else tensor
        for name, tensor in fresh.tensors.items()
    }
    write_drafter(directory, fresh.config, tensors)
    settings = SpeculativeConfig(model=str(directory), num_speculative_tokens=DEPTH, force=True)
    llm = LLM(target, settings, device=device)
    return School(llm, training_copy(llm, settings), directory, texts)


def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are learnt from every place of a text, not from some."""
    monkeypatch.setattr(lesson, "KEPT_SHARE", 1.0)
    monkeypatch.setattr(dflash, "PLACES_PER_BLOCK", 1)


def rows_apart(texts: Sequence[Sequence[int]], row_len: int = ROW_LEN) -> Rows:
    return fill([[text_of(text)] for text in texts], row_len)


def guessed(drafter: Any, lesson: Lesson) -> Callable[[int, int], Tensor]:
    """(the newest token's column, how far ahead) -> logits of the first row of a lesson."""
    taught: Teaching = teaching(lesson, drafter._target[0], _head(drafter), drafter.target_ids())
    guesses: list[Guess] = drafter.guesses(lesson)
    if isinstance(drafter, DFlash) and drafter.network.markov is not None:
        taught, guesses = corrected(lesson, drafter.network.markov, taught, guesses)

    def logits(newest: int, ahead: int) -> Tensor:
        guess = guesses[ahead]
        assert guess.ahead == ahead
        (place,) = (guess.anchors[0] == newest).nonzero()[:1, 0].tolist()
        return taught.head.logits(guess.hidden[0, place])

    return logits


def _head(drafter: Any) -> Any:
    return drafter.module(0).head if "mtp" in type(drafter).__module__ else drafter.network.head
