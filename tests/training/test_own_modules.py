"""Multi-token-prediction modules that a target came with are trained further, and keep the target's names."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import lessons
import pytest
import quantised_models
import tiny
import torch
from mtp_checkpoints import with_modules
from safetensors.torch import load_file, save_file

from outrider import LLM, SamplingParams
from outrider.config import SpeculativeConfig
from outrider.drafters.fresh import Fresh
from outrider.training.checkpoint import exported, write_drafter
from outrider.training.merge import merge
from outrider.training.run import read_fresh

# dense blocks with a head each; latent attention and a mixture; grouped attention, then a mixture of narrow experts
FAMILIES = ["step3p5", "deepseek_v3", "nemotron_h_latent"]


@pytest.fixture(params=FAMILIES)
def school(
    request: pytest.FixtureRequest, target_path: Callable[..., Path], tmp_path: Path
) -> Iterator[lessons.School]:
    target = lessons.rounded(with_modules(target_path(request.param), tmp_path / "target"))
    texts, fresh = lessons.written(target, 4, 40), lessons.own_modules(target)
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
    losses = lessons.learnt(trainer, 12)
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
    fresh, wanted = lessons.own_modules(quantised), lessons.own_modules(dense)
    assert fresh.config == wanted.config
    assert fresh.tensors.keys() == wanted.tensors.keys()
    for name, tensor in fresh.tensors.items():
        torch.testing.assert_close(tensor.float(), wanted.tensors[name].float())
    write_drafter(tmp_path / "modules", fresh.config, fresh.tensors)
    settings = SpeculativeConfig(model=str(tmp_path / "modules"), num_speculative_tokens=3, force=True)
    with LLM(quantised, settings, device="cpu") as llm:
        assert drafts(llm, list(range(20)))


def test_fewer_modules_than_the_target_has(target_path: Callable[..., Path], tmp_path: Path) -> None:
    """Where fewer tokens are drafted than there are modules, the first ones learn alone, and draft on alone."""
    target = with_modules(target_path("step3p5"), tmp_path / "target")
    fresh = lessons.own_modules(target, depth=2)
    assert fresh.config["num_nextn_predict_layers"] == 2
    write_drafter(tmp_path / "modules", fresh.config, fresh.tensors)
    settings = SpeculativeConfig(model=str(tmp_path / "modules"), num_speculative_tokens=5, force=True)
    with LLM(target, settings, device="cpu") as llm:
        assert any(len(draft) == 5 for draft in drafts(llm, list(range(20))))


def test_modules_of_another_target(target_path: Callable[..., Path], tmp_path: Path) -> None:
    fresh = lessons.own_modules(with_modules(target_path("deepseek_v3"), tmp_path / "one"))
    write_drafter(tmp_path / "modules", fresh.config, fresh.tensors)
    other = with_modules(target_path("step3p5"), tmp_path / "other")
    settings = SpeculativeConfig(model=str(tmp_path / "modules"), num_speculative_tokens=3)
    with pytest.raises(ValueError, match="they belong to another target"):
        LLM(other, settings, device="cpu")


def learnt(school: lessons.School, directory: Path) -> Path:
    """The modules after a few steps."""
    trainer, fresh = school.trainer(lessons.rows_apart(school.texts)), read_fresh(school.path)
    for number in range(4):
        trainer.step(number / 4)
    write_drafter(directory, fresh.config, exported(school.drafter, trainer.optimizer.average, fresh))
    return directory


@pytest.mark.parametrize("shards", [1, 3])
def test_they_go_back_into_the_targets_files(school: lessons.School, shards: int, tmp_path: Path) -> None:
    """Then the target has them as its own: what it drafts is what they draft from a checkpoint of theirs."""
    whole = Path(str(school.llm.config.model))
    config, tensors = json.loads((whole / "config.json").read_text()), load_file(whole / "model.safetensors")
    target, modules = tmp_path / "sharded", learnt(school, tmp_path / "learnt")
    target.mkdir()
    save_sharded(target, config, tensors, shards)
    (target / "tokenizer.json").write_text("{}")
    written = merge(target, modules, tmp_path / "merged")
    merged = load_all(tmp_path / "merged")
    assert merged.keys() == tensors.keys()
    changed = {name for name in tensors if not torch.equal(merged[name].float(), tensors[name].float())}
    assert changed <= set(load_file(modules / "model.safetensors"))
    assert changed
    links = {path.name for path in (tmp_path / "merged").iterdir() if path.is_symlink()}
    assert "tokenizer.json" in links
    assert {path.name for path in (tmp_path / "merged").iterdir()} == links | set(written)
    assert (len(links) > 1) is (shards > 1), "what holds no module is linked"
    (tmp_path / "merged" / "tokenizer.json").unlink()
    count = lessons.DEPTH
    apart = SpeculativeConfig(model=str(modules), num_speculative_tokens=count, force=True)
    own = SpeculativeConfig(method="mtp", num_speculative_tokens=count, force=True)
    with LLM(whole, apart, device="cpu") as llm:
        wanted = drafts(llm, school.texts[0])
    with LLM(tmp_path / "merged", own, device="cpu") as llm:
        assert drafts(llm, school.texts[0]) == wanted
    with pytest.raises(ValueError, match="is not empty"):
        merge(target, modules, tmp_path / "merged")


def save_sharded(directory: Path, config: dict[str, Any], tensors: dict[str, torch.Tensor], count: int) -> None:
    """In one file, or in several whose last one has what is last by name: the modules."""
    (directory / "config.json").write_text(json.dumps(config))
    if count == 1:
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    names, index = sorted(tensors, key=lambda name: ("layers.4." in name or "mtp." in name, name)), {}
    for number in range(count):
        begin, end = number * len(names) // count, (number + 1) * len(names) // count
        file, mine = f"part-{number}.safetensors", names[begin:end]
        save_file({name: tensors[name] for name in mine}, directory / file, metadata={"format": "pt"})
        index |= dict.fromkeys(mine, file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))


def load_all(directory: Path) -> dict[str, torch.Tensor]:
    """As other engines do: every file whole, by the index."""
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    assert {path.name for path in directory.glob("*.safetensors")} == set(index.values())
    found: dict[str, torch.Tensor] = {}
    for file in set(index.values()):
        tensors = load_file(directory / file)
        assert not tensors.keys() & found.keys(), "a tensor is there twice"
        assert all(index[name] == file for name in tensors)
        found |= tensors
    return found


@pytest.mark.parametrize("way", ["fp8", "packed", "gptq"])
def test_a_quantised_targets_modules(way: str, target_path: Callable[..., Path], tmp_path: Path) -> None:
    """They are not quantised when they come back, and its config.json says so; or it is refused, where it cannot."""
    sizes = {"v_head_dim": 16, "q_lora_rank": 32}  # which groups of 32 numbers divide
    published = with_modules(target_path("deepseek_v3", **sizes), tmp_path / "published")
    config, tensors = json.loads((published / "config.json").read_text()), load_file(published / "model.safetensors")
    target, _ = quantised_models.quantise_tensors(tmp_path, way, config, tensors)
    fresh = lessons.own_modules(target)
    write_drafter(tmp_path / "modules", fresh.config, fresh.tensors)
    if way == "gptq":
        with pytest.raises(ValueError, match="gptq has no list of layers that are not quantised"):
            merge(target, tmp_path / "modules", tmp_path / "merged")
        assert not (tmp_path / "merged").exists()
        return
    merge(target, tmp_path / "modules", tmp_path / "merged")
    settings = json.loads((tmp_path / "merged" / "config.json").read_text())["quantization_config"]
    listed = settings["modules_to_not_convert" if way == "fp8" else "ignore"]
    assert "model.layers.4.self_attn.o_proj" in listed
    assert not any(name.startswith("model.layers.3.") for name in listed)
    merged = load_all(tmp_path / "merged")
    assert sorted(name for name in merged if name.startswith("model.layers.4.self_attn.o_proj")) == [
        "model.layers.4.self_attn.o_proj.weight"
    ]
    drafted = []
    for model, drafter in ((target, str(tmp_path / "modules")), (tmp_path / "merged", None)):
        settings = SpeculativeConfig(method="mtp", model=drafter, num_speculative_tokens=3, force=True)
        with LLM(model, settings, device="cpu") as llm:
            drafted.append(drafts(llm, list(range(20))))
    assert drafted[0] == drafted[1]


def test_what_cannot_go_back(target_path: Callable[..., Path], tmp_path: Path) -> None:
    target = with_modules(target_path("deepseek_v3"), tmp_path / "target")
    head = tiny.save_eagle3(tmp_path / "head")
    with pytest.raises(ValueError, match="holds nothing below"):
        merge(target, head, tmp_path / "out")
    fresh = lessons.own_modules(target)
    write_drafter(tmp_path / "modules", fresh.config, fresh.tensors)
    with pytest.raises(ValueError, match="has no multi-token-prediction modules"):
        merge(target_path("llama"), tmp_path / "modules", tmp_path / "out")
    assert not (tmp_path / "out").exists()
