"""Loading is strict for every family: a tensor that is missing, renamed or misshapen is named in the error."""

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import tiny
import torch
from harness import load_target
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.checkpoints.loader import build_target


def used_tensors(path: Path) -> dict[str, str]:
    """Names on disk of the tensors that the target reads, with the names it knows them by."""
    checkpoint = open_checkpoint(path)
    target = build_target(checkpoint)
    used = {name for weight in target.weights().values() for name in weight.names}
    known = {name: target.canonical(name) for name in checkpoint.names()}
    checkpoint.close()
    return {name: canonical for name, canonical in known.items() if canonical in used}


def broken(path: Path, copy: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    shutil.copytree(path, copy)
    tensors = load_file(copy / "model.safetensors")
    change(tensors)
    save_file(tensors, copy / "model.safetensors")
    return copy


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_tensor_that_is_not_right_is_named(family: str, target_path: Callable[..., Path], tmp_path: Path) -> None:
    path = target_path(family)
    names = used_tensors(path)
    chosen = random.Random(family).sample(sorted(names), min(6, len(names)))
    for number, name in enumerate(chosen):
        missing = broken(path, tmp_path / f"missing{number}", lambda tensors, name=name: tensors.pop(name))
        # a missing tensor is named as the target knows it: what the file would have called it cannot be known
        either = f"{re.escape(name)}|{re.escape(names[name])}"
        with pytest.raises(ValueError, match=either):
            load_target(missing)

        def rename(tensors: dict[str, Tensor], name: str = name) -> None:
            tensors[f"{name}_renamed"] = tensors.pop(name)

        with pytest.raises(ValueError, match=either):
            load_target(broken(path, tmp_path / f"renamed{number}", rename))

        def reshape(tensors: dict[str, Tensor], name: str = name) -> None:
            tensors[name] = torch.zeros(tensors[name].shape[0] + 1, *tensors[name].shape[1:])

        with pytest.raises(ValueError, match=re.escape(name)):
            load_target(broken(path, tmp_path / f"misshapen{number}", reshape))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_surplus_tensor_is_named(family: str, target_path: Callable[..., Path], tmp_path: Path) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.surprise.weight"] = torch.zeros(1)

    with pytest.raises(ValueError, match=r"surprise\.weight"):
        load_target(broken(target_path(family), tmp_path / "surplus", add))


@pytest.mark.parametrize("family", tiny.FAMILIES)
def test_a_config_without_its_sizes_is_refused(family: str, target_path: Callable[..., Path], tmp_path: Path) -> None:
    """Either the key is named, or (where the family has a default) the tensors that then do not fit."""
    copy = tmp_path / "copy"
    shutil.copytree(target_path(family), copy)
    config = json.loads((copy / "config.json").read_text())
    inner = config.get("text_config", config)
    inner.pop("hidden_size")
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"hidden_size|has shape|lacks tensor"):
        load_target(copy)
