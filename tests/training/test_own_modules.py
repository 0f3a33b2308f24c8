"""Multi-token-prediction modules that a target came with are trained further, and keep the target's names."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import lessons
import pytest
import quantised_models
import torch
from mtp_checkpoints import with_modules
from safetensors.torch import load_file, save_file

from outrider import LLM, SamplingParams
from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.config import SpeculativeConfig
from outrider.drafters.base import drafters
from outrider.drafters.fresh import Fresh, Plan
from outrider.training.checkpoint import STORED, exported, write_drafter
from outrider.training.run import read_fresh

PLAN = Plan(method="mtp", depth=lessons.DEPTH)
# dense blocks with a head each; latent attention and a mixture; grouped attention, then a mixture of narrow experts
FAMILIES = ["step3p5", "deepseek_v3", "nemotron_h_latent"]


def rounded(target: Path) -> Path:
    """To what a drafter's checkpoint can hold."""
    tensors = load_file(target / "model.safetensors")
    halves = {name: tensor.to(STORED).float() for name, tensor in tensors.items()}
    save_file(halves, target / "model.safetensors", metadata={"format": "pt"})
    return target


def found(target: Path) -> Fresh:
    """The modules that a target came with, to begin with."""
    checkpoint = open_checkpoint(target)
    with LLM(target, None, device="cpu") as llm:
        fresh = drafters["mtp"].found_in(llm.target, checkpoint, PLAN)
    checkpoint.close()
    assert fresh is not None
    return fresh


@pytest.fixture(params=FAMILIES)
def school(
    request: pytest.FixtureRequest, target_path: Callable[..., Path], tmp_path: Path
) -> Iterator[lessons.School]:
    target = rounded(with_modules(target_path(request.param), tmp_path / "target"))
    texts, fresh = lessons.written(target, 4, 40), found(target)
    write_drafter(tmp_path / "modules", fresh.config, fresh.tensors)
    made = lessons.school_of(target, tmp_path / "modules", texts)
    with made.llm:
        yield made


def drafts(llm: LLM, text: list[int]) -> list[list[int]]:
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, trace=True)
    (output,) = llm.generate([text[:5]], params)
    return [entry["draft"] for entry in output.outputs[0].trace or []]


def test_they_draft_as_in_the_target(school: lessons.School) -> None:
    """Read from a checkpoint of their own, they say what they say in the target's."""
    own = replace(school.llm.config.speculative, method="mtp", model=None)  # type: ignore[type-var]
    with LLM(school.llm.config.model, own, device="cpu") as llm:
        wanted = drafts(llm, school.texts[0])
    assert drafts(school.llm, school.texts[0]) == wanted
    assert any(wanted)


def test_they_learn_as_they_serve(school: lessons.School, monkeypatch: pytest.MonkeyPatch) -> None:
    lessons.check_that_it_learns_as_it_serves(school, monkeypatch)


def test_what_has_not_learnt_is_written_as_it_was_read(school: lessons.School) -> None:
    """However parameters are put together from tensors: stacked, reordered, several from one."""
    fresh = read_fresh(school.path)
    values = {name: parameter.detach() for name, parameter in school.drafter.named_parameters()}
    nothing = Fresh(fresh.config, {name: torch.zeros_like(tensor) for name, tensor in fresh.tensors.items()})
    written, heads = exported(school.drafter, values, nothing), (".embed_tokens.", ".shared_head.head.")
    assert written.keys() == fresh.tensors.keys()
    for name, tensor in fresh.tensors.items():
        assert torch.equal(written[name].to(tensor.dtype), tensor), name
    assert not any(part in name for name in written for part in heads), "the target's own, stored again"


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
    changed = {name for name in after if not torch.equal(before[name].float(), after[name].float())}
    kept = {name for name in after if "shared_head.output" in name or "correction_bias" in name}
    assert changed == set(after) - kept  # heads are not trained, and no slope leads to what helps experts to be chosen


def test_modules_of_a_quantised_target_become_dense(target_path: Callable[..., Path], tmp_path: Path) -> None:
    """What is written is not in few bits, and does not say so."""
    published = with_modules(target_path("deepseek_v3"), tmp_path / "published")
    config, tensors = json.loads((published / "config.json").read_text()), load_file(published / "model.safetensors")
    quantised, dense = quantised_models.quantise_tensors(tmp_path, "fp8", config, tensors)
    fresh, wanted = found(quantised), found(dense)
    assert fresh.config == wanted.config
    assert fresh.tensors.keys() == wanted.tensors.keys()
    for name, tensor in fresh.tensors.items():
        torch.testing.assert_close(tensor.float(), wanted.tensors[name].float())
    write_drafter(tmp_path / "modules", fresh.config, fresh.tensors)
    settings = SpeculativeConfig(model=str(tmp_path / "modules"), num_speculative_tokens=3, force=True)
    with LLM(quantised, settings, device="cpu") as llm:
        assert drafts(llm, list(range(20)))


def test_modules_of_another_target(target_path: Callable[..., Path], tmp_path: Path) -> None:
    fresh = found(with_modules(target_path("deepseek_v3"), tmp_path / "one"))
    write_drafter(tmp_path / "modules", fresh.config, fresh.tensors)
    other = with_modules(target_path("step3p5"), tmp_path / "other")
    settings = SpeculativeConfig(model=str(tmp_path / "modules"), num_speculative_tokens=3)
    with pytest.raises(ValueError, match="they belong to another target"):
        LLM(other, settings, device="cpu")
