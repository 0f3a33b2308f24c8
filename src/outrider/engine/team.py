"""The ranks of one engine: how they find each other, what carries their tensors and their orders, and how they agree.
Ranks talk to this machine alone, or to the addresses they were given, and to nobody who does not know their secret."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from outrider.config import EngineConfig
from outrider.engine.channel import Channel
from outrider.kernels.collective import Ranks

FOREVER = timedelta(days=365)  # a rank may have nothing to do for long; that another has ended is noticed otherwise
REPORT_BYTES = 2048
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Team:
    """As one rank sees it."""

    ranks: Ranks
    channel: Channel
    check: Callable[[], None] = lambda: None  # an error, where another rank has ended

    @property
    def is_first(self) -> bool:
        return self.ranks.rank == 0

    def reports(self, report: Any) -> list[Any]:
        """What every rank has to say, as JSON of no more than REPORT_BYTES."""
        text = json.dumps(report).encode()
        assert len(text) <= REPORT_BYTES, text
        row = torch.zeros(REPORT_BYTES, dtype=torch.uint8)
        row[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        rows = self.channel.ranks.gather(row)
        return [json.loads(bytes(each.tolist()).rstrip(b"\0")) for each in rows]

    def agree(self, numbers: list[int] | BaseException) -> list[list[int]]:
        """Everybody's numbers; or, where another rank has failed, a ValueError with what it said."""
        failed = isinstance(numbers, BaseException)
        said = {"error": f"{type(numbers).__name__}: {numbers}"[:400]} if failed else {"numbers": numbers}
        found = self.reports(said)
        if not failed:
            for rank, each in enumerate(found):
                if "error" in each:
                    raise TeamError(f"rank {rank} of {len(found)} could not do its part: {each['error']}")
        return [each.get("numbers", []) for each in found]

    def fail(self, error: Exception) -> None:
        """Says so to the others, unless it is them who have said so, or who have ended."""
        if not isinstance(error, TeamError | RuntimeError):
            self.agree(error)


class TeamError(ValueError):
    """Another rank could not do its part."""


def device_for(config: EngineConfig, rank: int, size: int) -> tuple[str, bool]:
    """The device of a rank; and whether every rank has one of its own."""
    device = config.torch_device
    if device.type != "cuda":
        return "cpu", True
    if torch.cuda.device_count() >= size:
        return f"cuda:{rank}", True
    return str(device), False


def join(store: dist.Store, rank: int, size: int, secret: str, device: str, *, own_devices: bool) -> Team:
    """Waits for all ranks. Tensors of GPUs travel by NCCL where every rank has its own, else through the host."""
    control = Ranks(rank, size, _gloo(store, "control", rank, size))
    _check_secret(control, secret)
    if not device.startswith("cuda"):
        ranks = Ranks(rank, size, _gloo(store, "tensors", rank, size))
    elif own_devices:
        torch.cuda.set_device(device)
        group: Any = dist.ProcessGroupNCCL(
            dist.PrefixStore("tensors", store), rank, size, dist.ProcessGroupNCCL.Options()
        )
        ranks = Ranks(rank, size, group)
    else:
        ranks = Ranks(rank, size, _gloo(store, "tensors", rank, size), through_host=True)
    return Team(ranks, Channel(control))


def _gloo(store: dist.Store, name: str, rank: int, size: int) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    options = gloo._Options()
    address = os.environ.get("OUTRIDER_RANK_ADDRESS", LOOPBACK)
    options._devices = [gloo.create_device(hostname=address)]
    options._timeout = FOREVER
    return gloo(dist.PrefixStore(name, store), rank, size, options)


def _check_secret(ranks: Ranks, secret: str) -> None:
    own = torch.frombuffer(bytearray(hashlib.sha256(secret.encode()).digest()), dtype=torch.uint8)
    if not bool((ranks.gather(own) == own).all()):
        raise ValueError("a rank does not know the secret of the others: it belongs to another engine")
