"""From the host to the device without waiting for it: a copy that is queued behind whatever the device is doing."""

import torch
from torch import Tensor


def upload(values: Tensor, device: torch.device) -> Tensor:
    """A host tensor on the device. Its memory may be used again at once."""
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def upload_to(place: Tensor, values: Tensor) -> None:
    """A host tensor into memory of the device that is already there."""
    place.copy_(values.pin_memory() if place.is_cuda else values, non_blocking=True)
