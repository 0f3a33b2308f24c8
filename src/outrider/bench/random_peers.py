"""transformers with the same shape and random weights, for `bench round`."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outrider.bench.interleave import tokens_per_second
from outrider.bench.peer_transformers import Compiled, Continuous, Transformers
from outrider.bench.peers import import_peer
from outrider.bench.sides import Prompts, Timing

NUM_RUNS = 3
PEERS: dict[str, type[Transformers]] = {peer.name: peer for peer in (Transformers, Compiled, Continuous)}


@dataclass(frozen=True)
class PeerCost:
    name: str
    timings: list[Timing]

    @property
    def whole(self) -> float:
        """Tokens a second of all requests together, from the prompts to the last token."""
        return statistics.median(tokens_per_second([timing]) for timing in self.timings)

    @property
    def steady(self) -> float | None:
        """Tokens a second while all requests decode."""
        rates = [timing.steady for timing in self.timings if timing.steady is not None]
        return statistics.median(rates) if rates else None


def check_peers(names: Sequence[str]) -> None:
    """Raises ValueError where a peer is not known."""
    unknown = sorted(set(names) - set(PEERS))
    if unknown:
        raise ValueError(f"--against does not know {', '.join(unknown)}; it takes {', '.join(PEERS)}")


def measure_peers(
    names: Sequence[str],
    shape: dict[str, Any],
    prompts: Prompts,
    num_tokens: int,
    device: torch.device,
    dtype: torch.dtype,
) -> list[PeerCost]:
    check_peers(names)
    if not names:
        return []
    library = import_peer("transformers", "transformers")
    config = library.AutoConfig.for_model(_family(shape), **shape)
    with torch.device(device):
        model = library.AutoModelForCausalLM.from_config(config, dtype=dtype)
    max_len = max(map(len, prompts)) + num_tokens
    costs = []
    for name in names:
        peer = PEERS[name](library, model, max_len)
        timings = [peer.answer(prompts, num_tokens) for _ in range(NUM_RUNS + 1)]
        costs.append(PeerCost(name, timings[1:]))  # the first one warms up
        peer.close()
    del model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return costs


def _family(shape: dict[str, Any]) -> str:
    return str(shape.get("model_type") or shape["architectures"][0].removesuffix("ForCausalLM").lower())
