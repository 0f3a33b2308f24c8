"""What a recorded round consists of: its kernels as a profiler sees them, with random weights, on one GPU.

    PYTHONPATH=src python scripts/h200/round_kernels.py llama-3.1-8b:32 llama-3.1-8b:32:eagle3 gemma-3-4b:1

Each word is a shape, a batch and, if drafts are made (K = 5), a method; :int4 or :fp8 at the end: in few bits. A line
for each kernel: how often a round launches it, us of one launch, us of a round; and the round alone and profiled.
@CONTEXT at the end: tokens before it (512)."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

import torch
from common import SMOKE, attempt, free_memory, say
from lean import ACCEPT_LENGTH, CONTEXT, TINY, K, steady
from torch.profiler import ProfilerActivity, profile

from outrider.bench.random_pair import random_engine, shape_of
from outrider.config import EngineConfig, SpeculativeConfig

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from measure_busy import busy

ROUNDS, REPLAYS, MOST = (2, 2, 4) if SMOKE else (5, 20, 24)


def tell(word: str) -> None:
    form, _, length = word.partition("@")
    shape, batch, *rest = form.split(":")
    context = int(length or CONTEXT)
    few_bits = rest.pop() if rest and rest[-1] in ("int4", "fp8") else None
    speculative = SpeculativeConfig(
        method=rest[0] if rest else "eagle3",
        num_speculative_tokens=K,
        force=True,
        synthetic_acceptance_length=ACCEPT_LENGTH,
        quantization=few_bits,
    )
    config = EngineConfig(
        shape,
        speculative if rest else None,
        max_num_seqs=int(batch),
        max_num_batched_tokens=8192,
        max_model_len=context + (1 + K) * (8 * ROUNDS + 3 * REPLAYS + 16),
        quantization=few_bits,
        enable_prefix_caching=False,
    )
    engine = random_engine(config, TINY if SMOKE else shape_of(shape))
    counts: Counter[str] = Counter()
    times: Counter[str] = Counter()

    graphs = engine.graphs

    def replay(_: int) -> float | None:
        if graphs is None or SMOKE:
            say(f"{word}: nothing is recorded here, or nothing profiled")
            return None
        alone = graphs.replay_ms(REPLAYS) or 0.0
        with profile(activities=[ProfilerActivity.CUDA]) as found:
            graphs.replay_ms(REPLAYS)
        for event in found.profiler.kineto_results.events():  # type: ignore[union-attr]
            if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns() > 0:
                counts[event.name()] += 1
                times[event.name()] += event.duration_ns()
        running, whole, _ = busy(found)
        say(f"{word}: {alone:.3f} ms; profiled {1e3 * whole / REPLAYS:.3f}, a kernel runs {running / whole:.3f} of it")
        return alone

    engine.replay_ms = replay  # type: ignore[method-assign]
    try:
        steady(engine, int(batch), context, ROUNDS)
    finally:
        engine.close()
        free_memory()
    for name, nanoseconds in times.most_common(MOST):
        each, often = nanoseconds / 1e3 / counts[name], counts[name] / REPLAYS
        say(f"  {often:6.1f} x {each:7.1f} us = {often * each:8.1f}  {name[:90]}")


if __name__ == "__main__":
    for word in sys.argv[1:] or ["llama-3.1-8b:32", "llama-3.1-8b:32:eagle3"]:
        attempt(word, lambda word=word: tell(word))  # type: ignore[misc]
