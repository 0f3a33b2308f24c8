"""In which type keys and values are kept: the model's own, or fewer bits where that was asked for."""

from __future__ import annotations

import torch

from outrider.config import EngineConfig
from outrider.drafters.base import Drafter
from outrider.kernels.dispatch import use_triton
from outrider.layers.cached import cached_layers
from outrider.models.base import Target


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
