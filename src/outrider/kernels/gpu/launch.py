"""Launches that may begin before the one before them has ended (programmatic dependent launch): a kernel waits only
where it needs the earlier result. Saves about a microsecond a launch."""

from functools import cache
from typing import Any

import torch
from torch import Tensor


def early(x: Tensor) -> bool:
    """Whether kernels on this tensor's device can be launched early."""
    return x.is_cuda and _is_hopper(x.device)


@cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] >= 9


def options(is_early: bool) -> dict[str, Any]:
    return {"launch_pdl": True} if is_early else {}
