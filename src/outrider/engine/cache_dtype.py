"""In which type keys and values are kept: the model's own, or fewer bits where that was asked for."""

from __future__ import annotations

from dataclasses import replace

import torch

from outrider.checkpoints.quantised import QuantisedCheckpoint
from outrider.config import EngineConfig
from outrider.drafters.base import Drafter
from outrider.kernels.dispatch import use_triton
from outrider.kernels.rope import PageScales
from outrider.layers.attention import SelfAttention
from outrider.layers.cached import cached_layers
from outrider.layers.shared_attention import SharedAttention
from outrider.models.base import Target
from outrider.types import Checkpoint


def choose_pages(config: EngineConfig, target: Target, drafter: Drafter | None) -> None:
    """Which type the keys and values of each layer are kept in. Windows are short, and stay as they are."""
    chosen: dict[Target | Drafter, str] = {target: config.kv_cache_dtype}
    if drafter is not None and config.speculative is not None:
        chosen[drafter] = config.speculative.kv_cache_dtype
    for model, name in chosen.items():
        if name == "auto":
            continue
        with torch.inference_mode():
            if not use_triton(torch.empty(0, device=config.torch_device)):
                raise ValueError("kv_cache_dtype fp8 is for GPUs, with Triton: leave it out")
        for layer in cached_layers(model):
            if not getattr(layer.spec, "window", 0):
                layer.page_dtype = torch.float8_e4m3fn


def take_scales(model: Target | Drafter, checkpoint: Checkpoint) -> None:
    """Layers whose keys and values are kept in 8 bits scale them as the checkpoint says; where it says nothing, a 1 is
    a 1."""
    if not isinstance(checkpoint, QuantisedCheckpoint):
        return
    weights = model.weights()
    for path, layer in model.named_modules():
        if isinstance(layer, SelfAttention) and layer.page_dtype is not None and f"{path}.qkv.weight" in weights:
            source = weights[f"{path}.qkv.weight"].names[0].rsplit(".", 2)[0]  # "model.layers.3.self_attn"
            found = {kind: _scale(checkpoint, source, kind) for kind in ("k", "v")}
            layer.options = replace(layer.options, scales=PageScales(found["k"], found["v"]))
    for layer in model.modules():
        if isinstance(layer, SharedAttention):
            layer.options = replace(layer.options, scales=layer.source[0].options.scales)


def _scale(checkpoint: QuantisedCheckpoint, source: str, kind: str) -> float:
    names = (f"{source}.{kind}_scale", f"{source}.attn.{kind}_scale", f"{source}.{kind}_proj.{kind}_scale")
    found = [scale for scale in map(checkpoint.page_scale, names) if scale is not None]
    return found[0] if found else 1.0
