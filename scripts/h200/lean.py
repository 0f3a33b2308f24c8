"""What is claimed of steps and rounds in 16, 8 and 4 bits, family by family: see lean.sh.

    PYTHONPATH=src python scripts/h200/lean.py [GROUP...]

Every group is a process. First all of them run at the same time, with eight layers, so that every kernel is compiled
and every module imported; beside them runs what needs no clock (certify, accept lengths). Then they are timed, one
after the other, with all of their layers."""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, Queue
from subprocess import PIPE
from threading import Thread
from typing import Any

import torch
from accept import accept
from common import SMOKE, TINY, attempt, free_memory, say, verdict

from outrider import SamplingParams
from outrider.bench.random_pair import random_engine, shape_of
from outrider.bench.round import pass_bytes
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine.engine import Engine
from outrider.engine.request import Request

K, ACCEPT_LENGTH = 5, 3.0
NUM_CHUNKS, WARM_UP, NUM_ROUNDS = (3, 2, 3) if SMOKE else (7, 8, 30)
SHORT, CONTEXT, LONG = (4, 16, 64) if SMOKE else (16, 512, 32_000)
SHORT_ROUNDS = 4  # at a time, so that a short context stays short
MANY = (2, 4) if SMOKE else (16, 64)
FEW_LAYERS = 8
TERABYTES = 4.25  # a second, of a copy
COMPILE_SECONDS = 150  # what is not compiled by then is compiled while it is timed, and warmed up
READY, GO = "ready", "go"


@dataclass(frozen=True)
class Group:
    shape: str
    quantization: str | None = None
    step_ms: float | None = None  # wanted, as are the next two
    times_plain: float | None = None
    round_ms: float | None = None
    drafters: Sequence[str] = ()  # once more with the drafter in so many bits
    rows: bool = False  # many rows beside one
    pages: bool = False  # long contexts, pages in 16 and 8 bits


GROUPS = {
    "llama": Group("llama-3.1-8b", step_ms=4.25),
    "llama-fp8": Group("llama-3.1-8b", "fp8", step_ms=2.75, times_plain=1.45, rows=True),
    "llama-int4": Group("llama-3.1-8b", "int4", step_ms=2.2, times_plain=1.45, rows=True),
    "pages": Group("llama-3.1-8b", pages=True),
    "qwen3-30b-a3b": Group("qwen3-30b-a3b", step_ms=2.6, times_plain=1.4, drafters=("fp8", "int4")),
    "deepseek-v2-lite": Group("deepseek-v2-lite", step_ms=2.2, times_plain=1.4, drafters=("fp8", "int4")),
    "gemma-3-4b": Group("gemma-3-4b", step_ms=2.5, times_plain=1.4, drafters=("fp8", "int4")),
    "gpt-oss-20b": Group("gpt-oss-20b", step_ms=2.2, times_plain=1.4, drafters=("fp8", "int4")),
    "smollm2-135m": Group("smollm2-135m", step_ms=0.68, round_ms=1.0),
}
ASIDE = ("accept", "certify-int4", "certify-fp8")


@dataclass(frozen=True)
class Cost:
    ms: float
    device_ms: float | None
    tokens: float  # that a round brings a request


def steady(engine: Engine, batch: int, context: int, num_rounds: int) -> Cost:
    """What a round of so many requests costs, all of them decoding: as `outrider bench round` has it, but that the
    engine can be asked again."""
    chance = torch.Generator().manual_seed(0)
    params = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True)
    prompts = [torch.randint(engine.target.vocab_size, (context,), generator=chance).tolist() for _ in range(batch)]
    requests = [Request(f"{batch}-{context}-{n}", prompt, params, seed=n) for n, prompt in enumerate(prompts)]
    for request in requests:
        engine.add(request)
    while any(request.num_outputs < 2 for request in requests):
        engine.step()
    for _ in range(WARM_UP):
        engine.step()
    before, times = sum(request.num_outputs for request in requests), []
    for _ in range(NUM_CHUNKS):
        begin = time.perf_counter()
        for _ in range(num_rounds):
            engine.step()  # waits for the outcome of one round
        times.append(1e3 * (time.perf_counter() - begin) / num_rounds)
    tokens = (sum(request.num_outputs for request in requests) - before) / batch / num_rounds / NUM_CHUNKS
    if any(request.finished for request in requests):
        raise ValueError("a request ended while it was measured")
    device_ms = engine.replay_ms(num_rounds)
    for request in requests:
        engine.abort(request)
    engine.step()
    return Cost(statistics.median(times), device_ms, tokens)


@dataclass
class Measuring:
    """One group, with all of its layers or with a few: then only for what is compiled."""

    name: str
    is_trial: bool
    group: Group = field(init=False)

    def __post_init__(self) -> None:
        self.group = GROUPS[self.name]

    def run(self) -> None:
        if self.group.pages:
            self._pages()
            return
        contexts = [(1, CONTEXT), *((rows, length) for rows in MANY for length in (SHORT, CONTEXT))]
        costs, limit = self._measure(contexts if self.group.rows else contexts[:1])
        (drafted,), _ = self._measure(contexts[:1], drafts=True, drafter=self.group.quantization)
        one = costs[0]
        self._tell("plain step", one, f"bytes {limit:.2f} ms", one.ms, self.group.step_ms)
        ratio = drafted.ms / one.ms
        about = f"{drafted.tokens:.2f} tokens, ratio {ratio:.3f}"
        if self.group.round_ms is not None:
            self._tell(f"EAGLE-3 K={K}", drafted, about, drafted.ms, self.group.round_ms)
        else:
            self._tell(f"EAGLE-3 K={K}", drafted, about, ratio, self.group.times_plain)
        for drafter in self.group.drafters:
            (drafted,), _ = self._measure(contexts[:1], drafts=True, drafter=drafter)
            about = f"drafter in {drafter}, {drafted.tokens:.2f} tokens, ratio {drafted.ms / one.ms:.3f}"
            self._tell(f"EAGLE-3 K={K}", drafted, about, drafted.ms / one.ms, self.group.times_plain)
        for (rows, length), cost in zip(contexts[1:], costs[1:], strict=False):
            ratio, wanted = cost.ms / one.ms, 1.25 if rows == MANY[0] else 1.8
            self._tell(f"{rows} rows, context {length}", cost, f"{ratio:.3f} of one row", ratio, wanted)

    def _pages(self) -> None:
        """By how much a step grows with the context, in pages of 16 and of 8 bits."""
        growth = []
        for dtype in ("auto", "auto" if SMOKE else "fp8"):
            (near, far), _ = self._measure([(1, CONTEXT), (1, LONG)], kv_cache_dtype=dtype)
            growth.append(far.ms - near.ms)
            about = f"context {LONG}: {far.ms:.3f} ms (device {far.device_ms or 0:.3f}), growth {growth[-1]:.3f} ms"
            self._tell(f"pages {dtype}, context {CONTEXT}", near, about)
        ratio = growth[1] / growth[0] if growth[0] else 0.0
        self._say(f"fp8 pages: growth {ratio:.3f} of 16 bits' ({verdict(ratio, 0.6, at_least=False)})")

    def _measure(
        self,
        contexts: Sequence[tuple[int, int]],
        *,
        drafts: bool = False,
        drafter: str | None = None,
        kv_cache_dtype: str = "auto",
    ) -> tuple[list[Cost], float]:
        """The costs, and milliseconds that reading the weights takes at least."""
        num_rounds = 2 if self.is_trial else NUM_ROUNDS
        speculative = SpeculativeConfig(
            method="eagle3",
            num_speculative_tokens=K,
            force=True,
            synthetic_acceptance_length=ACCEPT_LENGTH,
            quantization=drafter,
            kv_cache_dtype=kv_cache_dtype,
        )
        longest = max(length for _, length in contexts)
        most = max(rows for rows, _ in contexts)
        config = EngineConfig(
            self.group.shape,
            speculative if drafts else None,
            max_num_seqs=most,
            max_num_batched_tokens=8192,
            max_model_len=longest + (1 + K) * (NUM_CHUNKS * NUM_ROUNDS + WARM_UP + 8),  # a trial's too: kernels know it
            quantization=None if SMOKE else self.group.quantization,
            kv_cache_dtype=kv_cache_dtype,
            enable_prefix_caching=False,
        )
        if SMOKE:
            config = replace(config, speculative=replace(speculative, quantization=None) if drafts else None)
        engine = random_engine(config, self.sizes())
        try:
            costs = [
                steady(engine, rows, length, min(num_rounds, SHORT_ROUNDS) if length == SHORT else num_rounds)
                for rows, length in contexts
            ]
            return costs, pass_bytes(engine, 1 + K if drafts else 1) / TERABYTES / 1e9
        finally:
            engine.close()
            del engine
            free_memory()

    def sizes(self) -> dict[str, Any]:
        shape = shape_of(self.group.shape)
        if SMOKE and shape["architectures"] == TINY["architectures"]:
            return TINY
        if SMOKE:  # as few and as small as its other sizes allow
            small = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 128, "moe_intermediate_size": 64}
            shape = {**shape, **{name: size for name, size in small.items() if name in shape}}
        if self.is_trial or SMOKE:
            return {**shape, "num_hidden_layers": min(FEW_LAYERS, shape["num_hidden_layers"])}
        return shape

    def _tell(self, what: str, cost: Cost, about: str, value: float | None = None, wanted: float | None = None) -> None:
        said = f" ({verdict(value, wanted, at_least=False)})" if value is not None and wanted is not None else ""
        self._say(f"{what}: {cost.ms:.3f} ms (device {cost.device_ms or 0:.3f}), {about}{said}")

    def _say(self, line: str) -> None:
        if not self.is_trial:
            say(f"{self.name}: {line}")


# without a clock


def certify(kind: str) -> None:
    """The embedded pair with both models in few bits, as `outrider certify` does it."""
    path = Path(tempfile.mkdtemp()) / "certificate.json"
    chosen = ["--quick", "--max-tokens", "6"]
    if not SMOKE:
        settings = f'{{"quantization": "{kind}", "num_speculative_tokens": {K}}}'
        chosen = ["--quick", "--max-tokens", "32", "--exact", "--dtype", "bfloat16", "--quantization", kind]
        chosen += ["--speculative-config", settings]
    command = [sys.executable, "-m", "outrider", "certify", "--json", *chosen]
    with path.open("w") as file, path.with_suffix(".err").open("w") as errors:
        subprocess.run(command, stdout=file, stderr=errors, timeout=200)
    name = f"embedded pair in {kind}"
    subprocess.run([sys.executable, str(Path(__file__).with_name("certificate.py")), name, str(path)])


# processes


def work(name: str) -> None:
    """A group's process: what is compiled, then, when it is its turn, what is timed."""
    if name in ASIDE:
        part, _, kind = name.partition("-")
        attempt(name, accept if part == "accept" else lambda: certify(kind))
        return
    attempt(f"{name}, compiling", Measuring(name, is_trial=True).run)
    print(READY, flush=True)
    sys.stdin.readline()
    attempt(name, Measuring(name, is_trial=False).run)


@dataclass
class Worker:
    """A process, and what it says."""

    name: str
    process: subprocess.Popen[str]
    errors: Path
    lines: Queue[str]  # an empty one is the end

    @classmethod
    def start(cls, name: str, script: str = __file__) -> Worker:
        errors, lines = Path(tempfile.mkdtemp()) / f"{name}.err", Queue[str]()
        command = [sys.executable, script, "--work", name]
        with errors.open("w") as stderr:
            process = subprocess.Popen(
                command, stdin=PIPE, stdout=PIPE, stderr=stderr, text=True, start_new_session=True
            )

        def listen() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                lines.put(line)
            lines.put("")

        Thread(target=listen, daemon=True).start()
        return cls(name, process, errors, lines)

    def relay(self, end: float) -> str | None:
        """What it says, until it is ready, or has ended (""). None: it takes too long."""
        while True:
            try:
                line = self.lines.get(timeout=max(end - time.monotonic(), 0.01))
            except Empty:
                return None
            if line.strip() in ("", READY):
                return line.strip()
            print(line, end="", flush=True)

    def go(self, seconds: float) -> None:
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"{GO}\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended
        end = time.monotonic() + seconds
        while (said := self.relay(end)) == READY:
            pass  # it is late
        if said is None:
            say(f"FAILED {self.name}: not over within {seconds:.0f} s")
            self.kill()
        if self.process.wait():
            lines = [line for line in self.errors.read_text(errors="replace").splitlines() if line.strip()]
            say(f"FAILED {self.name} (status {self.process.returncode}): {' | '.join(lines[-2:])[:220]}")

    def kill(self) -> None:
        """With all that it has started."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


def main() -> None:
    if sys.argv[1:2] == ["--work"]:
        work(sys.argv[2])
        return
    chosen = sys.argv[1:] or [*ASIDE, *GROUPS]
    workers = [Worker.start(name) for name in chosen]
    try:
        direct(workers)
    finally:
        for worker in workers:
            worker.kill()


def direct(workers: Sequence[Worker]) -> None:
    end = time.monotonic() + float(os.environ.get("COMPILE_SECONDS", COMPILE_SECONDS))
    late = {worker.name for worker in workers if worker.relay(end) is None}
    say(f"compiled; not ready: {', '.join(late)}" if late else "compiled")
    for worker in workers:
        if worker.name not in ASIDE:
            worker.go(90 if worker.name in late else 60)
        elif worker.name in late:
            say(f"FAILED {worker.name}: not over in time")
            worker.kill()  # it would disturb


if __name__ == "__main__":
    main()
