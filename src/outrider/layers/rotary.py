"""Rotary position tables, computed from the positions of a batch: no table to outgrow, whatever a config says."""

import math
from typing import Any

import torch
from torch import Tensor

from outrider.kernels.rope import tables
from outrider.types import Batch


class Rotary:
    """cos and sin for the rows of a batch; shared by all layers that use the same frequencies."""

    def __init__(self, inv_freq: Tensor, scaling: float = 1.0, axes: Tensor | None = None) -> None:
        self.inv_freq = inv_freq  # [R / 2]
        self.scaling = scaling
        self.axes = axes  # [R / 2] whose position each frequency turns with, where there are three: time, height, width

    @classmethod
    def none(cls) -> "Rotary":
        """The rotary tables of attention that knows no positions: nothing is turned."""
        return cls(torch.empty(0))

    @classmethod
    def from_config(cls, config: dict[str, Any], head_dim: int) -> "Rotary":
        """Reads `rope_parameters`, or `rope_theta` with `rope_scaling`, as Hugging Face configs spell them."""
        rope = config.get("rope_parameters") or {}
        scaling = {**(config.get("rope_scaling") or {}), **rope}
        theta = scaling.get("rope_theta", config.get("rope_theta", 10000.0))
        kind = scaling.get("rope_type", scaling.get("type", "default"))
        part = scaling.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
        dim = head_dim if kind == "proportional" else int(head_dim * part)
        if kind not in _KINDS:
            raise ValueError(f"config.json: rope_type {kind!r} is not supported; known: {', '.join(sorted(_KINDS))}")
        if not isinstance(theta, int | float):
            raise ValueError(f"config.json: rope_theta must be one number for this architecture, not {theta!r}")
        inv_freq = 1.0 / theta ** (torch.arange(0, dim, 2, dtype=torch.float64) / dim)
        missing = [key for key in _NEEDS.get(kind, ()) if key not in scaling]
        if missing:
            raise ValueError(f"rope_scaling of type {kind!r} lacks {', '.join(missing)} in config.json")
        settings = {"max_position_embeddings": config.get("max_position_embeddings", 2048), **scaling, "theta": theta}
        inv_freq, factor = _KINDS[kind](inv_freq, settings)
        return cls(inv_freq.float(), factor, _axes(scaling, len(inv_freq)))

    def __call__(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """cos and sin [T, R / 2] of the batch's positions, computed once a pass."""
        key = id(self)
        if key not in batch.memo:
            if self.inv_freq.device != batch.positions.device:
                self.inv_freq = self.inv_freq.to(batch.positions.device)
            batch.memo[key] = tables(self._positions(batch.positions), self.inv_freq, self.scaling)
        return batch.memo[key]

    def _positions(self, positions: Tensor) -> Tensor:
        """[T] or [3, T] -> [T, 1], or [T, R / 2] where each frequency has its own."""
        if positions.dim() == 1:
            return positions[:, None]
        if self.axes is None:
            return positions[0][:, None]  # knows time only
        return positions[self.axes.to(positions.device)].T.contiguous()


def _axes(settings: dict[str, Any], num_frequencies: int) -> Tensor | None:
    """M-RoPE: three sections, side by side (Qwen2-VL) or taking turns (Qwen3-VL)."""
    sections = settings.get("mrope_section")
    if sections is None:
        return None
    if len(sections) != 3 or sum(sections) != num_frequencies:
        raise ValueError(f"mrope_section {sections} must be three numbers that make {num_frequencies}")
    if not settings.get("mrope_interleaved", False):
        return torch.repeat_interleave(torch.arange(3), torch.tensor(sections))
    axes = torch.zeros(num_frequencies, dtype=torch.long)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


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


def _proportional(inv_freq: Tensor, settings: dict[str, Any]) -> tuple[Tensor, float]:
    """Only the first part of the frequencies turns; pairs still span the whole head."""
    turning = int(settings.get("partial_rotary_factor", 1.0) * len(inv_freq))
    return torch.where(torch.arange(len(inv_freq)) < turning, inv_freq / settings.get("factor", 1.0), 0.0), 1.0


_KINDS = {
    "default": _default,
    "mrope": _default,  # the old name of "default" with sections
    "linear": _linear,
    "llama3": _llama3,
    "llama3_factors": _factors,
    "yarn": _yarn,
    "proportional": _proportional,
}
_NEEDS = {
    "linear": ("factor",),
    "yarn": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "llama3_factors": ("factors",),
}
