"""How much of the time a GPU is busy under traffic, and with what: its kernels as a profiler sees them.

    PYTHONPATH=src python scripts/measure_busy.py --shape llama-3.1-8b --concurrency 32 128 [--draft eagle3 -k 5]

Random weights, an accept length that is made up, clients that send their next request as soon as they have an answer.
One JSON line for each number of clients: tokens a second, the share of the time in which a kernel ran (also without
the profiler's own cost: rounds are timed both ways), and the kernels that took the most."""

from __future__ import annotations

import argparse
import json
from collections import Counter
from contextlib import ExitStack

import torch
from torch.profiler import ProfilerActivity, profile

from outrider.bench.load.serve_client import Asking
from outrider.bench.load.serve_load import Load, LoadOutcome
from outrider.bench.load.traffic_opening import random_sides
from outrider.bench.load.traffic_sides import EngineSide
from outrider.bench.prompts import PromptText, random_prompts
from outrider.config import EngineConfig, SpeculativeConfig


def busy(found: profile) -> tuple[float, float, Counter[str]]:
    """Seconds in which some kernel ran, from the first to the last, and of each kernel."""
    spans, times = [], Counter[str]()
    for event in found.profiler.kineto_results.events():  # type: ignore[union-attr]
        if event.device_type() == torch.autograd.DeviceType.CUDA and event.duration_ns() > 0:
            begin = event.start_ns()
            spans.append((begin, begin + event.duration_ns()))
            times[event.name()] += event.duration_ns()
    spans.sort()
    total, end = 0, spans[0][0]
    for begin, finish in spans:
        total += max(finish - max(begin, end), 0)
        end = max(end, finish)
    return total / 1e9, (end - spans[0][0]) / 1e9, times


def rate(outcome: LoadOutcome) -> float:
    return sum(answer.num_tokens or 0 for answer in outcome.answers) / outcome.seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", default="llama-3.1-8b")
    parser.add_argument("--draft")
    parser.add_argument("-k", type=int, default=5)
    parser.add_argument("--accept-length", type=float, default=3.0)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[32])
    parser.add_argument("--prompt-len", type=int, default=512)
    parser.add_argument("--answer-len", type=int, default=128)
    parser.add_argument("--requests", type=int, default=3, help="of each client")
    parser.add_argument("--top", type=int, default=12, help="kernels to name")
    given = parser.parse_args()
    speculative = SpeculativeConfig(
        method=given.draft or "ngram",
        num_speculative_tokens=given.k,
        synthetic_acceptance_length=given.accept_length if given.draft else None,
    )
    config = EngineConfig(
        given.shape,
        speculative,
        max_num_seqs=max(given.concurrency),
        max_model_len=given.prompt_len + given.answer_len + 64,
        watchdog=None,
    )
    asking = Asking("", False, given.answer_len, 0.0, 0, ignore_eos=True)
    with ExitStack() as opened:
        sides = random_sides(config, given.shape, asking, opened, print)
        side = sides[1 if given.draft else 0]
        assert isinstance(side, EngineSide)
        for clients in given.concurrency:
            count = given.requests * clients
            ids = random_prompts(side.engine.target.vocab_size, 2 * count)
            prompts = [PromptText(ids=(each.ids * given.prompt_len)[: given.prompt_len]) for each in ids]
            plain = side.run(prompts[:count], Load(count, 0, clients, None, 0))
            with profile(activities=[ProfilerActivity.CUDA]) as found:
                profiled = side.run(prompts[count:], Load(count, 0, clients, None, 0))
                torch.cuda.synchronize()
            worked, lasted, times = busy(found)
            line = {
                "clients": clients,
                "tokens_per_second": round(rate(plain), 1),
                "profiled": round(rate(profiled), 1),
                "busy": round(worked / lasted, 4),
                "busy_seconds": round(worked, 3),
                "kernels": {name[:80]: round(ns / 1e9 / worked, 4) for name, ns in times.most_common(given.top)},
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
