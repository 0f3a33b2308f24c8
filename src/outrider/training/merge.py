"""Modules of a target's own that have learnt go back into the target's files, for engines that look for them there. Of
those files only the ones that held modules are written again; all others are linked."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from outrider.checkpoints.checkpoint import INDEX_NAME, SafetensorsCheckpoint, open_checkpoint
from outrider.checkpoints.quantised import QuantisedCheckpoint
from outrider.config import SpeculativeConfig
from outrider.drafters.base import drafters
from outrider.layers.linear import deferred
from outrider.tokenizer import read_json_object
from outrider.training.run import outline_of
from outrider.types import Checkpoint

MODULES = "model-mtp-modules.safetensors"
ALONE = ("model.safetensors", "model-without-modules.safetensors")  # would be read without an index; so it is renamed
UNQUANTISED = {  # where a config lists the layers that it does not quantise, by quant_method
    "fp8": "modules_to_not_convert",
    "awq": "modules_to_not_convert",
    "compressed-tensors": "ignore",
}


def merge(model: str | Path, modules: str | Path, out: Path) -> list[str]:
    """A copy of a target whose own multi-token-prediction modules are those of `modules`; the files that were written,
    but for links. Everything that can be refused is refused before."""
    target, trained = open_checkpoint(model), open_checkpoint(modules)
    try:
        if not target.path.is_dir():
            raise ValueError(f"{target.path} is one file: only directories of safetensors hold modules of their own")
        plan = _Plan.of(target, trained)
        if out.exists() and any(out.iterdir()):
            raise ValueError(f"{out} is not empty: choose another directory, or empty it")
        out.mkdir(parents=True, exist_ok=True)
        return _write(plan, target.path, trained, out)
    finally:
        target.close()
        trained.close()


@dataclass(frozen=True)
class _Plan:
    config: dict[str, Any]
    new: dict[str, str]  # tensors to be written, by the names that the target's files have for them
    old: set[str]  # tensors of those files that go

    @classmethod
    def of(cls, target: Checkpoint, trained: Checkpoint) -> _Plan:
        outline = outline_of(target)
        drafter = SpeculativeConfig(method="mtp", model=str(trained.path))
        with deferred():  # refuses what does not belong to this target
            drafters["mtp"].build(drafter, outline, trained)
        names = {outline.canonical(name): name for name in target.names()}
        missing = sorted(set(trained.names()) - set(names))
        if missing:
            raise ValueError(f"{target.path} has no {missing[0]} to replace: give the target that they learnt from")
        new = {names[name]: name for name in trained.names()}
        parts = {name: target.parts_of(name) if isinstance(target, QuantisedCheckpoint) else [name] for name in new}
        in_few_bits = [name for name, stored in parts.items() if stored != [name]]
        config = _unquantised(read_json_object(target.path / "config.json"), in_few_bits, target.path)
        return cls(config, new, {part for stored in parts.values() for part in stored})


def _write(plan: _Plan, source: Path, trained: Checkpoint, out: Path) -> list[str]:
    files = SafetensorsCheckpoint(source)
    index, written = dict.fromkeys(plan.new, MODULES), [MODULES]
    try:
        by_file: dict[str, list[str]] = {}
        for name in files.names():
            by_file.setdefault(files.file_name(name), []).append(name)
        for file, names in sorted(by_file.items()):
            kept = [name for name in names if name not in plan.old]
            place = ALONE[1] if file == ALONE[0] else file
            if len(kept) == len(names):
                (out / place).symlink_to((source / file).resolve())
            elif kept:
                save_file({name: files.tensor(name) for name in kept}, out / place, metadata={"format": "pt"})
                written.append(place)
            index |= dict.fromkeys(kept, place)
    finally:
        files.close()
    save_file({name: trained.tensor(each) for name, each in plan.new.items()}, out / MODULES, metadata={"format": "pt"})
    size = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    (out / INDEX_NAME).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": index}, indent=1) + "\n")
    (out / "config.json").write_text(json.dumps(plan.config, indent=2) + "\n")
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix != ".safetensors" and path.name not in (INDEX_NAME, "config.json"):
            (out / path.name).symlink_to(path.resolve())
    return [*sorted(written), INDEX_NAME, "config.json"]


def _unquantised(config: dict[str, Any], names: list[str], path: Path) -> dict[str, Any]:
    """A config.json that does not say of these weights that they are in few bits."""
    if not names:
        return config
    settings = config.get("quantization_config") or config["text_config"]["quantization_config"]
    method = settings.get("quant_method")
    if method not in UNQUANTISED:
        raise ValueError(
            f"{path}: a quantization_config of {method} has no list of layers that are not quantised, which the "
            f"modules would be: known of {', '.join(UNQUANTISED)}"
        )
    layers = sorted(name.removesuffix(".weight") for name in names)
    settings[UNQUANTISED[method]] = [*(settings.get(UNQUANTISED[method]) or []), *layers]
    return config
