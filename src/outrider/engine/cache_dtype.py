"""In which type keys and values are kept: the model's own, or fewer bits where that was asked for, or where the model
is computed in fewer bits too."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import torch

from outrider.checkpoints.quantised import QuantisedCheckpoint
from outrider.config import DTYPES, EngineConfig
from outrider.drafters.base import Drafter
from outrider.kernels.dispatch import use_triton
from outrider.kernels.rope import PageScales
from outrider.layers.attention import SelfAttention
from outrider.layers.cached import cached_layers
from outrider.layers.shared_attention import SharedAttention
from outrider.models.base import Target
from outrider.types import Checkpoint


def choose_pages(
    config: EngineConfig, target: Target, drafter: Drafter | None, in_few_bits: Collection[Target | Drafter] = ()
) -> None:
    """Which type the keys and values of each layer are kept in. `in_few_bits`: models whose matrices are multiplied in
    whole numbers, on a CPU; where nothing was asked for, their keys and values are float16, as other engines keep those
    of such files."""
    with torch.inference_mode():
        on_gpu = use_triton(torch.empty(0, device=config.torch_device))
    asked: dict[Target | Drafter, str] = {target: config.kv_cache_dtype}
    if drafter is not None and config.speculative is not None:
        asked[drafter] = config.speculative.kv_cache_dtype
    own = next(target.parameters()).dtype
    for model, name in asked.items():
        if name == "auto" and model in in_few_bits and not on_gpu:
            name = "float16"
        chosen = _page_dtype(name, own, on_gpu)
        for layer in cached_layers(model):  # windows are short, and are not kept in 8 bits
            has_window = getattr(layer.spec, "window", 0) > 0
            layer.page_dtype = None if name == "fp8" and has_window else chosen


def _page_dtype(name: str, own: torch.dtype, on_gpu: bool) -> torch.dtype | None:
    """`own`: what the model is computed in. None: the same."""
    if name == "fp8" and not on_gpu:
        raise ValueError("kv_cache_dtype fp8 is for GPUs, with Triton: leave it out, or ask for float16")
    dtype = torch.float8_e4m3fn if name == "fp8" else DTYPES.get(name, own)
    if dtype is own:
        return None
    if name != "fp8" and (on_gpu or dtype is not torch.float16):
        where, few = ("a GPU", "fp8") if on_gpu else ("a CPU", "float16")
        raise ValueError(
            f"kv_cache_dtype {name}: on {where}, keys and values of this model are {str(own).removeprefix('torch.')}, "
            f"as it is computed, or {few}: leave it out, or choose one of these"
        )
    return dtype


def take_scales(model: Target | Drafter, checkpoint: Checkpoint) -> None:
    """Layers whose keys and values are kept in 8 bits scale them as the checkpoint says; where it says nothing, a 1 is
    a 1."""
    if not isinstance(checkpoint, QuantisedCheckpoint):
        return
    weights = model.weights()
    for path, layer in model.named_modules():
        in_8_bits = isinstance(layer, SelfAttention) and layer.page_dtype is torch.float8_e4m3fn
        if in_8_bits and f"{path}.qkv.weight" in weights:
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
