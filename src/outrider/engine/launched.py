"""Ranks that something else has started: `torchrun --nproc-per-node 2 script.py` runs the script on all of them. On
rank 0 it goes on, and its engines have the others; the others follow, and end with it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch.distributed as dist

from outrider.config import EngineConfig, config_to_json
from outrider.engine.team import RankLostError, RankPlace, Team, device_for, join

VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")


def launched_rank() -> int | None:
    """Which of them this is; None: nothing has started it."""
    return int(os.environ["RANK"]) if all(name in os.environ for name in VARIABLES) else None


def place_of(config: EngineConfig) -> RankPlace:
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if size != config.num_ranks:
        raise ValueError(
            f"{size} processes were started, but tensor_parallel_size x pipeline_parallel_size is {config.num_ranks}"
        )
    device, own_devices = device_for(config, int(os.environ.get("LOCAL_RANK", rank)), size)
    secret = os.environ.get("OUTRIDER_SECRET", os.environ["TORCHELASTIC_RUN_ID"])
    return RankPlace(rank, size, config.pipeline_parallel_size, device, own_devices, secret)


def meet(place: RankPlace) -> Team:
    """At the address that all were given. torchrun itself keeps what is exchanged there."""
    is_kept = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, place.size, is_master=place.rank == 0 and not is_kept)
    return join(dist.PrefixStore("outrider", store), place)


class LaunchedRanks:
    """The others, as rank 0 has them: see Workers. Who started them sees to their end, and to ours with theirs."""

    def __init__(self, config: EngineConfig) -> None:
        self.sizes = (config.tensor_parallel_size, config.pipeline_parallel_size)
        self.size = config.num_ranks
        self.team = meet(place_of(config))

    def open(self, config: EngineConfig) -> None:
        self.team.channel.send({"do": "open", "config": config_to_json(config)})

    @contextmanager
    def watched(self, *harmless: type[BaseException]) -> Iterator[None]:
        try:
            yield
        except harmless:
            raise
        except RuntimeError as error:
            raise RankLostError("a rank has ended, or a step broke off: the engine cannot go on") from error

    def on_lost(self, hear: Callable[[RankLostError], None]) -> None:
        """A rank that is lost is noticed in the next step."""

    def end(self) -> None:
        with suppress(RuntimeError):  # they have ended already
            self.team.channel.send({"do": "end"})
            self.team.channel.settle()
