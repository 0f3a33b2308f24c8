"""Memory is accounted for before it is taken: weights and cache of target and drafter, together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from outrider.config import EngineConfig
from outrider.engine.cache import bytes_per_page, bytes_per_slot
from outrider.layers.cached import cached_layers, recurrent_layers

CACHE_SHARE = 0.5  # of the memory that is free after the weights, on a CPU that others use too
CACHE_SHARE_CUDA = 0.9
MIN_REQUESTS = 8  # the cache holds at least this many of the longest requests, memory allowing


@dataclass(frozen=True)
class Budget:
    weight_bytes: int
    page_bytes: int
    num_pages: int
    max_model_len: int
    state_bytes: int = 0  # of all slots: recurrent states, taps for a drafter that rests

    @property
    def cache_bytes(self) -> int:
        return self.page_bytes * self.num_pages + self.state_bytes

    def describe(self) -> str:
        return (
            f"weights {gib(self.weight_bytes)}, cache {gib(self.cache_bytes)} "
            f"({self.num_pages} pages), context {self.max_model_len}"
        )


@dataclass(frozen=True)
class Demand:
    """What will be asked of the memory."""

    models: Sequence[nn.Module]
    tap_width: int  # of what a page keeps
    missable_width: int  # of what a slot keeps for a drafter that rests
    itemsize: int
    lookahead: int
    model_max_len: int

    def slot_bytes(self) -> int:
        layers = [layer for model in self.models for layer in recurrent_layers(model)]
        return bytes_per_slot(layers, self.lookahead, self.missable_width * self.itemsize)

    def page_bytes(self, page_size: int) -> int:
        layers = [layer for model in self.models for layer in cached_layers(model)]
        return max(bytes_per_page(layers, page_size, self.tap_width, self.itemsize), 1)  # all may be recurrent


def parameter_bytes(*modules: nn.Module | None) -> int:
    """What the weights take. In float32 on a CPU they may be packed as well, in half their size at most."""
    parameters = {p for module in modules if module is not None for p in module.parameters()}
    total = sum(p.numel() * p.element_size() for p in parameters)
    packed = sum(p.numel() * 2 for p in parameters if p.dtype is torch.float32 and p.is_cpu and p.dim() == 2)
    return total + packed


def plan_memory(config: EngineConfig, demand: Demand, weight_bytes: int) -> Budget:
    """How many pages there will be, or a ValueError with the numbers if a request cannot fit."""
    page_bytes = demand.page_bytes(config.page_size)
    state_bytes = demand.slot_bytes() * (config.max_num_seqs + 1)  # one slot is nobody's
    free = free_bytes(config.torch_device) - state_bytes
    share = CACHE_SHARE if config.torch_device.type == "cpu" else CACHE_SHARE_CUDA
    room = int((free - weight_bytes) * share) if config.kv_cache_memory is None else config.kv_cache_memory
    if weight_bytes + (config.kv_cache_memory or page_bytes) > free:
        raise ValueError(
            f"the weights of target and drafter need {gib(weight_bytes)} and the cache at least "
            f"{gib(config.kv_cache_memory or page_bytes)}, but {gib(max(free, 0))} are free on {config.torch_device}"
            + (f" beside {gib(state_bytes)} for the states of requests: lower max_num_seqs" if state_bytes else "")
        )
    longest = config.max_model_len or demand.model_max_len

    def pages(length: int) -> int:
        return -(-(length + 1 + demand.lookahead) // config.page_size)

    possible = room // page_bytes - 1  # one page is the dump
    if possible < pages(longest):
        fitting = possible * config.page_size - 1 - demand.lookahead
        if config.max_model_len is not None or fitting < 2:
            raise ValueError(
                f"a request of {longest} tokens needs {gib(pages(longest) * page_bytes)} of cache, but there is room "
                f"for {gib(max(room, 0))}: lower max_model_len (at most {max(fitting, 0)} fit) or raise kv_cache_memory"
            )
        longest = fitting
    if config.kv_cache_memory is None:  # all that can run at once, and room for prefixes that may come again
        possible = min(possible, max(config.max_num_seqs, MIN_REQUESTS) * pages(longest))
    return Budget(weight_bytes, page_bytes, possible + 1, longest, state_bytes)


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
