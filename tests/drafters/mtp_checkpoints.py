"""Tiny targets that carry multi-token-prediction modules, as each family publishes them."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
HIDDEN = 64


def with_modules(target: Path, directory: Path, num_modules: int | None = None, seed: int = 8) -> Path:
    """A copy of a tiny target with random modules beside it, as many as its family publishes if nothing else is said.
    The target itself stays the same."""
    shutil.copytree(target, directory)
    config, tensors = json.loads((directory / "config.json").read_text()), load_file(directory / "model.safetensors")
    usual, add = ADDED[config["architectures"][0]]
    add(config, tensors, Noise(seed), num_modules or usual)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


class Noise:
    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, name: str, *shape: int, centre: float = 1.0) -> Tensor:
        noise = torch.randn(shape, generator=self.generator)
        return centre + 0.3 * noise if "norm" in name else 0.15 * noise

    def alike(self, tensors: Tensors, source: str, target: str, centre: float = 1.0) -> Tensors:
        """New tensors under the names and of the shapes of those below `source`."""
        names = [name for name in tensors if name.startswith(source)]
        assert names, source
        return {name.replace(source, target): self(name, *tensors[name].shape, centre=centre) for name in names}


def _deepseek(config: dict[str, Any], tensors: Tensors, noise: Noise, num_modules: int) -> None:
    """A module's block is one more layer, with a few tensors around it, and the target's own stored again."""
    num_layers = config["num_hidden_layers"]
    for number in range(num_layers, num_layers + num_modules):
        source = f"model.layers.{number}."
        tensors |= noise.alike(tensors, f"model.layers.{num_layers - 1}.", source)
        for name in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"{source}{name}.weight"] = noise(name, HIDDEN)
        tensors[f"{source}eh_proj.weight"] = noise("eh_proj", HIDDEN, 2 * HIDDEN)
        tensors[f"{source}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{source}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    config["num_nextn_predict_layers"] = num_modules


def _nemotron(config: dict[str, Any], tensors: Tensors, noise: Noise, num_modules: int) -> None:
    """An attention layer, then a mixture."""
    assert num_modules == 1
    for place, kind in enumerate(["full_attention", "moe"]):
        source = f"backbone.layers.{config['layers_block_type'].index(kind)}."
        tensors |= noise.alike(tensors, source, f"mtp.layers.{place}.")
    tensors["mtp.layers.0.eh_proj.weight"] = noise("eh_proj", HIDDEN, 2 * HIDDEN)
    for name in ("0.enorm", "0.hnorm", "1.final_layernorm"):
        tensors[f"mtp.layers.{name}.weight"] = noise(name, HIDDEN)
    config["num_nextn_predict_layers"] = 1


def _step(config: dict[str, Any], tensors: Tensors, noise: Noise, num_modules: int) -> None:
    """Dense blocks with sliding attention like that of layer 1; lists of the config go on for the modules."""
    text = config.get("text_config", config)
    num_layers = text["num_hidden_layers"]
    for number in range(num_layers, num_layers + num_modules):
        source = f"model.layers.{number}."
        tensors |= noise.alike(tensors, "model.layers.1.self_attn.", f"{source}self_attn.", centre=0.0)
        tensors |= noise.alike(tensors, "model.layers.0.mlp.", f"{source}mlp.")
        for name in ("input_layernorm", "post_attention_layernorm", "enorm", "hnorm", "transformer.shared_head.norm"):
            tensors[f"{source}{name}.weight"] = noise("norm", HIDDEN, centre=0.0)
        tensors[f"{source}eh_proj.weight"] = noise("eh_proj", HIDDEN, 2 * HIDDEN)
        tensors[f"{source}transformer.shared_head.output.weight"] = noise("head", tiny.VOCAB, HIDDEN)
    more: dict[str, list[Any]] = {"swiglu_limits": [0.1] * 3, "swiglu_limits_shared": [0.0, 0.25, 0.0]}
    if text is config:
        more["layer_types"] = ["sliding_attention"] * 3
        more |= {"rope_theta": [1e4, 3e4, 2e4], "partial_rotary_factors": [1.0, 0.5, 1.0]}
    else:  # transformers keeps these apart
        text["mtp_layer_types"] = ["sliding_attention"] * num_modules
        text["mtp_mlp_layer_types"] = ["dense"] * num_modules
    for key, values in more.items():
        text[key] = text[key] + values[:num_modules]
    text["num_nextn_predict_layers"] = num_modules


ADDED: dict[str, tuple[int, Callable[[dict[str, Any], Tensors, Noise, int], None]]] = {
    "DeepseekV3ForCausalLM": (1, _deepseek),
    "NemotronHForCausalLM": (1, _nemotron),
    "Step3p5ForCausalLM": (3, _step),
    "Step3p7ForConditionalGeneration": (3, _step),
}
