"""Kernels that only Hopper (H100, H200) runs, written in Gluon: asked for by name, so that nothing else needs a Triton
that knows it."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch


@functools.cache
def on_hopper(name: str, device: torch.device) -> Any:
    """A module of this package, if that is such a device, and Triton has what it is written in (3.6 has)."""
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return None
    try:
        return importlib.import_module(f"outrider.kernels.gpu.{name}")
    except ImportError:
        return None


@functools.cache
def num_processors(device: torch.device) -> int:
    """Multiprocessors of it."""
    return torch.cuda.get_device_properties(device).multi_processor_count
