"""Memory is accounted for before it is taken: weights and cache of target and drafter, together."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from outrider.config import EngineConfig
from outrider.drafters.base import Drafter
from outrider.engine.cache import NUM_MISSABLE, CacheShape, bytes_per_page, bytes_per_slot, bytes_per_snapshot
from outrider.layers.cached import RecurrentLayer, cached_layers, recurrent_layers
from outrider.layers.linear import Linear
from outrider.layers.moe import Experts
from outrider.models.base import Target

CACHE_SHARE = 0.5  # of the memory that is free after the weights, on a CPU that others use too
MIN_REQUESTS = 8  # the cache holds at least this many of the longest requests, memory allowing
AMPLE_SHARE, LEAST_AMPLE = 1 / 16, 32 * 2**20  # of the weights, and bytes at least: see Budget.num_ample
SNAPSHOT_SHARE = 0.25  # at most, of the room for pages, for snapshots of recurrent states
SNAPSHOTS_PER_REQUEST = 4  # of those that can run at once, memory allowing
GRAPH_BYTES = 2**30  # of a GPU: recorded rounds, kernels, the libraries' own buffers
LOGIT_COPIES = 3  # in float32, beside the logits themselves: adjusted, filtered, their noise
HIDDEN_COPIES = 8  # of the residual stream, alive at a time within a layer


@dataclass(frozen=True)
class Budget:
    """What the memory of a target and its drafter comes to."""

    weight_bytes: int  # of both
    page_bytes: int
    num_pages: int
    max_model_len: int
    state_bytes: int = 0  # of all slots: recurrent states, taps for a drafter that rests
    page_size: int = 16
    drafter_bytes: int = 0  # the drafter's part of the weights
    grows: bool = False  # the cache takes memory as it is used, on a CPU
    num_ample: int | None = None  # there: pages up to which texts that have ended keep theirs, see PagePool
    num_snapshots: int = 0  # of recurrent states, for reuse; one place more is the dump
    snapshot_bytes: int = 0  # of one

    @property
    def num_snapshot_places(self) -> int:
        return self.num_snapshots + 1 if self.num_snapshots else 0

    @property
    def cache_bytes(self) -> int:
        snapshots = self.num_snapshot_places * self.snapshot_bytes
        return self.page_bytes * self.num_pages + self.state_bytes + snapshots

    @property
    def num_tokens(self) -> int:
        """Tokens that the cache can hold, of all requests together."""
        return (self.num_pages - 1) * self.page_size

    def rows(self) -> dict[str, str]:
        """What takes memory, and how much."""
        found = {"weights": human(self.weight_bytes - self.drafter_bytes)}
        if self.drafter_bytes:
            found["drafter"] = human(self.drafter_bytes)
        size = f"up to {human(self.cache_bytes)}, taken as it is used" if self.grows else human(self.cache_bytes)
        if self.num_ample is not None and self.num_ample < self.num_pages:
            size += f", above {human(self.num_ample * self.page_bytes)} by what runs or comes again"
        kept = f", {self.num_snapshots:,} states of {human(self.snapshot_bytes)}" if self.num_snapshots else ""
        found["cache"] = f"{size} ({self.num_pages - 1:,} pages, {self.num_tokens:,} tokens{kept})"
        return found | {"context": f"{self.max_model_len:,} tokens"}

    def describe(self) -> str:
        return "; ".join(f"{name} {value}" for name, value in self.rows().items())


@dataclass(frozen=True)
class Demand:
    """What will be asked of the memory."""

    models: Sequence[nn.Module]
    tap_width: int  # of what a page keeps
    missable_width: int  # of what a slot keeps for a drafter that rests
    itemsize: int
    lookahead: int
    model_max_len: int
    hidden_size: int
    vocab_size: int

    @property
    def _recurrent(self) -> list[RecurrentLayer]:
        return [layer for model in self.models for layer in recurrent_layers(model)]

    def slot_bytes(self) -> int:
        return bytes_per_slot(self._recurrent, self.lookahead, self.missable_width * self.itemsize)

    def snapshot_bytes(self) -> int:
        return bytes_per_snapshot(self._recurrent)

    def option_bytes(self, num_slots: int) -> int:
        """What requests may ask of sampling that is as wide as the vocabulary: a bias, and on every row that may be
        judged, what a grammar allows."""
        return num_slots * self.vocab_size * 4 + num_slots * (1 + self.lookahead) * self.vocab_size // 8

    def page_bytes(self, page_size: int) -> int:
        layers = [layer for model in self.models for layer in cached_layers(model)]
        return max(bytes_per_page(layers, page_size, self.tap_width, self.itemsize), 1)  # all may be recurrent

    def working_bytes(self, num_rows: int, num_judged: int) -> int:
        """What a pass over so many rows needs beside weights and cache, if so many of them are judged: an estimate,
        from the widest layer and the logits."""
        layers = [module for model in self.models for module in model.modules() if isinstance(module, Linear)]
        widest = max((layer.weight.shape[0] for layer in layers), default=0)
        activations = num_rows * (HIDDEN_COPIES * self.hidden_size + 2 * widest) * self.itemsize
        activations += self._widened_bytes()
        return activations + num_judged * self.vocab_size * (self.itemsize + 4 * LOGIT_COPIES)

    def _widened_bytes(self) -> int:
        """Experts in few bits are widened for many rows, a layer at a time."""
        layers = [module for model in self.models for module in model.modules() if isinstance(module, Experts)]
        return max((sum(p.numel() for p in layer.packed) * self.itemsize for layer in layers), default=0)


def parameter_bytes(*modules: nn.Module | None) -> int:
    """What the weights take as they are."""
    parameters = {p for module in modules if module is not None for p in module.parameters()}
    return sum(p.numel() * p.element_size() for p in parameters)


def plan_memory(config: EngineConfig, demand: Demand, weight_bytes: int, drafter_bytes: int = 0) -> Budget:
    """How many pages there will be, or a ValueError with the numbers if a request cannot fit."""
    page_bytes = demand.page_bytes(config.page_size)
    longest = config.max_model_len or demand.model_max_len
    # one slot is nobody's; each has a row of tokens and one of pages
    state_bytes = (demand.slot_bytes() + longest * 8 + longest // config.page_size * 4) * (config.max_num_seqs + 1)

    def pages(length: int) -> int:
        return -(-(length + 1 + demand.lookahead) // config.page_size)

    room = _room(config, demand, weight_bytes, state_bytes)
    needed = (1 + pages(longest)) * page_bytes
    needed = needed if config.max_model_len is not None else min(needed, room // 2)  # the model's own may be very long
    num_snapshots = _num_snapshots(config, demand, room, needed)
    snapshot_bytes = demand.snapshot_bytes() if num_snapshots else 0
    room = config.kv_cache_memory or room - (num_snapshots + 1) * snapshot_bytes
    possible = room // page_bytes - 1  # one page is the dump
    if possible < pages(longest):
        fitting = possible * config.page_size - 1 - demand.lookahead
        if config.max_model_len is not None or fitting < 2:
            raise ValueError(
                f"a request of {longest} tokens needs {human(pages(longest) * page_bytes)} of cache, and there is room "
                f"for {human(max(room, 0))}: lower max_model_len (at most {max(fitting, 0)}) or raise kv_cache_memory"
            )
        longest = fitting
    if config.kv_cache_memory is None:  # all that can run at once, and room for prefixes that may come again
        possible = min(possible, max(config.max_num_seqs, MIN_REQUESTS) * pages(longest))
    grows = config.torch_device.type == "cpu"
    ample = max(int(weight_bytes * AMPLE_SHARE), LEAST_AMPLE)
    return Budget(
        weight_bytes,
        page_bytes,
        possible + 1,
        longest,
        state_bytes,
        page_size=config.page_size,
        drafter_bytes=drafter_bytes,
        grows=grows,
        num_ample=1 + ample // page_bytes if grows and config.kv_cache_memory is None else None,
        num_snapshots=num_snapshots,
        snapshot_bytes=snapshot_bytes,
    )


def _num_snapshots(config: EngineConfig, demand: Demand, room: int, needed: int) -> int:
    """How many snapshots of recurrent states there will be: as many as were asked for, or as have a share of the room,
    and leave as much of it as is needed, or as was asked for."""
    each, asked = demand.snapshot_bytes(), config.num_snapshots
    if not config.enable_prefix_caching or not each:
        return 0
    left = room - (config.kv_cache_memory or needed)
    if asked is None:
        most = SNAPSHOTS_PER_REQUEST * max(config.max_num_seqs, MIN_REQUESTS)
        return max(min(most, min(int(room * SNAPSHOT_SHARE), left) // each - 1), 0)  # one place is the dump
    if asked and left < (asked + 1) * each:
        raise ValueError(
            f"{asked} snapshots of recurrent states need {human((asked + 1) * each)}, and beside the cache there is "
            f"room for {human(max(left, 0))}: ask for fewer (num_snapshots), or lower max_model_len or max_num_seqs"
        )
    return asked


def _room(config: EngineConfig, demand: Demand, weight_bytes: int, state_bytes: int) -> int:
    """Bytes for pages and snapshots, as the device has them; as many as were asked for at least."""
    least = config.kv_cache_memory or demand.page_bytes(config.page_size)
    if config.torch_device.type == "cpu":
        left = free_bytes() - weight_bytes - state_bytes
        room = int(left * CACHE_SHARE / config.num_ranks)
        remedy = "use a smaller model, or free memory"
    else:
        left = room = _left_on_gpu(config, demand, weight_bytes) - state_bytes
        remedy = "lower max_num_seqs or max_num_batched_tokens, or raise gpu_memory_utilization"
    if left < least:
        raise ValueError(
            f"the weights of target and drafter need {human(weight_bytes)}, states of requests {human(state_bytes)}, "
            f"the cache at least {human(least)}, and {config.torch_device} lacks {human(least - left)}: {remedy}"
        )
    return max(room, config.kv_cache_memory or 0)


def _left_on_gpu(config: EngineConfig, demand: Demand, weight_bytes: int) -> int:
    """Bytes for states and pages: of our share of the device, and of what is really free there. The weights have taken
    theirs when the modules were made."""
    device = config.torch_device
    judged = config.max_num_seqs * (1 + demand.lookahead)
    working = demand.working_bytes(max(config.max_num_batched_tokens, judged), judged) + GRAPH_BYTES
    working += demand.option_bytes(config.max_num_seqs + 1)
    free, total = torch.cuda.mem_get_info(device)
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # torch's own, unused
    num_here = 1 if torch.cuda.device_count() >= config.num_ranks else config.num_ranks  # ranks on this device
    return min(int(total * config.gpu_memory_utilization / num_here) - weight_bytes, free // num_here) - working


def free_bytes() -> int:
    """Bytes of the CPU's memory that are free."""
    try:
        with open("/proc/meminfo") as lines:
            for line in lines:
                if line.startswith("MemAvailable:"):
                    return int(line.split()[1]) * 1024
    except OSError:
        pass  # not Linux
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def human(count: int) -> str:
    """Bytes, as people read them."""
    return f"{count / 2**30:.2f} GiB" if abs(count) >= 2**30 else f"{count / 2**20:.0f} MiB"


def cache_shape(
    config: EngineConfig, target: Target, drafter: Drafter | None, budget: Budget, num_flying: int
) -> CacheShape:
    """What the budget is spent on. `num_flying`: rounds that may be under way at a time; they go on a little when a
    request has ended."""
    lookahead = drafter.lookahead if drafter is not None else 0
    return CacheShape(
        num_pages=budget.num_pages,
        page_size=config.page_size,
        num_slots=config.max_num_seqs + 1,
        max_len=budget.max_model_len + (1 + lookahead) * (1 + num_flying),
        num_taps=len(drafter.taps) if drafter is not None else 0,
        hidden_size=target.hidden_size,
        lookahead=lookahead,
        num_axes=target.num_position_axes,
        num_carried=drafter.num_carried if drafter is not None else 1,
        num_missable=NUM_MISSABLE,
        num_snapshots=budget.num_snapshot_places,
    )
