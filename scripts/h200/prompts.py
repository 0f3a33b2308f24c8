"""Attention of prompts on one GPU: the kernel of `attention.py` and, on Hopper, that of `prompt_attention.py`. Each
case is checked and timed in a process of its own, since a barrier that is waited for in vain never ends.

    PYTHONPATH=src python scripts/h200/prompts.py

A line for each case, Llama-3.1-8B's heads: microseconds of a layer, TFLOP/s of what is seen, and the largest error
against float32. Graphs of 16 launches over four caches, medians of seven. `SMOKE=1 TRITON_INTERPRET=1`: on a CPU."""

from __future__ import annotations

import statistics
import subprocess
import sys
from itertools import pairwise

import torch
from common import SMOKE, say
from torch import Tensor

from outrider.kernels.gpu import attention
from outrider.kernels.gpu.attention_work import Keys

DEVICE, KIND = ("cpu", torch.float32) if SMOKE else ("cuda", torch.bfloat16)
HEADS, KV_HEADS, PAGE, NUM_CACHES = (4, 2, 4, 1) if SMOKE else (32, 8, 16, 4)
KERNELS = ("triton",) if SMOKE else ("triton", "gluon")
CASES = [  # head's size, rows of each request, tokens before them
    (128, [2048], [0]),
    (128, [2048], [2000]),
    (128, [1024], [3000]),
    (128, [512] * 4, [0] * 4),
    (128, [1000] * 4, [0] * 4),
    (128, [96], [8000]),
    (128, [20], [30000]),
    (128, [1900] + [1] * 64, [0] + [1000] * 64),
    (64, [2048], [2000]),
]
if SMOKE:
    CASES = [(16, [20, 1], [3, 9])]
MAX_ERROR, MAX_SECONDS = 0.02, 30


def choose(kernel: str) -> None:
    if kernel == "triton":
        attention.on_hopper = lambda name, device: None


def inputs(dim: int, rows: list[int], starts: list[int]) -> tuple[list[tuple[Tensor, tuple[Tensor, Tensor]]], Keys]:
    """Queries with their pages, some of them so that no cache holds all, and what each row sees."""
    generator = torch.Generator(device=DEVICE).manual_seed(3)

    def noise(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=DEVICE).to(KIND)

    first = torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()])
    request = torch.repeat_interleave(torch.tensor(rows))
    indices = torch.tensor(starts)[request] + torch.arange(sum(rows)) - first[request]
    width = -(-max(map(sum, zip(rows, starts, strict=True))) // PAGE)
    table = (torch.randperm(len(rows) * width) + 1).view(len(rows), width).int()
    shape = (len(rows) * width + 1, PAGE, KV_HEADS, dim)
    made = [(noise(sum(rows), HEADS, dim), (noise(*shape), noise(*shape))) for _ in range(NUM_CACHES)]
    keys = Keys(table.to(DEVICE), first.int().to(DEVICE), indices.to(DEVICE), None, 0, PAGE, max(rows), {})
    return made, keys


def error_of(found: Tensor, q: Tensor, pages: tuple[Tensor, Tensor], keys: Keys) -> float:
    """Against float32, request by request and key head by key head."""
    worst, group = 0.0, HEADS // KV_HEADS
    start = keys.query_start.tolist()
    for number, (begin, end) in enumerate(pairwise(start)):
        index = keys.indices[begin:end]
        length = int(index.max()) + 1
        seen = torch.arange(length, device=q.device)[None] <= index[:, None]
        k, v = (each[keys.page_table[number].long()].flatten(0, 1)[:length].float() for each in pages)
        for head in range(KV_HEADS):
            own = slice(head * group, (head + 1) * group)
            score = torch.einsum("rgd,ld->grl", q[begin:end, own].float(), k[:, head]) * q.shape[2] ** -0.5
            wanted = torch.einsum("grl,ld->rgd", score.masked_fill(~seen, -torch.inf).softmax(-1), v[:, head])
            worst = max(worst, float((found[begin:end, own].float() - wanted).abs().max()))
    return worst


def measure(kernel: str, number: int) -> str:
    dim, rows, starts = CASES[number]
    choose(kernel)
    made, keys = inputs(dim, rows, starts)
    scale = dim**-0.5
    error = error_of(attention.paged_attention(*made[0], keys, scale), *made[0], keys)
    if error > MAX_ERROR:
        raise ValueError(f"off by {error:.3f}")
    if SMOKE:
        return f"{kernel} off by {error:.4f}"
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in range(16):
            attention.paged_attention(*made[launch % NUM_CACHES], keys, scale)
    found = []
    for _ in range(8):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / 16)
    us = statistics.median(found[1:])
    flops = 4 * HEADS * dim * int((keys.indices + 1).sum())
    return f"{kernel} {us:.1f} us, {flops / us / 1e6:.0f} TFLOP/s, off by {error:.3f}"


def main() -> None:
    if len(sys.argv) > 1:
        print(measure(sys.argv[1], int(sys.argv[2])))
        return
    for number, (dim, rows, starts) in enumerate(CASES):
        said = []
        for kernel in KERNELS:
            command = [sys.executable, __file__, kernel, str(number)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=MAX_SECONDS)
                lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
                said.append(lines[-1] if done.returncode == 0 else f"{kernel} FAILED {lines[-1][:80]}")
            except subprocess.TimeoutExpired:
                said.append(f"{kernel} HANGS, or takes more than {MAX_SECONDS} s")
        where = f"{len(rows)} x {rows[0]} to {rows[-1]} rows after {starts[0]} to {starts[-1]}"
        say(f"heads of {dim}, {where}: {'; '.join(said)}")


if __name__ == "__main__":
    main()
