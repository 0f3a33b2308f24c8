"""transformers with the same shape and random weights, for `bench round`: eager, compiled, and continuous batching."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

NUM_SHORT, NUM_LONG = 16, 80  # tokens of two answers: their difference in time is decoding alone
NUM_RUNS = 3

Model = Any  # transformers' own classes carry no types


@dataclass(frozen=True)
class PeerCost:
    name: str
    step_ms: list[float] | None  # between two tokens of a request
    tokens_per_second: float  # of all requests together


def eager(model: Model, prompts: Sequence[list[int]]) -> PeerCost:
    return _generated("transformers", model, prompts, {})


def compiled(model: Model, prompts: Sequence[list[int]]) -> PeerCost:
    """A cache of fixed size lets transformers compile and record the forward pass."""
    return _generated("transformers-compiled", model, prompts, {"cache_implementation": "static"})


def continuous(model: Model, prompts: Sequence[list[int]]) -> PeerCost:
    """Continuous batching: only the total can be seen, prompts included."""
    settings = _settings(model, NUM_LONG, {})
    rates = []
    for number in range(NUM_RUNS + 1):
        begin = time.perf_counter()
        outputs = model.generate_batch(inputs=[list(ids) for ids in prompts], generation_config=settings)
        seconds = time.perf_counter() - begin
        made = sum(len(output.generated_tokens) for output in outputs.values())
        if number:  # the first one warms up
            rates.append(made / seconds)
    return PeerCost("transformers-continuous", None, sorted(rates)[len(rates) // 2])


PEERS: dict[str, Callable[[Model, Sequence[list[int]]], PeerCost]] = {
    "transformers": eager,
    "transformers-compiled": compiled,
    "transformers-continuous": continuous,
}


def measure_peers(
    names: Sequence[str], shape: dict[str, Any], prompts: Sequence[list[int]], device: torch.device, dtype: torch.dtype
) -> list[PeerCost]:
    unknown = sorted(set(names) - set(PEERS))
    if unknown:
        raise ValueError(f"--against does not know {', '.join(unknown)}; it takes {', '.join(PEERS)}")
    if not names:
        return []
    try:
        import transformers
    except ModuleNotFoundError as error:
        raise ValueError("--against transformers needs it installed: pip install transformers") from error
    config = transformers.AutoConfig.for_model(_family(shape), **shape)
    with torch.device(device), torch.no_grad():
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
        costs = [PEERS[name](model, prompts) for name in names]
    del model
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return costs


def _family(shape: dict[str, Any]) -> str:
    return str(shape.get("model_type") or shape["architectures"][0].removesuffix("ForCausalLM").lower())


def _settings(model: Model, count: int, extra: dict[str, Any]) -> Any:
    settings = model.generation_config
    settings.update(max_new_tokens=count, min_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0)
    settings.update(**extra)
    return settings


def _generated(name: str, model: Model, prompts: Sequence[list[int]], extra: dict[str, Any]) -> PeerCost:
    ids = torch.tensor(list(prompts), device=model.device)
    mask = torch.ones_like(ids)

    def seconds(count: int) -> float:
        begin = time.perf_counter()
        made = model.generate(ids, attention_mask=mask, generation_config=_settings(model, count, extra))
        int(made[0, -1])  # waits for the device
        return time.perf_counter() - begin

    for _ in range(2):
        seconds(NUM_SHORT)
        seconds(NUM_LONG)
    steps = [1e3 * (seconds(NUM_LONG) - seconds(NUM_SHORT)) / (NUM_LONG - NUM_SHORT) for _ in range(NUM_RUNS)]
    return PeerCost(name, steps, 1e3 * len(prompts) / sorted(steps)[len(steps) // 2])
