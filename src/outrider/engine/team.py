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
    """The ranks of one engine, as one of them sees them."""

    world: Ranks
    channel: Channel
    ranks: Ranks | None  # of its own stage, which share every layer; None: it has no others
    num_stages: int = 1
    back: Ranks | None = None  # all of them, where there are stages: for what the last one tells the others
    check: Callable[[], None] = lambda: None  # an error, where another rank has ended

    @property
    def is_first(self) -> bool:
        return self.world.rank == 0

    @property
    def stage(self) -> int:
        return self.world.rank // (self.world.size // self.num_stages)

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


class RankLostError(RuntimeError):
    """A rank has ended, and with it the engine."""


class TeamError(ValueError):
    """Another rank could not do its part."""


def device_for(config: EngineConfig, rank: int, size: int) -> tuple[str, bool]:
    """The device of a rank; and whether every rank has one of its own."""
    device = config.torch_device
    if device.type != "cuda":
        return "cpu", True
    if torch.cuda.device_count() >= size:
        return f"cuda:{rank}", True
    return f"cuda:{device.index or 0}", False


@dataclass(frozen=True)
class RankPlace:
    """Where a rank stands, as it is told when it starts."""

    rank: int
    size: int
    num_stages: int
    device: str
    own_devices: bool  # every rank has one of its own
    secret: str


def join(store: dist.Store, place: RankPlace) -> Team:
    """Waits for all ranks. Tensors of GPUs travel by NCCL where every rank has its own, else through the host."""
    rank, size, in_stage = place.rank, place.size, place.size // place.num_stages
    control = Ranks(rank, size, _gloo(store, "control", rank, size))
    _check_secret(control, place.secret)
    if place.device.startswith("cuda"):
        torch.cuda.set_device(place.device)
    world = _tensors(store, "world", rank, size, place)
    stage = rank // in_stage
    if place.num_stages == 1:
        return Team(world, Channel(control), world)
    ranks = _tensors(store, f"stage-{stage}", rank % in_stage, in_stage, place) if in_stage > 1 else None
    # of its own: on a GPU, what goes one way and what comes back would otherwise wait for each other
    back = _tensors(store, "back", rank, size, place)
    return Team(world, Channel(control), ranks, place.num_stages, back)


def _tensors(store: dist.Store, name: str, rank: int, size: int, place: RankPlace) -> Ranks:
    if not place.device.startswith("cuda"):
        return Ranks(rank, size, _gloo(store, name, rank, size))
    if not place.own_devices:
        return Ranks(rank, size, _gloo(store, name, rank, size), through_host=True)
    nccl: Any = dist.ProcessGroupNCCL
    return Ranks(rank, size, nccl(dist.PrefixStore(name, store), rank, size, nccl.Options()))


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
