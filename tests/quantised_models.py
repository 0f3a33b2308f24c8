"""Tiny models in the formats of quantised checkpoints, and the same numbers as dense ones."""

import json
import re
from pathlib import Path
from typing import Any

import tiny
import torch
from quantised_packing import WAYS, Tensors, random_numbers
from safetensors.torch import load_file, save_file
from transformers import GptOssConfig, GptOssForCausalLM


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


def quantise_model(path: Path, way: str, family: str = "llama", **sizes: Any) -> tuple[Path, Path]:
    """A tiny model quantised, and the same numbers as a dense model. Of a mixture every expert has tensors of its own,
    as it is published."""
    model = tiny.reference(family, num_hidden_layers=2, **sizes)
    model.save_pretrained(path / "published")
    config = {**model.config.to_dict(), "architectures": [type(model).__name__], "dtype": "float32"}
    return quantise_tensors(path, way, config, load_file(path / "published" / "model.safetensors"))


def quantise_tensors(path: Path, way: str, config: dict[str, Any], tensors: Tensors) -> tuple[Path, Path]:
    """Likewise of a model's config.json and its tensors."""
    quantise, quantization = WAYS[way]
    stored: Tensors = {}
    dense: Tensors = {}
    for name, tensor in tensors.items():
        if re.search(r"_proj\.weight$", name):
            parts, dense[name] = quantise(tensor)
            stored |= {name.removesuffix(".weight") + part.removeprefix("x"): parts[part] for part in parts}
        else:
            stored[name] = dense[name] = tensor
    quantised = save(path / "quantised", {**config, "quantization_config": quantization}, stored)
    return quantised, save(path / "dense", config, dense)


def mxfp4_model(path: Path, **settings: Any) -> tuple[Path, dict[str, Any], dict[str, tuple[int, ...]]]:
    """A gpt-oss as it is published, its config without what says that it is quantised, and what shapes it has dense."""
    sizes = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    config = GptOssConfig(**sizes, **heads, num_local_experts=3, num_experts_per_tok=2, **settings)
    model = GptOssForCausalLM(config)
    tiny.randomise(model)
    stored = model.state_dict()
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in stored if re.search(r"experts\.(gate_up|down)_proj$", name)]:
        num_experts, num_inputs, num_outputs = stored.pop(name).shape
        grid = (num_experts, num_outputs, num_inputs // 32)
        stored[f"{name}_blocks"] = random_numbers(generator, 8, *grid, 16).to(torch.uint8)
        stored[f"{name}_scales"] = torch.randint(118, 126, grid, generator=generator).to(torch.uint8)
    dense = {**config.to_dict(), "architectures": ["GptOssForCausalLM"], "dtype": "float32"}
    return save(path, {**dense, "quantization_config": {"quant_method": "mxfp4"}}, stored), dense, shapes
