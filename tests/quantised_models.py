"""Tiny models in the formats of quantised checkpoints, and the same numbers as dense ones."""

import json
import re
from pathlib import Path
from typing import Any

import tiny
from quantised_packing import WAYS, Tensors
from safetensors.torch import save_file


def save(path: Path, config: dict[str, Any], tensors: Tensors) -> Path:
    """Every second tensor in one file and the rest in another, so that weights and scales are apart."""
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    for shard in range(2):
        held = {name: tensors[name].contiguous() for name in sorted(tensors)[shard::2]}
        save_file(held, path / f"model-{shard}.safetensors", metadata={"format": "pt"})
    weight_map = {name: f"model-{place % 2}.safetensors" for place, name in enumerate(sorted(tensors))}
    (path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return path


def quantise_model(path: Path, way: str) -> tuple[Path, Path]:
    """A tiny model quantised, and the same numbers as a dense model."""
    quantise, quantization = WAYS[way]
    model = tiny.reference("llama", num_hidden_layers=2)
    stored: Tensors = {}
    dense: Tensors = {}
    for name, tensor in model.state_dict().items():
        if re.search(r"_proj\.weight$", name):
            parts, dense[name] = quantise(tensor)
            stored |= {name.removesuffix(".weight") + part.removeprefix("x"): parts[part] for part in parts}
        else:
            stored[name] = dense[name] = tensor
    config = {**model.config.to_dict(), "architectures": ["LlamaForCausalLM"], "dtype": "float32"}
    quantised = save(path / "quantised", {**config, "quantization_config": quantization}, stored)
    return quantised, save(path / "dense", config, dense)
