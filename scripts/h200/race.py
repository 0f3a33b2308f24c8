"""Outrider and vLLM on one GPU: four servers (plain, and EAGLE-3 with a made-up acceptance) on the same random
checkpoint, loaded one after the other by the same clients with prompts that no server has seen.

    PYTHONPATH=src:SITE python scripts/h200/race.py [--vllm FOLDER] [--levels 1 32 128 top_p long] [--runs 2]
        [--out FILE.json]

--vllm: a folder with vLLM, for PYTHONPATH; without it Outrider's two servers are measured alone. All servers start at
the same time, which takes vLLM 130 to 170 s; all of it takes an H200 about nine minutes. A level is a number of
clients: 512 tokens in, 128 out, greedy; then 32 clients at temperature 0.8 with top_p, and 16 with prompts of 4,000
tokens."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from common import SMOKE, attempt, roomy_folder, say, smoke_shape
from random_model import write_pair

SHAPE = smoke_shape() if SMOKE else "llama-3.1-8b"
K, ACCEPT_LENGTH = 5, 3.0
SEATS = 8 if SMOKE else 128
LENGTHS = {"usual": 16, "long": 64} if SMOKE else {"usual": 512, "long": 4000}  # of prompts
ANSWER = 8 if SMOKE else 128
START_SECONDS = 240
PAGES = 2**26 if SMOKE else 12 * 2**30  # bytes for keys and values, of every server
SHARE = 0.22  # of the GPU's memory, which vLLM wants to find free
KEYS = ("output_throughput", "median_ttft_ms", "p99_ttft_ms", "median_tpot_ms", "p99_tpot_ms")


@dataclass
class Server:
    name: str
    port: int
    command: list[str]
    environment: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] | None = None
    ready_after: float | None = None

    def start(self, folder: Path) -> None:
        log = (folder / f"{self.name}.log").open("wb")
        self.process = subprocess.Popen(self.command, env=os.environ | self.environment, stdout=log, stderr=log)

    @property
    def is_up(self) -> bool:
        try:
            return urllib.request.urlopen(f"http://127.0.0.1:{self.port}/v1/models", timeout=2).status == 200
        except OSError:
            return False

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.poll() is None


@dataclass(frozen=True)
class Level:
    name: str
    clients: int
    count: int  # requests
    prompts: str = "usual"  # or long
    options: tuple[str, ...] = ()

    @property
    def num_warmups(self) -> int:
        return self.clients


def servers(target: Path, head: Path, vllm: Path | None) -> list[Server]:
    length = str((LENGTHS["long"] + ANSWER) * 3 // 2)  # vLLM refuses by characters: so many times the longest word's
    made_up = {"num_speculative_tokens": K, "synthetic_acceptance_length": ACCEPT_LENGTH}
    ours = [sys.executable, "-m", "outrider", "serve", str(target), "--host", "127.0.0.1", "--max-model-len", length]
    ours += [
        "--max-num-seqs",
        str(SEATS),
        "--kv-cache-memory-bytes",
        str(PAGES),
        "--device",
        "cpu" if SMOKE else "cuda",
    ]
    found = [
        Server("Outrider plain", 8001, [*ours, "--port", "8001", "--no-draft"]),
        Server(
            "Outrider EAGLE-3",
            8003,
            [*ours, "--port", "8003", "--speculative-config", json.dumps({"model": str(head), **made_up})],
        ),
    ]
    if vllm is None:
        return found
    theirs = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(target), "--host", "127.0.0.1"]
    theirs += ["--dtype", "bfloat16", "--max-num-seqs", str(SEATS), "--max-model-len", length]
    theirs += ["--gpu-memory-utilization", str(SHARE), "--kv-cache-memory-bytes", str(PAGES)]
    theirs += ["--load-format", "dummy"]
    drafts = {"method": "eagle3", "model": str(head), "rejection_sample_method": "synthetic", **made_up}
    there = {"PYTHONPATH": str(vllm), "VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_NO_USAGE_STATS": "1"}
    return [
        Server("vLLM plain", 8000, [*theirs, "--port", "8000"], there),
        found[0],
        Server("vLLM EAGLE-3", 8002, [*theirs, "--port", "8002", "--speculative-config", json.dumps(drafts)], there),
        found[1],
    ]


def write_prompts(path: Path, level: Level, vocabulary: int, seed: int) -> Path:
    """As many as are sent, warm-up included, and none twice."""
    generator = random.Random(seed)
    with path.open("w") as file:
        for _ in range(level.count + level.num_warmups):
            words = " ".join(f"w{generator.randrange(10, vocabulary)}" for _ in range(LENGTHS[level.prompts]))
            file.write(json.dumps({"prompt": words}) + "\n")
    return path


def wait_for_all(all_of_them: Sequence[Server], folder: Path) -> None:
    """Until all are up. One that ends or takes too long ends the race: without it the rest says nothing."""
    begin = time.monotonic()
    while time.monotonic() - begin < START_SECONDS:
        for each in all_of_them:
            if each.ready_after is None and each.is_up:
                each.ready_after = time.monotonic() - begin
                say(f"{each.name}: ready after {each.ready_after:.1f} s")
        if all(each.ready_after is not None for each in all_of_them):
            return
        if any(each.ready_after is None and not each.is_alive for each in all_of_them):
            break
        time.sleep(0.2)
    for each in all_of_them:
        if each.ready_after is None:
            lines = (folder / f"{each.name}.log").read_text(errors="replace").strip().splitlines()
            say(f"FAILED {each.name}: {' | '.join(lines[-3:])[-400:]}")
    sys.exit(1)


def load(server: Server, level: Level, prompts: Path) -> dict[str, Any]:
    """What the clients saw."""
    command = [sys.executable, "-m", "outrider", "bench", "serve", "--base-url", f"http://127.0.0.1:{server.port}"]
    command += ["--endpoint", "completions", "--prompts", str(prompts), "--concurrency", str(level.clients)]
    command += ["--num-prompts", str(level.count), "--num-warmups", str(level.num_warmups)]
    command += ["--max-tokens", str(ANSWER), "--ignore-eos", "--json", *level.options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    if done.returncode:
        raise RuntimeError(done.stderr.strip()[-300:])
    return json.loads(done.stdout.strip().splitlines()[-1])


def measure(servers: Sequence[Server], level: Level, prompts: Path) -> dict[str, dict[str, Any]]:
    """By server; what fails is told, and left out."""
    found: dict[str, dict[str, Any]] = {}

    def one(server: Server) -> None:
        said = found[server.name] = load(server, level, prompts)
        figures = {key: round(said[key], 1) for key in KEYS}
        say(f"{server.name}, {level.name}: {said['completed']} done, {said['failed']} failed, {figures}")

    for server in servers:
        attempt(f"{server.name}, {level.name}", partial(one, server))
    return found


def tell(level: Level, found: dict[str, dict[str, Any]]) -> None:
    for kind in ("plain", "EAGLE-3"):
        ours, theirs = found.get(f"Outrider {kind}"), found.get(f"vLLM {kind}")
        if ours and theirs:
            ratios = [ours[key] / theirs[key] for key in KEYS[:3]]
            rate, median, last = (f"{each:.3f}" for each in ratios)
            say(f"  {level.name}, {kind}: {rate} of vLLM's tokens/s; TTFT median {median}, p99 {last} times as long")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vllm", type=Path)
    crowd = "4" if SMOKE else "32"
    usual = ["1", crowd, *([] if SMOKE else ["128"]), "top_p", "long"]
    parser.add_argument("--levels", nargs="+", default=usual, help=f"clients, top_p ({crowd} of them), or long")
    parser.add_argument("--runs", type=int, default=1)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    counts = {1: 8, 4: 8} if SMOKE else {1: 8, 32: 192, 128: 512}
    special = {
        "top_p": Level("top_p", int(crowd), counts[int(crowd)], options=("-t", "0.8", "--top-p", "0.9")),
        "long": Level("long prompts", 2 if SMOKE else 16, 4 if SMOKE else 48, "long"),
    }
    levels = [
        special.get(each) or Level(f"{each} at a time", int(each), counts.get(int(each), 4 * int(each)))
        for each in given.levels * given.runs
    ]
    folder = roomy_folder(1e8 if SMOKE else 25e9)
    all_of_them: list[Server] = []
    results = []
    try:
        target, head = write_pair(folder, SHAPE)
        vocabulary = json.loads((target / "config.json").read_text())["vocab_size"]
        say(f"a checkpoint in {folder}")
        all_of_them = servers(target, head, given.vllm)
        for each in all_of_them:
            each.start(folder)
        wait_for_all(all_of_them, folder)
        for number, level in enumerate(levels):
            prompts = write_prompts(folder / f"prompts-{number}.jsonl", level, vocabulary, number)
            found = measure(all_of_them, level, prompts)
            tell(level, found)
            results.append({"level": level.name, "servers": found})
            if given.out:
                starts = {each.name: each.ready_after for each in all_of_them}
                given.out.write_text(json.dumps({"ready_after_s": starts, "levels": results}))
    finally:
        for each in all_of_them:
            if each.process is not None:
                each.process.kill()
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
