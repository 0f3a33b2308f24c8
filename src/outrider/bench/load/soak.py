"""`outrider bench soak`: a real server under a crowd of clients for a while. Nothing may fail, grow, slow down or
change; then SIGTERM in the middle of streams, all of which must finish."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.bench.interleave import Progress
from outrider.bench.load.serve_load import connect
from outrider.bench.load.server_process import ServerProcess, server_process
from outrider.bench.load.soak_clients import NUM_CHATS, QUESTIONS, Crowd, Replay, mean_accept_lengths

# Scarce on purpose: 100 pages of the embedded model's, where eight sequences of 512 tokens would want 264. Enough for
# the chats to find what they said before, too few when somebody asks for many answers.
SERVER = (
    *("--max-num-seqs", "8", "--max-model-len", "512", "--kv-cache-memory-bytes", str(101 * 108_800)),
    *("--speculative-config", '{"adaptive": false}'),  # accept lengths must not depend on how busy the machine is
)
PARSERS = ("--tool-call-parser", "hermes")
MAX_CHANGE = 0.05  # of accept length, and of memory
MEMORY_ROOM = 32 * 2**20  # bytes that memory may grow whatever its size: allocators keep what they had
LATE_ROOM = 12 * 2**20  # the same, in the second half, when they should have it
SETTLE_SECONDS = 20.0
GAUGES = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")


@dataclass(frozen=True)
class ServerState:
    """The server from outside, while it has nothing to do."""

    memory: int
    num_files: int
    num_threads: int
    figures: dict[str, float]


@dataclass
class Soak:
    """What came of it."""

    seconds: float
    before: ServerState
    after: ServerState
    crowd: Crowd
    first: list[Replay]
    last: list[Replay]
    memory: list[int]  # while it ran
    exit_code: int | None = None
    num_finished_streams: int = 0
    failures: list[str] = field(default_factory=list)

    @property
    def quarters(self) -> list[int]:
        """Memory at the end of each quarter."""
        return [self.memory[len(self.memory) * quarter // 4 - 1] for quarter in (1, 2, 3, 4)]

    def moved(self, name: str) -> float:
        return self.after.figures.get(name, 0.0) - self.before.figures.get(name, 0.0)


def run_soak(seconds: float, seed: int = 0, threads: int | None = None, progress: Progress | None = None) -> Soak:
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "server.log"
        with server_process([*SERVER, *PARSERS], log, threads) as server:
            soak = asyncio.run(_soak(server, seconds, seed, progress))
            asyncio.run(_terminate(server, soak))
        soak.failures += judge(soak)
        faults = [line for line in log.read_text(errors="replace").splitlines() if '"fault"' in line]
        soak.failures += [f"the server's log has a fault: {line[:300]}" for line in faults[:3]]
    return soak


async def _soak(server: ServerProcess, seconds: float, seed: int, progress: Progress | None) -> Soak:
    async with connect(server.url, None, 60.0) as client:  # once everything, so that what is made once is made
        warm = Crowd(client, (server.host, server.port), time.monotonic() + min(5.0, seconds / 4), seed + 1000)
        await warm.run()
    before = await _reading(server)
    begin = time.monotonic()
    async with connect(server.url, None, 60.0) as client:
        crowd = Crowd(client, (server.host, server.port), begin + seconds, seed)
        for number in range(len(QUESTIONS)):
            await crowd.ask_again(number)
        watching = asyncio.create_task(_watch(server, crowd, begin, progress))
        await crowd.run()
        memory = await watching
        for number in range(len(QUESTIONS)):
            await crowd.ask_again(number)
    crowd.tally.errors += warm.tally.errors
    replays = crowd.tally.replays
    middle = begin + seconds / 2
    window = min(60.0, seconds / 3)
    first = [replay for replay in replays if replay.when < min(begin + window, middle)]
    last = [replay for replay in replays if replay.when > max(begin + seconds - window, middle)]
    after = await _reading(server)
    return Soak(time.monotonic() - begin, before, after, crowd, first, last, memory)


async def _watch(server: ServerProcess, crowd: Crowd, begin: float, progress: Progress | None) -> list[int]:
    memory, total = [], round(crowd.until - begin)
    while crowd.has_time:
        memory.append(server.memory)
        if progress is not None:
            progress("soaking", min(round(time.monotonic() - begin), total), total)
        await asyncio.sleep(1)
    return memory


async def _reading(server: ServerProcess) -> ServerState:
    """Once nothing runs and no page is held; what is still held after a while is reported as it is."""
    end = time.monotonic() + SETTLE_SECONDS
    while True:
        await asyncio.sleep(0.3)
        figures = await asyncio.to_thread(lambda: figures_in(server.get("/metrics")))
        if time.monotonic() > end or not any(figures.get(name, 0.0) for name in GAUGES):
            await asyncio.sleep(0.5)  # the connection over which we asked is still being closed
            return ServerState(server.memory, server.num_files, server.num_threads, figures)


def figures_in(text: str) -> dict[str, float]:
    """Sums over labels."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            name = name.partition("{")[0]
            found[name] = found.get(name, 0.0) + float(value)
    return found


async def _terminate(server: ServerProcess, soak: Soak) -> None:
    """SIGTERM while everybody reads: all streams come to their end, then the process does."""
    async with connect(server.url, None, 60.0) as client:
        crowd = Crowd(client, (server.host, server.port), 0.0)
        body = {"messages": [{"role": "user", "content": "Tell me about walking in nature."}], "temperature": 0}
        streams = [
            asyncio.create_task(crowd.stream(body | {"max_tokens": 200 + number, "ignore_eos": True}))
            for number in range(NUM_CHATS)
        ]
        while figures_in(await asyncio.to_thread(server.get, "/metrics"))[GAUGES[0]] < NUM_CHATS:
            await asyncio.sleep(0.02)
        server.terminate()
        answers = await asyncio.gather(*streams)
    lengths = [answer.usage["completion_tokens"] for answer in answers if answer is not None and answer.usage]
    soak.num_finished_streams = sum(length == 200 + number for number, length in enumerate(lengths))
    soak.crowd.tally.errors += crowd.tally.errors
    with contextlib.suppress(subprocess.TimeoutExpired):
        soak.exit_code = await asyncio.to_thread(server.process.wait, 60)


def judge(soak: Soak) -> list[str]:
    """Everything that is not as it must be."""
    tally, after = soak.crowd.tally, soak.after
    failures = [f"{count} x {what}" for what, count in tally.errors.items()]
    failures += [
        f"{name} is {after.figures.get(name)} after all have gone" for name in GAUGES if after.figures.get(name)
    ]
    texts: dict[int, set[str]] = {}
    for replay in tally.replays:
        texts.setdefault(replay.question, set()).add(replay.text)
    failures += [f"question {number} got {len(found)} answers" for number, found in texts.items() if len(found) > 1]
    if len(texts) < len(QUESTIONS):
        failures.append("some questions were never answered")
    first, last = mean_accept_lengths(soak.first, soak.last)
    if not first or not last or abs(last / first - 1) > MAX_CHANGE:
        failures.append(f"accept length went from {first:.3f} to {last:.3f}")
    if after.memory > soak.before.memory * (1 + MAX_CHANGE) + MEMORY_ROOM:
        failures.append(f"memory grew from {soak.before.memory} to {after.memory} bytes")
    if soak.quarters[3] > max(soak.quarters[:3]) + LATE_ROOM:  # it goes up and down by a few megabytes
        failures.append(f"memory was still growing: {soak.quarters} bytes at the end of each quarter")
    if after.num_files > soak.before.num_files:
        failures.append(f"file handles grew from {soak.before.num_files} to {after.num_files}")
    if not soak.moved("vllm:num_preemptions_total"):
        failures.append("nothing was preempted, so preemption was not tried: make pages scarcer")
    if soak.exit_code != 0:
        failures.append(f"the server ended with status {soak.exit_code}")
    if soak.num_finished_streams != NUM_CHATS:
        failures.append(f"{soak.num_finished_streams} of {NUM_CHATS} streams finished after SIGTERM")
    return failures


def to_dict(soak: Soak) -> dict[str, Any]:
    tally = soak.crowd.tally
    queries = soak.moved("vllm:prefix_cache_queries_total")
    first, last = mean_accept_lengths(soak.first, soak.last)
    return {
        "benchmark": "bench soak",
        "seconds": round(soak.seconds, 1),
        "done": dict(tally.done),
        "errors": dict(tally.errors),
        "tokens": round(soak.moved("vllm:generation_tokens_total")),
        "requests_ended": round(soak.moved("vllm:request_success_total")),
        "preemptions": round(soak.moved("vllm:num_preemptions_total")),
        "repeated_share_of_prompts": _share(tally.num_repeated_tokens, tally.num_prompt_tokens),
        "prefix_hit_rate": _share(soak.moved("vllm:prefix_cache_hits_total"), queries),
        "replays": len(tally.replays),
        "accept_length_first": round(first, 4),
        "accept_length_last": round(last, 4),
        "memory_mib": [round(value / 2**20, 1) for value in (soak.before.memory, *soak.quarters, soak.after.memory)],
        "files": [soak.before.num_files, soak.after.num_files],
        "threads": [soak.before.num_threads, soak.after.num_threads],
        "pages_in_use_after": soak.after.figures.get("vllm:kv_cache_usage_perc"),
        "streams_finished_after_sigterm": soak.num_finished_streams,
        "exit_code": soak.exit_code,
        "failures": soak.failures,
    }


def card(soak: Soak) -> list[str]:
    found = to_dict(soak)
    lines = [
        f"{found['seconds']:.0f} s, {found['requests_ended']} requests, {found['tokens']} tokens, "
        f"{found['preemptions']} preemptions",
        ", ".join(f"{count} {name}" for name, count in found["done"].items()),
        f"prompts: {found['repeated_share_of_prompts']:.0%} said before; "
        f"prefix cache: {found['prefix_hit_rate']:.0%} hit",
        f"replays: {found['replays']}, accept length {found['accept_length_first']:.3f} first, "
        f"{found['accept_length_last']:.3f} last",
        f"memory: {', '.join(map(str, found['memory_mib']))} MiB (idle, at the end of each quarter, idle)",
        f"file handles {found['files'][0]} before, {found['files'][1]} after; "
        f"threads {found['threads'][0]} and {found['threads'][1]}",
        f"SIGTERM: {found['streams_finished_after_sigterm']} of {NUM_CHATS} streams finished, "
        f"status {found['exit_code']}",
    ]
    return [*lines, *(f"FAILED: {failure}" for failure in soak.failures), *([] if soak.failures else ["all is well"])]


def _share(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0
