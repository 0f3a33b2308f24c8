"""A drafter on disk: as others read it, and as training goes on from it."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.drafters.base import Drafter
from outrider.drafters.fresh import Fresh
from outrider.engine.engine import Engine
from outrider.layers.packing import refill
from outrider.types import Weight

STORED = torch.bfloat16
STATE, WEIGHTS, CONFIG = "state.safetensors", "model.safetensors", "config.json"


def write_drafter(directory: Path, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """In one move each, so that nobody ever finds half of one."""
    directory.mkdir(parents=True, exist_ok=True)
    stored = {
        name: tensor.detach().to("cpu", STORED if tensor.is_floating_point() else tensor.dtype).contiguous()
        for name, tensor in tensors.items()
    }
    _replace(directory / WEIGHTS, lambda path: save_file(stored, str(path), {"format": "pt"}))
    _replace(directory / CONFIG, lambda path: path.write_text(json.dumps(dict(config), indent=2) + "\n"))


def read_fresh(directory: Path) -> Fresh:
    """A drafter on disk, to go on from."""
    checkpoint = open_checkpoint(directory)
    try:
        return Fresh(dict(checkpoint.config), {name: checkpoint.tensor(name).clone() for name in checkpoint.names()})
    finally:
        checkpoint.close()


def exported(drafter: Drafter, values: Mapping[str, Tensor], fresh: Fresh) -> dict[str, Tensor]:
    """The tensors of the checkpoint that the drafter was made from, with what its parameters are now. `values`: by
    parameter; what is not there has not been trained."""
    tensors, parameters = dict(fresh.tensors), dict(drafter.named_parameters())
    for name, weight in drafter.weights().items():
        if name in values and name in parameters:
            tensors |= _taken_apart(weight, values[name], tensors)
    return tensors


def _taken_apart(weight: Weight, value: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What a parameter is now, back in the tensors that it was made of. `like`: those; a parameter may be made of some
    of their numbers only."""
    shapes = [like[name].shape for name in weight.names]
    if weight.combine is None:
        parts = value.reshape(-1).split([shape.numel() for shape in shapes])
    else:  # it only moves numbers: what becomes of their places says where each of them came from
        counts = [shape.numel() for shape in shapes]
        places = torch.arange(1, sum(counts) + 1).split(counts)
        made = weight.combine([place.view(shape) for place, shape in zip(places, shapes, strict=True)]).reshape(-1)
        whole = torch.cat([like[name].to(value).reshape(-1) for name in weight.names])
        known = made > 0  # others are zeros that no tensor holds
        whole[made[known].to(value.device) - 1] = value.reshape(-1)[known.to(value.device)]
        parts = whole.split(counts)
    return {name: part.view(shape) for name, part, shape in zip(weight.names, parts, shapes, strict=True)}


def copy_into(engine: Engine, values: Mapping[str, Tensor]) -> None:
    """The drafter that serves takes these weights, rounded as on disk; on all ranks, where there are several."""
    assert engine.drafter is not None
    rounded = {name: value.to(STORED) for name, value in values.items()}
    if engine.orders is not None:
        engine.orders.refill(rounded)
    refill(engine.drafter, rounded)


@dataclass(frozen=True)
class Saved:
    """Where a run stood."""

    tensors: dict[str, Tensor]
    facts: dict[str, Any]


def save_state(directory: Path, tensors: Mapping[str, Tensor], facts: Mapping[str, Any]) -> None:
    kept = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    _replace(directory / STATE, lambda path: save_file(kept, str(path), {"facts": json.dumps(dict(facts))}))


def load_state(directory: Path) -> Saved | None:
    path = directory / STATE
    if not path.is_file():
        return None
    with safe_open(str(path), "pt") as file:
        facts = json.loads((file.metadata() or {})["facts"])
    return Saved(load_file(str(path)), facts)


def _replace(path: Path, write: Any) -> None:
    beside = path.with_name(f".{path.name}.new")
    write(beside)
    os.replace(beside, path)
