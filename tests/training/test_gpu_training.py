"""Training on a CUDA device: in bfloat16 and with the kernels there it loses what it loses on a CPU, and it learns."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import lessons
import pytest
import torch
from mtp_checkpoints import with_modules

from outrider.kernels.branches import branch_attention, branch_attention_reference
from outrider.kernels.head_loss import Divergence, HeadMatrix, head_loss, head_loss_reference
from outrider.training.checkpoint import copy_into, write_drafter
from outrider.training.texts import pack
from outrider.training.validation import served

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


@pytest.mark.parametrize("form", lessons.FORMS)
def test_a_gpu_learns_what_a_cpu_learns(form: str, target_path: Callable[..., Path], tmp_path: Path) -> None:
    target = target_path("llama")
    texts = lessons.written(target, 6, 40)
    rows = pack([lessons.text_of(text) for text in texts], 64)
    losses = []
    for device in ("cpu", "cuda"):
        school = lessons.open_school(form, target, tmp_path / device, texts, device)
        with school.llm, pytest.MonkeyPatch.context() as monkeypatch:
            lessons.everywhere(monkeypatch)
            trainer = school.trainer(rows)
            for number in range(8):
                trainer.step(number / 8)
                losses.append(trainer.record.read()["loss"])
            copy_into(school.llm.engine, trainer.optimizer.average)
            assert served(school.llm, [text[:6] for text in texts], 12).accept_length >= 1
    assert losses[8] == pytest.approx(losses[0], rel=0.03)
    assert losses[-1] < losses[8]


@pytest.mark.parametrize("family", ["deepseek_v3", "nemotron_h_latent"])
def test_own_modules_with_experts(family: str, target_path: Callable[..., Path], tmp_path: Path) -> None:
    """Experts are chosen in float32, whatever the rest is computed in, and asked one after the other: a step of theirs
    is not recorded, and says so."""
    target = lessons.rounded(with_modules(target_path(family), tmp_path / "target"))
    texts, fresh = lessons.written(target, 6, 40), lessons.own_modules(target)
    write_drafter(tmp_path / "modules", fresh.config, fresh.tensors)
    losses = []
    for device in ("cpu", "cuda"):
        school = lessons.school_of(target, tmp_path / "modules", texts, device)
        with school.llm, warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            trainer = replace(school.trainer(lessons.rows_apart(texts)), records=device == "cuda")
            for number in range(8):
                trainer.step(number / 8)
                losses.append(trainer.record.read()["loss"])
            copy_into(school.llm.engine, trainer.optimizer.average)
            assert served(school.llm, [text[:6] for text in texts], 12).accept_length >= 1
    assert losses[8] == pytest.approx(losses[0], rel=0.03)
    assert losses[-1] < losses[8]


@pytest.mark.parametrize("form", lessons.FORMS)
def test_recorded_losses_are_those_of_steps_that_are_not(
    form: str, target_path: Callable[..., Path], tmp_path: Path
) -> None:
    """Rows in one part and in two of different size; with gradients, and after the weights have changed."""
    target = target_path("llama")
    texts = lessons.written(target, 9, 40)
    rows = pack([lessons.text_of(text) for text in texts], 64)
    school = lessons.open_school(form, target, tmp_path, texts, "cuda")
    with school.llm:
        begun = {name: p.detach().clone() for name, p in school.drafter.named_parameters()}
        found = []
        for records in (False, True):
            for parts in (1, 2):
                school.drafter.load_state_dict(begun)
                trainer = school.trainer(rows, parts=parts, num_rows=5)
                trainer = replace(trainer, records=records)
                losses = []
                for number in range(6):
                    trainer.step(number / 6)
                    losses.append(trainer.record.read())
                assert (trainer._recorded is not None) is records
                assert trainer._recorded is None or trainer._recorded.refused is None
                found.append((losses, {name: value.clone() for name, value in trainer.optimizer.average.items()}))
    (wanted, weights), *others = found
    assert wanted[-1]["loss"] < wanted[0]["loss"]
    for losses, averages in others:
        assert [each["loss"] for each in losses] == pytest.approx([each["loss"] for each in wanted], rel=0.01)
        for name, value in averages.items():
            moved = (weights[name] - begun[name]).norm()
            assert (value - weights[name]).norm() <= 0.3 * moved + 1e-4, name  # first steps go by a gradient's sign


def test_what_cannot_be_recorded_is_computed_as_it_is(
    target_path: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = target_path("llama")
    texts = lessons.written(target, 4, 40)
    rows = lessons.rows_apart(texts)
    school = lessons.open_school("mtp", target, tmp_path, texts, "cuda")
    with school.llm:
        usual = type(school.drafter).loss

        def asking(drafter: Any, lesson: Any) -> Any:
            found = usual(drafter, lesson)
            assert float(found.weight) > 0  # which waits for the device
            return found

        monkeypatch.setattr(type(school.drafter), "loss", asking)
        trainer = replace(school.trainer(rows), records=True)
        with pytest.warns(UserWarning, match="cannot be recorded"):
            trainer.step(0.1)
        torch.randn(1, device="cuda")  # nobody believes that something is still being recorded
        first = trainer.record.read()["loss"]
        for _ in range(8):
            trainer.step(0.5)
        assert trainer.record.read()["loss"] < first


@pytest.mark.parametrize("lk", [False, True])
@pytest.mark.parametrize("softcap", [0.0, 20.0])
def test_the_compiled_head_and_loss(softcap: float, lk: bool) -> None:
    """More tokens than a program looks at at a time, and no multiple of it."""
    torch.manual_seed(0)
    hidden = torch.randn(33, 64, device="cuda", requires_grad=True)
    head, teacher = (torch.randn(9001, 64, device="cuda") for _ in range(2))
    found = []
    for function in (head_loss, head_loss_reference):
        states = torch.linspace(-1, 1, 33 * 64, device="cuda").view(33, 64)
        divergence = Divergence(0.6, 0.4, lk)
        loss = function(hidden, HeadMatrix(head, softcap), states, HeadMatrix(teacher), divergence)
        (gradient,) = torch.autograd.grad(loss.loss.sum(), hidden)
        found.append((loss.loss.detach(), loss.surprise, loss.agreed.float(), gradient))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize(("branches", "queries"), [(33, 1), (64, 1), (5, 8)])
def test_attention_of_branches(branches: int, queries: int) -> None:
    """In bfloat16, with numbers of queries that the kernel's sums are padded for; gradients too."""
    torch.manual_seed(0)
    shapes = [(2, branches, queries, 6, 32), *[(2, 72, 2, 32)] * 2, *[(2, branches, 3, 2, 32)] * 2]
    given = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes]
    seen = torch.rand(2, branches, 72, device="cuda") < 0.4
    seen[:, 0] = False
    wanted, found = torch.randn(shapes[0], device="cuda"), []
    for function, dtype in ((branch_attention, torch.bfloat16), (branch_attention_reference, torch.float32)):
        q, keys, values, *own = (x.detach().to(dtype).requires_grad_() for x in given)
        out = function(q, (keys, values), (own[0], own[1]), seen, 0.2)
        gradients = torch.autograd.grad((out.float() * wanted).sum(), (q, keys, values, *own))
        found.append([out.detach().float(), *(gradient.float() for gradient in gradients)])
    for one, other in zip(*found, strict=True):
        assert (one - other).norm() < 0.01 * other.norm()
