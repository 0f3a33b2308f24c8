"""A tiny target, texts that it wrote, and a new drafter of any method, for tests of training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.config import SpeculativeConfig
from outrider.drafters import base, dflash, lesson, mtp, parallel
from outrider.drafters.base import Drafter, drafters
from outrider.drafters.dflash import DFlash
from outrider.drafters.eagle3 import Eagle3
from outrider.drafters.fresh import Fresh, Plan
from outrider.drafters.lesson import Guess, Lesson, teaching
from outrider.training.checkpoint import STORED, write_drafter
from outrider.training.optimizer import Rates
from outrider.training.run import training_copy
from outrider.training.teacher import Teacher
from outrider.training.texts import Rows, Text, fill
from outrider.training.trainer import Lessons, Trainer

DEPTH, ROW_LEN, PROMPT_LEN = 3, 64, 5
RATES = Rates(matrices=0.05, others=0.01, averaging=0.9)
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
        teacher = Teacher(self.llm.engine, self.llm.target, self.drafter.taps, rows)
        return Trainer(self.drafter, teacher, rows, how, RATES)

    def lesson(self, rows: Rows) -> Lesson:
        return self.trainer(rows).lesson(rows, torch.arange(len(rows)))


def learnt(trainer: Trainer, count: int) -> list[float]:
    """The losses of so many steps."""
    losses = []
    for number in range(count):
        trainer.step(number / count)
        losses.append(trainer.record.read()["loss"])
    return losses


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
    return school_of(target, directory, texts, device=device)


def school_of(target: Path, directory: Path, texts: list[list[int]], device: str = "cpu", **settings: Any) -> School:
    """For a drafter that lies there."""
    speculative = SpeculativeConfig(model=str(directory), num_speculative_tokens=DEPTH, force=True, **settings)
    llm = LLM(target, speculative, device=device)
    return School(llm, training_copy(llm.target, speculative), directory, texts)


def rounded(target: Path) -> Path:
    """To what a drafter's checkpoint can hold."""
    tensors = load_file(target / "model.safetensors")
    halves = {name: tensor.to(STORED).float() for name, tensor in tensors.items()}
    save_file(halves, target / "model.safetensors", metadata={"format": "pt"})
    return target


def own_modules(target: Path, depth: int = DEPTH) -> Fresh:
    """The modules that a target came with, to begin with."""
    checkpoint = open_checkpoint(target)
    with LLM(target, None, device="cpu") as llm:
        fresh = drafters["mtp"].found_in(llm.target, checkpoint, Plan(method="mtp", depth=depth))
    checkpoint.close()
    assert fresh is not None
    return fresh


def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts are learnt from every place of a text, not from some."""
    monkeypatch.setattr(lesson, "KEPT_SHARE", 1.0)
    monkeypatch.setattr(dflash, "PLACES_PER_BLOCK", 1)


def rows_apart(texts: Sequence[Sequence[int]], row_len: int = ROW_LEN) -> Rows:
    return fill([[text_of(text)] for text in texts], row_len)


def guessed(drafter: Any, lesson: Lesson) -> Callable[[int, int], Tensor]:
    """(the newest token's column, how far ahead) -> logits of the first row of a lesson."""
    guesses: list[Guess] = drafter.guesses(lesson)
    taught = [
        teaching(lesson, drafter._target[0], _head(drafter, each.ahead), drafter.target_ids()) for each in guesses
    ]
    if isinstance(drafter, DFlash):
        wide, guesses = drafter.taught(lesson, guesses)
        taught = [wide] * len(guesses)

    def logits(newest: int, ahead: int) -> Tensor:
        guess = guesses[ahead]
        assert guess.ahead == ahead
        (place,) = (guess.anchors[0] == newest).nonzero()[:1, 0].tolist()
        return taught[ahead].head.logits(guess.hidden[0, place])

    return logits


def _head(drafter: Any, ahead: int) -> Any:
    if "mtp" not in type(drafter).__module__:
        return drafter.network.head
    return drafter.module(ahead % drafter.num_modules).head


def listen(monkeypatch: pytest.MonkeyPatch, text: list[int]) -> list[list[tuple[int, Tensor]]]:
    """Whatever a drafter thinks, it says what the text says. What it thought: by round, (place, logits [V])."""
    rounds: list[list[tuple[int, Tensor]]] = []

    def choose(
        logits: Tensor,
        sampling: Any,
        rows: Tensor,
        positions: Tensor,
        ids: Tensor | None = None,
        out: Tensor | None = None,
        sharpness: float = 1.0,
    ) -> Tensor:
        for place, row in zip(positions.tolist(), logits, strict=True):
            if not rounds or rounds[-1][-1][0] != place - 1:
                rounds.append([])
            rounds[-1].append((place, row.clone()))
        said = torch.tensor([text[min(place, len(text) - 1)] for place in positions.tolist()])
        return said if out is None else out.copy_(said)

    for module in (base, parallel, mtp):
        monkeypatch.setattr(module, "choose", choose)
    monkeypatch.setattr(Eagle3, "native_chain", lambda self, drawn: None)  # which chooses by itself
    return rounds


def check_that_it_learns_as_it_serves(school: School, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row that the engine drafts with is a row of the loss, with the same logits."""
    everywhere(monkeypatch)
    text = school.texts[0]
    with torch.no_grad():
        logits = guessed(school.drafter, school.lesson(rows_apart([text])))
        rounds = listen(monkeypatch, text)
        params = SamplingParams(max_tokens=len(text) - 5, temperature=1.0, seed=3, ignore_eos=True)
        (output,) = school.llm.generate([text[:5]], params)
        assert output.outputs[0].token_ids == text[5:]
        compared = 0
        for steps in rounds:
            newest = steps[0][0] - 1
            for ahead, (place, served) in enumerate(steps):
                if place < len(text) - 1 and ahead < DEPTH:
                    torch.testing.assert_close(logits(newest, ahead), served, atol=1e-5, rtol=1e-5)
                    compared += 1
    assert compared >= 24
