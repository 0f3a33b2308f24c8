"""Opens the sides of `outrider bench traffic`: plain and speculative, as engines of a checkpoint, as engines with
random weights, or as servers."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch

from outrider.bench.load.serve_client import Asking
from outrider.bench.load.server_process import server_process
from outrider.bench.load.traffic_sides import EngineSide, ServerSide, TrafficSide
from outrider.bench.prompts import PromptText
from outrider.bench.random_pair import random_engine, shape_of
from outrider.bench.report import PLAIN, SPECULATIVE
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine.engine import Engine
from outrider.engine.request import Request
from outrider.engine.warm_up import warm_up
from outrider.llm import LLM
from outrider.options import EngineOptions
from outrider.sampling_params import SamplingParams
from outrider.threads import threads as cpu_threads

Note = Callable[[str], None]
MAX_QUEUED = 100_000  # requests; a server that refused some would not be measured


def engine_sides(config: EngineConfig, asking: Asking, opened: ExitStack, note: Note) -> list[TrafficSide]:
    """Two engines of the same checkpoint, one without a drafter."""
    cpu_threads.fix(config.threads or torch.get_num_threads())  # the same for all sides, to the end

    def open_side(name: str, speculative: SpeculativeConfig | None) -> TrafficSide:
        begin = time.perf_counter()
        note(f"{name}: loading and warming up")
        llm = opened.enter_context(LLM.from_config(replace(config, speculative=speculative)))
        llm.warm_up()
        note(_ready(name, llm.engine, begin))

        def make(prompt: PromptText, params: SamplingParams) -> Request:
            return llm.requests_for({"prompt_token_ids": prompt.ids}, params, 0)[0]

        return EngineSide(name, llm.engine, make, asking)

    return [open_side(name, settings) for name, settings in _named(config)]


def random_sides(
    config: EngineConfig, shape: str, asking: Asking, opened: ExitStack, note: Note
) -> list[TrafficSide]:  # fmt: skip
    """Two engines with random weights of a shape. How much is drafted is decided as it is with a real drafter, but that
    its acceptance is made up."""
    cpu_threads.fix(config.threads or torch.get_num_threads())
    numbers = itertools.count()

    def make(prompt: PromptText, params: SamplingParams) -> Request:
        return Request(f"traffic-{next(numbers)}", list(prompt.ids), params, seed=params.seed or 0)

    def open_side(name: str, speculative: SpeculativeConfig | None) -> TrafficSide:
        begin = time.perf_counter()
        note(f"{name}: making weights and warming up")
        engine = random_engine(replace(config, speculative=speculative), shape_of(shape))
        opened.callback(engine.close)
        warm_up(engine)
        note(_ready(name, engine, begin))
        return EngineSide(name, engine, make, asking)

    return [open_side(name, settings) for name, settings in _named(config)]


def server_sides(
    options: EngineOptions, config: EngineConfig, asking: Asking, opened: ExitStack, note: Note
) -> list[TrafficSide]:  # fmt: skip
    """Two servers of ours, one without a drafter, each in a process of its own."""
    if config.speculative is not None and "suffix" in (config.speculative.method or ""):
        note("suffix learns from earlier requests, and a server does not forget them: after a run it knows the answers")
    directory = Path(opened.enter_context(tempfile.TemporaryDirectory()))
    sides: list[TrafficSide] = []
    for number, (name, settings) in enumerate(_named(config)):
        begin = time.perf_counter()
        note(f"{name}: starting a server")
        arguments = server_arguments(options, replace(config, speculative=settings))
        server = opened.enter_context(server_process(arguments, directory / f"server-{number}.log"))
        note(f"{name}: a server at {server.url}, ready after {time.perf_counter() - begin:.1f} s")
        sides.append(ServerSide(name, server.url, asking))
    return sides


def server_arguments(options: EngineOptions, config: EngineConfig) -> list[str]:
    """What `outrider serve` is told, so that it is the engine of `config`, which was read from `options`: with the same
    number of threads as the other side, and room for every request."""
    threads = options.threads or torch.get_num_threads()
    options = replace(options, threads=threads, max_model_len=config.max_model_len)
    if config.speculative is None:
        options = replace(options, draft=None, speculative_config=None, num_speculative_tokens=None)
        options = replace(options, no_draft=True, force=False, no_adaptive=False)
    elif config.speculative.model is None and options.speculative_config is None:
        options = replace(options, draft=config.speculative.method)  # perhaps nobody has named one
    limits = {
        "--max-num-seqs": config.max_num_seqs,
        "--max-num-batched-tokens": config.max_num_batched_tokens,
        "--max-num-queued-reqs": MAX_QUEUED,
    }
    given = [part for name, value in limits.items() for part in (name, str(value))]
    caching = "--enable-prefix-caching" if config.enable_prefix_caching else "--no-enable-prefix-caching"
    return [*options.arguments(), *given, caching]


def _named(config: EngineConfig) -> list[tuple[str, SpeculativeConfig | None]]:
    plain: list[tuple[str, SpeculativeConfig | None]] = [(PLAIN, None)]
    return plain if config.speculative is None else [*plain, (SPECULATIVE, config.speculative)]


def _ready(name: str, engine: Engine, begin: float) -> str:
    recorded = f", {engine.num_recordings} recordings" if engine.num_recordings else ""
    return f"{name}: ready after {time.perf_counter() - begin:.1f} s{recorded}"
