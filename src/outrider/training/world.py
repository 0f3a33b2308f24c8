"""The processes of a run: one, or as many as torchrun has started, each on a device of its own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed

from outrider.training.options import TrainOptions
from outrider.training.trainer import World


@contextmanager
def joined(options: TrainOptions) -> Iterator[tuple[TrainOptions, World]]:
    """torchrun says who a process is in its environment."""
    size, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if size == 1:
        yield options, World()
        return
    cuda = options.torch_device.type == "cuda"
    if cuda:
        options = replace(options, device=f"cuda:{os.environ.get('LOCAL_RANK', '0')}")
        torch.cuda.set_device(options.torch_device)
    patience = timedelta(hours=12)  # the others wait while the first one generates
    torch.distributed.init_process_group("nccl" if cuda else "gloo", timeout=patience)
    try:
        yield options, World(rank, size)
    finally:
        torch.distributed.destroy_process_group()
