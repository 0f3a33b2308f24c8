"""`outrider bench round`: what a round costs, with random weights and a made-up acceptance. Says nothing about text."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from outrider import __version__
from outrider.bench.interleave import memory_bandwidth
from outrider.bench.random_pair import check_method, random_engine, shape_of
from outrider.bench.random_peers import NUM_RUNS, PeerCost, check_peers, measure_peers
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine.engine import Engine
from outrider.engine.request import Request
from outrider.layers.moe import share_read
from outrider.layers.packing import read_forms
from outrider.sampling_params import SamplingParams
from outrider.threads import threads

NUM_CHUNKS = 7
WARM_UP = 8


@dataclass(frozen=True)
class RoundPlan:
    shape: str
    batch_size: int
    context: int
    num_rounds: int
    temperature: float
    config: EngineConfig
    num_speculative_tokens: int = 5
    accept_length: float = 3.0  # made up


@dataclass(frozen=True)
class Cost:
    """What a round of one side (a method, or plain decoding) costs."""

    name: str
    round_ms: list[float]  # with all that the host does
    device_ms: float | None  # of the recorded round alone, replayed back to back
    tokens_per_round: float  # of each request
    weight_bytes: int  # that a round reads
    cache_bytes: int

    @property
    def median(self) -> float:
        return statistics.median(self.round_ms)


def measure_all(plan: RoundPlan, methods: Sequence[str], against: Sequence[str], num_tokens: int) -> dict[str, Any]:
    """Plain, then with each drafter, then other engines, as a report. What is unknown is refused before."""
    for name in methods:
        check_method(name)
    check_peers(against)
    threads.fix(plan.config.threads or torch.get_num_threads())  # the same for all sides, to the end
    # room for every round that is measured, at the most that one can bring
    rounds = plan.num_rounds * NUM_CHUNKS + WARM_UP + 4
    rows = max((1 + plan.num_speculative_tokens) * rounds, num_tokens)
    plan = replace(plan, config=replace(plan.config, max_model_len=plan.context + rows))
    settings = [None, *(_settings(plan, name) for name in methods)]
    costs = []
    for each in settings:
        costs.append(measure(replace(plan, config=replace(plan.config, speculative=each))))
        _free_memory()  # of an engine that nobody knows any more
    device = plan.config.torch_device
    found = to_dict(plan, costs, memory_bandwidth(device) if device.type == "cuda" else None)
    others = _peers(plan, against, num_tokens)
    whole = whole_rate(plan, num_tokens) if others else 0.0
    found["peers"] = [_peer(cost, costs[0], whole, plan) for cost in others]
    return found


def _settings(plan: RoundPlan, method: str) -> SpeculativeConfig:
    return SpeculativeConfig(
        method=method,
        num_speculative_tokens=plan.num_speculative_tokens,
        force=True,
        synthetic_acceptance_length=plan.accept_length,
        quantization=plan.config.quantization,
        kv_cache_dtype=plan.config.kv_cache_dtype,
    )


def _peers(plan: RoundPlan, names: Sequence[str], num_tokens: int) -> list[PeerCost]:
    shape, device = shape_of(plan.shape), plan.config.torch_device
    prompts = _prompts(plan, shape["vocab_size"])
    return measure_peers(names, shape, prompts, num_tokens, device, plan.config.torch_dtype("bfloat16"))


def _peer(cost: PeerCost, plain: Cost, whole: float, plan: RoundPlan) -> dict[str, Any]:
    """Decoding is compared with decoding, and all of the work, prompts included, with all of it."""
    ours, theirs = 1e3 * plan.batch_size / plain.median, cost.steady
    return {
        "name": cost.name,
        "step_ms": None if theirs is None else round(1e3 * plan.batch_size / theirs, 4),
        "tokens_per_second": None if theirs is None else round(theirs, 1),
        "outrider_plain_tokens_per_second": round(ours, 1),
        "outrider_plain_is_times": None if theirs is None else round(ours / theirs, 3),
        "tokens_per_second_with_prompts": round(cost.whole, 1),
        "outrider_plain_tokens_per_second_with_prompts": round(whole, 1),
        "outrider_plain_with_prompts_is_times": round(whole / cost.whole, 3),
    }


def whole_rate(plan: RoundPlan, num_tokens: int) -> float:
    """Tokens a second of plain decoding from the prompts to the last token, all requests together."""
    engine = random_engine(plan.config, shape_of(plan.shape))
    rates = []
    try:
        for _ in range(NUM_RUNS + 1):  # the first one warms up
            requests = _requests(plan, engine, num_tokens)
            begin = time.perf_counter()
            for request in requests:
                engine.add(request)
            while not all(request.finished for request in requests):
                engine.step()
            rates.append(num_tokens * len(requests) / (time.perf_counter() - begin))
    finally:
        engine.close()
    return statistics.median(rates[1:])


def measure(plan: RoundPlan) -> Cost:
    engine = random_engine(plan.config, shape_of(plan.shape))
    speculative = plan.config.speculative
    try:
        requests = _requests(plan, engine)
        for request in requests:
            engine.add(request)
        while any(request.num_outputs < 2 for request in requests):
            engine.step()
        _rounds(engine, WARM_UP)
        begin, rounds = sum(r.num_outputs for r in requests), 0
        times = []
        for _ in range(NUM_CHUNKS):
            times.append(1e3 * _timed(engine, plan.num_rounds) / plan.num_rounds)
            rounds += plan.num_rounds
        tokens = (sum(r.num_outputs for r in requests) - begin) / rounds / len(requests)
        assert all(not request.finished for request in requests), "a request ended while it was measured"
        device_ms = engine.replay_ms(plan.num_rounds)
        length = statistics.fmean(len(request.tokens) for request in requests)
        rows = plan.batch_size * (1 if speculative is None else 1 + plan.num_speculative_tokens)
        return Cost(
            name="plain" if speculative is None else str(speculative.method),
            round_ms=times,
            device_ms=device_ms,
            tokens_per_round=tokens,
            weight_bytes=pass_bytes(engine, rows),
            cache_bytes=int(length * plan.batch_size * _cache_bytes_per_token(engine)),
        )
    finally:
        engine.close()


def _free_memory() -> None:
    gc.collect()
    torch.cuda.empty_cache()


def _requests(plan: RoundPlan, engine: Engine, max_tokens: int | None = None) -> list[Request]:
    params = SamplingParams(temperature=plan.temperature, max_tokens=max_tokens, ignore_eos=True)
    prompts = _prompts(plan, engine.target.vocab_size)
    return [Request(f"random-{n}", prompt, params, seed=n) for n, prompt in enumerate(prompts)]


def _prompts(plan: RoundPlan, vocabulary: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(vocabulary, (plan.context,), generator=generator).tolist() for _ in range(plan.batch_size)]


def _rounds(engine: Engine, count: int) -> None:
    for _ in range(count):
        engine.step()


def _timed(engine: Engine, count: int) -> float:
    begin = time.perf_counter()
    _rounds(engine, count)  # every step waits for the outcome of one round
    return time.perf_counter() - begin


def pass_bytes(engine: Engine, num_rows: int) -> int:
    """Weights that a round reads at least once, in the form that they have: an embedding is looked up, not read, and
    of a mixture the experts that so many rows choose."""
    modules = [engine.target] if engine.drafter is None else [engine.target, engine.drafter]
    embedding = None if engine.target.is_tied else engine.target.embed.weight
    sizes: dict[nn.Parameter, float] = {}
    for module in modules:
        sizes |= {parameter: parameter.numel() * parameter.element_size() for parameter in module.parameters()}
        sizes |= {parameter: form.num_bytes for parameter, form in read_forms(module).items()}
        for parameter, share in share_read(module, num_rows).items():
            sizes[parameter] *= share
    return int(sum(size for parameter, size in sizes.items() if parameter is not embedding))


def _cache_bytes_per_token(engine: Engine) -> int:
    itemsize = engine.target.embed.weight.element_size()
    return sum(layer.bytes_per_token(itemsize) for layer in engine.cache.layers)


def to_dict(plan: RoundPlan, costs: list[Cost], bandwidth: float | None) -> dict[str, Any]:
    plain = costs[0].median
    sides = []
    for cost in costs:
        read = cost.weight_bytes + cost.cache_bytes
        speed_up = cost.tokens_per_round / costs[0].tokens_per_round * plain / cost.median
        side: dict[str, Any] = {
            "name": cost.name,
            "round_ms": round(cost.median, 4),
            "round_ms_runs": [round(value, 4) for value in cost.round_ms],
            "device_ms": None if cost.device_ms is None else round(cost.device_ms, 4),
            "device_idle_share": None if cost.device_ms is None else round(max(1 - cost.device_ms / cost.median, 0), 4),
            "times_plain": round(cost.median / plain, 4),
            "synthetic_accept_length": round(cost.tokens_per_round, 3),
            "tokens_per_second": round(1e3 * plan.batch_size * cost.tokens_per_round / cost.median, 1),
            "speed_up": round(speed_up, 3),
            "efficiency": round(speed_up / cost.tokens_per_round, 3),
            "gigabytes": round(read / 1e9, 3),
            "terabytes_per_second": round(read / 1e9 / cost.median, 3),
        }
        if bandwidth is not None:
            side["share_of_copy_bandwidth"] = round(read / 1e6 / cost.median / bandwidth, 3)
        sides.append(side)
    config = plan.config
    return {
        "benchmark": "bench round",
        "weights": "random",
        "acceptance": "synthetic: not real text",
        "shape": plan.shape,
        "batch_size": plan.batch_size,
        "context": plan.context,
        "temperature": plan.temperature,
        "exact": config.exact,
        "quantization": config.quantization,
        "kv_cache_dtype": config.kv_cache_dtype,
        "eager": config.enforce_eager,
        "dtype": str(config.torch_dtype("bfloat16")).removeprefix("torch."),
        "device": torch.cuda.get_device_name() if config.torch_device.type == "cuda" else "cpu",
        "copy_gigabytes_per_second": None if bandwidth is None else round(bandwidth, 1),
        "sides": sides,
        "versions": {"outrider": __version__, "torch": torch.__version__},
    }


def show(console: Console, found: dict[str, Any]) -> None:
    title = f"{found['shape']}, random weights, {found['dtype']} on {found['device']}"
    table = Table(title=f"{title}, batch {found['batch_size']}, context {found['context']}")
    for name in (
        "side",
        "ms a round",
        "x plain",
        "tokens a round",
        "tokens/s",
        "efficiency",
        "TB/s",
        "of a copy",
        "idle",
    ):
        table.add_column(name, justify="left" if name == "side" else "right")
    for side in found["sides"]:
        share, idle = side.get("share_of_copy_bandwidth"), side["device_idle_share"]
        table.add_row(
            side["name"],
            f"{side['round_ms']:.3f}",
            f"{side['times_plain']:.2f}",
            f"{side['synthetic_accept_length']:.2f}",
            f"{side['tokens_per_second']:.0f}",
            f"{side['efficiency']:.2f}",
            f"{side['terabytes_per_second']:.2f}",
            "-" if share is None else f"{share:.0%}",
            "-" if idle is None else f"{idle:.0%}",
        )
    console.print(table)
    for peer in found["peers"]:
        console.print(f"{peer['name']}: {_compared(peer)}")
    if len(found["sides"]) > 1:
        console.print("Accept lengths are synthetic: they say what a round costs, not how well a drafter drafts.")


def _compared(peer: dict[str, Any]) -> str:
    whole = (
        f"prompts included {peer['tokens_per_second_with_prompts']:.0f} tokens/s, "
        f"outrider plain {peer['outrider_plain_with_prompts_is_times']:.2f} times that"
    )
    if peer["step_ms"] is None:
        return whole
    steady = f"{peer['step_ms']:.3f} ms a step, {peer['tokens_per_second']:.0f} tokens/s"
    return f"{steady}, outrider plain {peer['outrider_plain_is_times']:.2f} times that; {whole}"
