"""Multi-token-prediction modules that a target came with are trained further, and keep the target's names."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import lessons
import pytest
import torch
from mtp_checkpoints import with_modules
from safetensors.torch import load_file

from outrider import LLM, SamplingParams
from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.config import SpeculativeConfig
from outrider.drafters.base import drafters
from outrider.drafters.fresh import Plan
from outrider.drafters.lesson import teaching
from outrider.training.checkpoint import exported, write_drafter
from outrider.training.run import read_fresh, training_copy

PLAN = Plan(method="mtp", depth=lessons.DEPTH)


@pytest.fixture
def school(target_path: Callable[..., Path], tmp_path: Path) -> Iterator[lessons.School]:
    target = with_modules(target_path("step3p5"), tmp_path / "target")
    texts = lessons.written(target, 4, 40)
    checkpoint = open_checkpoint(target)
    with LLM(target, None, device="cpu") as llm:
        fresh = drafters["mtp"].found_in(llm.target, checkpoint, PLAN)
    checkpoint.close()
    assert fresh is not None
    write_drafter(tmp_path / "modules", fresh.config, fresh.tensors)
    settings = SpeculativeConfig(
        method="mtp", model=str(tmp_path / "modules"), num_speculative_tokens=lessons.DEPTH, force=True
    )
    llm = LLM(target, settings, device="cpu")
    with llm:
        yield lessons.School(llm, training_copy(llm, settings), tmp_path / "modules", texts)


def drafts(llm: LLM, text: list[int]) -> list[list[int]]:
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, trace=True)
    (output,) = llm.generate([text[:5]], params)
    return [entry["draft"] for entry in output.outputs[0].trace or []]


def test_they_draft_as_in_the_target(school: lessons.School) -> None:
    """Read from a checkpoint of their own, they say what they say in the target's."""
    own = replace(school.llm.config.speculative, model=None)  # type: ignore[type-var]
    with LLM(school.llm.config.model, own, device="cpu") as llm:
        wanted = drafts(llm, school.texts[0])
    assert drafts(school.llm, school.texts[0]) == wanted
    assert any(wanted)


def test_every_row_is_learnt_with_its_own_head(school: lessons.School) -> None:
    """What the loss compares is what modules say: at the first place, what the engine drafts first."""
    llm, drafter, text = school.llm, school.drafter, school.texts[0]
    lesson = school.lesson(lessons.rows_apart([text]))
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, trace=True)
    (output,) = llm.generate([text[:20]], params)
    with torch.no_grad():
        whole = text[:20] + output.outputs[0].token_ids
        lesson = school.lesson(lessons.rows_apart([whole]))
        guess = drafter.guesses(lesson)[0]  # type: ignore[operator]
        taught = teaching(lesson, llm.target, drafter.module(0).head, None)  # type: ignore[operator]
        place = (guess.anchors[0] == 20).nonzero()[0, 0]
        first = int(taught.head.logits(guess.hidden[0, place]).argmax())
    assert first == (output.outputs[0].trace or [])[0]["draft"][0]


def test_they_learn_and_are_written_in_the_targets_names(school: lessons.School, tmp_path: Path) -> None:
    trainer = school.trainer(lessons.rows_apart(school.texts))
    losses = []
    for number in range(12):
        trainer.step(number / 12)
        losses.append(trainer.record.read()["loss"])
    assert losses[-1] < 0.9 * losses[0]
    fresh = read_fresh(school.path)
    write_drafter(tmp_path / "learnt", fresh.config, exported(school.drafter, trainer.optimizer.average, fresh))
    before, after = (load_file(path / "model.safetensors") for path in (school.path, tmp_path / "learnt"))
    assert before.keys() == after.keys()
    assert all(name.startswith("model.layers.") for name in after)
    changed = {name for name in after if not torch.equal(before[name].float(), after[name].float())}
    assert any("eh_proj" in name for name in changed)
    assert not any("shared_head.output" in name for name in changed)  # heads are not trained


def test_mixtures_cannot_be_trained(target_path: Callable[..., Path], tmp_path: Path) -> None:
    target = with_modules(target_path("deepseek_v3"), tmp_path / "target")
    checkpoint = open_checkpoint(target)
    with LLM(target, None, device="cpu") as llm, pytest.raises(ValueError, match="cannot be trained"):
        drafters["mtp"].found_in(llm.target, checkpoint, PLAN)
    checkpoint.close()
