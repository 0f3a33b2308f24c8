"""Rotary position tables, computed from the positions of a batch: no table to outgrow, whatever a config says."""

import math
from typing import Any

import torch
from torch import Tensor

from outrider.types import Batch


class Rotary:
    """cos and sin for the rows of a batch; shared by all layers that use the same frequencies."""

    def __init__(self, inv_freq: Tensor, scaling: float = 1.0) -> None:
        self.inv_freq = inv_freq  # [R / 2]
        self.scaling = scaling

    @classmethod
    def from_config(cls, config: dict[str, Any], head_dim: int) -> "Rotary":
        """Reads `rope_parameters`, or `rope_theta` with `rope_scaling`, as Hugging Face configs spell them."""
        rope = config.get("rope_parameters") or {}
        scaling = {**(config.get("rope_scaling") or {}), **rope}
        theta = scaling.get("rope_theta", config.get("rope_theta", 10000.0))
        dim = int(head_dim * scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)))
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        if kind not in _KINDS:
            raise ValueError(f"rope type {kind!r} is not supported; known: {', '.join(sorted(_KINDS))}")
        inv_freq = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        missing = [key for key in _NEEDS.get(kind, ()) if key not in scaling]
        if missing:
            raise ValueError(f"rope_scaling of type {kind!r} lacks {', '.join(missing)} in config.json")
        settings = {"max_position_embeddings": config.get("max_position_embeddings", 2048), **scaling, "theta": theta}
        inv_freq, factor = _KINDS[kind](inv_freq, settings)
        return cls(inv_freq.float(), factor)

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """cos and sin [T, R / 2] of the batch's positions, computed once a pass."""
        key = id(self)
        if key not in batch.memo:
            if self.inv_freq.device != batch.positions.device:
                self.inv_freq = self.inv_freq.to(batch.positions.device)
            angles = batch.positions.float()[:, None] * self.inv_freq
            batch.memo[key] = (angles.cos() * self.scaling, angles.sin() * self.scaling)
        return batch.memo[key]


def _default(inv_freq: Tensor, settings: dict[str, Any]) -> tuple[Tensor, float]:
    return inv_freq, 1.0


def _linear(inv_freq: Tensor, settings: dict[str, Any]) -> tuple[Tensor, float]:
    return inv_freq / settings["factor"], 1.0


def _llama3(inv_freq: Tensor, settings: dict[str, Any]) -> tuple[Tensor, float]:
    """Long wavelengths are slowed by `factor`, short ones kept, those between blended."""
    low, high, factor = settings["low_freq_factor"], settings["high_freq_factor"], settings["factor"]
    turns = settings["original_max_position_embeddings"] * inv_freq / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return inv_freq * keep + inv_freq / factor * (1 - keep), 1.0


def _factors(inv_freq: Tensor, settings: dict[str, Any]) -> tuple[Tensor, float]:
    """A divisor per frequency, as a GGUF file stores llama3 scaling."""
    return inv_freq / torch.tensor(settings["factors"], dtype=inv_freq.dtype), 1.0


def _yarn(inv_freq: Tensor, settings: dict[str, Any]) -> tuple[Tensor, float]:
    factor, dim = settings["factor"], 2 * len(inv_freq)
    original = settings.get("original_max_position_embeddings") or settings["max_position_embeddings"]

    def dimension(turns: float) -> float:
        return dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(settings["theta"]))

    low, high = dimension(settings.get("beta_fast") or 32.0), dimension(settings.get("beta_slow") or 1.0)
    if settings.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    slow = ((torch.arange(dim // 2, dtype=inv_freq.dtype) - low) / max(high - low, 0.001)).clamp(0, 1)
    return inv_freq * (1 - slow) + inv_freq / factor * slow, _yarn_attention(settings)


def _yarn_attention(settings: dict[str, Any]) -> float:
    """The factor on cos and sin (so, squared, on the attention scores)."""

    def magnitude(weight: float) -> float:
        return 0.1 * weight * math.log(settings["factor"]) + 1.0 if settings["factor"] > 1 else 1.0

    if settings.get("attention_factor") is not None:
        return float(settings["attention_factor"])
    if settings.get("mscale") and settings.get("mscale_all_dim"):
        return magnitude(settings["mscale"]) / magnitude(settings["mscale_all_dim"])
    return magnitude(1.0)


_KINDS = {"default": _default, "linear": _linear, "llama3": _llama3, "llama3_factors": _factors, "yarn": _yarn}
_NEEDS = {
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "llama3_factors": ("factors",),
}
