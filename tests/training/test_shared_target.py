"""A target that several ranks share teaches as one that is whole: they all read, and the first has what learns."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import lessons
import pytest
import tiny
import torch
from mtp_checkpoints import with_modules
from thread_ranks import ThreadWorkers

from outrider import LLM, pair
from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.config import SpeculativeConfig
from outrider.drafters.base import drafters
from outrider.drafters.fresh import Plan
from outrider.engine import engine
from outrider.training.checkpoint import copy_into, write_drafter
from outrider.training.options import TrainOptions
from outrider.training.run import Run, frame_of, training_copy
from outrider.training.teacher import Teacher
from outrider.training.trainer import Lessons, Trainer, World
from outrider.training.validation import served

PLANS = {
    "eagle3": Plan("eagle3", lessons.DEPTH, taps=(1, 2, 4)),
    "eagle3, few tokens": Plan("eagle3", lessons.DEPTH, taps=(1, 4), draft_ids=lessons.IDS),
    "dflash": Plan("dflash", lessons.DEPTH, mask_token=7),
    "mtp": Plan("mtp", lessons.DEPTH, num_layers=1),
}


@pytest.fixture
def _threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are threads."""
    monkeypatch.setattr(pair, "take_workers", ThreadWorkers)
    for module in (pair, engine):
        monkeypatch.setattr(module, "return_workers", ThreadWorkers.end)


def taught(target: Path, directory: Path, texts: list[list[int]], num_ranks: int) -> tuple[list[float], float, Trainer]:
    """Losses of a few steps, the accept length after them, and what learnt."""
    settings = SpeculativeConfig(
        model=str(directory), num_speculative_tokens=lessons.DEPTH, force=True, draft_tensor_parallel_size=1
    )
    rows, losses = lessons.rows_apart(texts), []
    with LLM(target, settings, device="cpu", tensor_parallel_size=num_ranks) as llm:
        whole = llm.target if num_ranks == 1 else frame_of(target, llm.target)
        drafter = training_copy(whole, settings)
        teacher = Teacher(llm.engine, whole, drafter.taps, rows)
        trainer = Trainer(drafter, teacher, rows, Lessons(len(rows), lessons.DEPTH), lessons.RATES)
        for number in range(8):
            trainer.step(number / 8)
            losses.append(trainer.record.read()["loss"])
            if number == 3:  # between steps ranks serve, too
                copy_into(llm.engine, trainer.optimizer.average)
                served(llm, [text[:6] for text in texts], 6)
        copy_into(llm.engine, trainer.optimizer.average)
        return losses, served(llm, [text[:6] for text in texts], 16).accept_length, trainer


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", ["llama", "gemma3_softcap", "deepseek_v3"])
def test_ranks_teach_what_one_teaches(family: str, plan: str, target_path: Callable[..., Path], tmp_path: Path) -> None:
    target = target_path(family)
    texts = lessons.written(target, 4, 40)
    with LLM(target, None, device="cpu") as llm:
        fresh = drafters[PLANS[plan].method].fresh(llm.target, PLANS[plan])
        again = drafters[PLANS[plan].method].fresh(frame_of(target, llm.target), PLANS[plan])
    assert fresh.config == again.config
    assert all(torch.equal(fresh.tensors[name], again.tensors[name]) for name in fresh.tensors)
    write_drafter(tmp_path / "fresh", fresh.config, fresh.tensors)
    (losses, length, one), (found, found_length, two) = (
        taught(target, tmp_path / "fresh", texts, num_ranks) for num_ranks in (1, 2)
    )
    assert found == pytest.approx(losses, rel=1e-3)
    assert losses[-1] < losses[0]
    assert found_length == pytest.approx(length, abs=0.1)
    settings = SpeculativeConfig(model=str(tmp_path / "fresh"), num_speculative_tokens=lessons.DEPTH)
    begun = dict(training_copy(one.teacher.target, settings).named_parameters())
    for name, value in two.optimizer.average.items():
        moved = (one.optimizer.average[name] - begun[name]).norm()
        assert (value - one.optimizer.average[name]).norm() <= 0.05 * moved + 1e-5, name


@pytest.mark.usefixtures("_threads")
def test_own_modules_of_a_shared_target(target_path: Callable[..., Path], tmp_path: Path) -> None:
    """Which are parts of it, and whole where they learn."""
    target = with_modules(target_path("deepseek_v3"), tmp_path / "target")
    texts, checkpoint = lessons.written(target, 4, 40), open_checkpoint(target)
    with LLM(target, None, device="cpu", tensor_parallel_size=2) as llm:
        whole = frame_of(target, llm.target)
        fresh = drafters["mtp"].found_in(whole, checkpoint, Plan("mtp", lessons.DEPTH))
    checkpoint.close()
    assert fresh is not None
    write_drafter(tmp_path / "modules", fresh.config, fresh.tensors)
    (losses, length, _), (found, found_length, _) = (
        taught(target, tmp_path / "modules", texts, num_ranks) for num_ranks in (1, 2)
    )
    assert found == pytest.approx(losses, rel=1e-3)
    assert losses[-1] < losses[0]
    assert found_length == pytest.approx(length, abs=0.1)


def test_torchrun_and_ranks_of_its_own_do_not_go_together(tmp_path: Path, target_path: Callable[..., Path]) -> None:
    data = tmp_path / "data.txt"
    data.write_text("a text\n\nanother one\n")
    options = TrainOptions("eagle3", target_path("llama"), (data,), tmp_path / "out", max_steps=1, num_ranks=2)
    with pytest.raises(ValueError, match="leave out torchrun"):
        Run(options, World(0, 2), lambda progress: None)


def test_the_command_with_two_processes(target_path: Callable[..., Path], tmp_path: Path) -> None:
    """Ranks that are processes: texts, a drafter that begins as the last layer, steps, validations."""
    target = tiny.save_target(tmp_path / "target")
    tiny.save_tokenizer(target)
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"number {number} of them"}) + "\n" for number in range(12)))
    command = [sys.executable, "-m", "outrider", "train", "eagle3", "--target", str(target), "--data", str(data)]
    command += ["--out", str(tmp_path / "out"), "--max-steps", "8", "--validations", "2", "-tp", "2", "-k", "3"]
    command += ["--row-len", "64", "--answer-tokens", "24", "--held-out", "3", "--validation-tokens", "12", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["steps"] == 8
    assert report["accept_length_after"] >= report["accept_length_before"] >= 1
    with LLM(target, {"model": str(tmp_path / "out"), "force": True}, device="cpu") as llm:
        assert llm.drafter is not None
