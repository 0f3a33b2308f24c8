"""Between host and device without waiting: copies that are queued behind whatever the device is doing."""

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


def to_host(table: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """A copy on the host, and what must happen before it is good: None where it is at once."""
    if not table.is_cuda:
        return table, None
    copy = torch.empty(table.shape, dtype=table.dtype, pin_memory=True)
    copy.copy_(table, non_blocking=True)
    landed = torch.cuda.Event()
    landed.record()
    return copy, landed
