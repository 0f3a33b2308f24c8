"""Products of 33 to 320 rows (kernels/gpu/row_products.py) beside cuBLAS's, on one Hopper in a minute.

    PYTHONPATH=src python scripts/h200/products.py

First every form of the kernel is checked, in processes of their own: a barrier that nobody completes would hang the
device, and ends its process after 15 seconds. Then forms that were right are timed, in CUDA graphs over more weights
than the L2 holds. A line: rows and matrix, us of cuBLAS with what follows (activation; the residual is addmm's, on the
way down addmm_'s, as in a model), us of reading the weight once, then every tile from the fastest on: blocks of 64
outputs for a warpgroup, stages, parts; with x, parts exchange their sums (row_exchange.py)."""

from __future__ import annotations

import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
import triton
import triton.language as tl
from common import SMOKE, attempt, say
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from outrider.kernels.activation import silu_mul
from outrider.kernels.gpu import epilogue, gates, row_exchange, row_products
from outrider.kernels.gpu.row_products import Tile

PATIENCE = 15  # seconds for a form
END = 1e9 if SMOKE else 57  # seconds after the beginning
TERABYTES = 4.25  # a second, of a copy
KIND, DEVICE = (torch.float16, "cpu") if SMOKE else (torch.bfloat16, "cuda")
ROWS = (33, 64, 96, 128, 192, 256, 320)
SOME_ROWS = (64, 128, 192)
PLAIN, RESIDUAL, GATED = "plain", "residual", "gated"
Form = tuple[str, int, int, int]  # what follows, blocks, stages, whether parts exchange their sums
MATRICES = [
    ("Llama-3.1-8B qkv", 6144, 4096, PLAIN, ROWS),
    ("Llama-3.1-8B out", 4096, 4096, RESIDUAL, ROWS),
    ("Llama-3.1-8B up", 28672, 4096, GATED, ROWS),
    ("Llama-3.1-8B down", 4096, 14336, RESIDUAL, ROWS),
    ("Qwen3-8B up", 24576, 4096, GATED, SOME_ROWS),
    ("Qwen3-8B down", 4096, 12288, RESIDUAL, SOME_ROWS),
    ("Gemma-3-4B qkv", 4096, 2560, PLAIN, SOME_ROWS),
    ("Gemma-3-4B out", 2560, 2048, RESIDUAL, SOME_ROWS),
    ("Gemma-3-4B up", 20480, 2560, GATED, SOME_ROWS),
    ("Gemma-3-4B down", 2560, 10240, RESIDUAL, SOME_ROWS),
]
if SMOKE:
    ROWS, SOME_ROWS = (33, 100), (33,)
    MATRICES = [("tiny", 200, 192, each, ROWS) for each in (PLAIN, RESIDUAL, GATED)]


@triton.jit
def _plain(x, weight, out, num_rows, num_columns, inner, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """The same product in Triton's own words, for comparison: descriptors, pipelined by the compiler, no parts."""
    first = tl.program_id(0) * BLOCK_N
    total = tl.zeros((BLOCK_N, ROWS), dtype=tl.float32)
    for shift in tl.range(0, inner, 64):
        total = tl.dot(weight.load([first, shift]), x.load([0, shift]).T, total)
    row, column = tl.arange(0, ROWS)[:, None], first + tl.arange(0, BLOCK_N)[None, :]
    fits = (row < num_rows) & (column < num_columns)
    tl.store(out + row * num_columns + column, total.T.to(out.dtype.element_ty), mask=fits)


def plain(x: Tensor, weight: Tensor, out: Tensor, rows: int) -> None:
    block = 128
    _plain[(triton.cdiv(len(weight), block),)](
        TensorDescriptor.from_tensor(x, [rows, 64]), TensorDescriptor.from_tensor(weight, [block, 64]), out, len(x),
        len(weight), x.shape[1], ROWS=rows, BLOCK_N=block, num_warps=8, num_stages=4,
    )  # fmt: skip


def forms(rows: int) -> list[Form]:
    """Of the kernel for so many rows: what is compiled once."""
    found = []
    for blocks in (2, 1):
        if blocks * sum(row_products.blocks_of_rows(rows)) // 2 > row_products.MAX_SUMS:
            continue
        most = row_products.most_stages(rows, blocks)
        for stages in (most, most - 1) if blocks == 2 else (most,):
            found += [(each, blocks, stages, 0) for each in (PLAIN, RESIDUAL, GATED)]
        found += [(each, blocks, most, 1) for each in (PLAIN, RESIDUAL)]
    return found


def operands(rows: int, height: int, inner: int, after: str, num_weights: int) -> tuple[Tensor, list[Tensor], Tensor]:
    torch.manual_seed(rows)
    x = torch.randn(rows, inner, device=DEVICE).to(KIND)
    weights = [(torch.randn(height, inner, device=DEVICE) * inner**-0.5).to(KIND) for _ in range(num_weights)]
    return x, weights, torch.randn(rows, height // 2 if after == GATED else height, device=DEVICE).to(KIND)


def ours(x: Tensor, weight: Tensor, residual: Tensor, after: str, tile: Tile) -> Tensor:
    gate = gates.SILU if after == GATED else gates.NONE
    return row_products.linear(x, weight, None, residual if after == RESIDUAL else None, gated=gate, tile=tile)


def library(x: Tensor, weight: Tensor, residual: Tensor, after: str, in_place: bool) -> Tensor:
    if after == RESIDUAL:
        return residual.addmm_(x, weight.T) if in_place else torch.addmm(residual, x, weight.T)
    return silu_mul(torch.mm(x, weight.T)) if after == GATED else torch.mm(x, weight.T)


def error(found: Tensor, x: Tensor, weight: Tensor, residual: Tensor, after: str) -> float:
    """The largest, as a share of the largest number."""
    wanted = x.double() @ weight.double().T
    if after == GATED:
        gate, up = wanted.chunk(2, dim=-1)
        wanted = torch.nn.functional.silu(gate) * up
    wanted = wanted + residual if after == RESIDUAL else wanted
    return float((found - wanted).abs().max() / wanted.abs().max())


def check(rows: int, wanted: list[Form]) -> None:
    """In a process of its own: a line for every form that is right."""
    for after, blocks, stages, joined in wanted:
        signal.alarm(PATIENCE)
        worst = 0.0
        for num_rows, height, inner, split in ((rows, 1000, 840, 3), (rows - 1, 20000, 192, 1)):
            height, inner = (
                (height // 25 * 4, 200) if SMOKE and height < 2000 else (640, 64) if SMOKE else (height, inner)
            )
            x, (weight,), residual = operands(num_rows, height, inner, after, 1)
            split = 1 if after == GATED else 3 if joined else split
            for _ in range(1 + 4 * joined):  # counters must be as they were
                found = ours(x, weight, residual, after, Tile(blocks, stages, split, bool(joined)))
                worst = max(worst, error(found, x, weight, residual, after))
        if worst < 0.02:
            print(after, blocks, stages, joined, f"{worst:.4f}", flush=True)
        else:
            print(f"WRONG {rows} {after} {blocks} {stages} {joined} {worst:.4f}", file=sys.stderr, flush=True)
    for after in (PLAIN, RESIDUAL):  # the launch that adds up parts is compiled for every number of them
        splits = {
            split for _, height, inner, *_ in MATRICES for split in parts(height, inner, 2) | parts(height, inner, 1)
        }
        for split in sorted(splits):
            signal.alarm(PATIENCE)
            x, (weight,), residual = operands(rows, 256, 64 * split, after, 1)
            ours(x, weight, residual, after, Tile(1, 3, split))
    signal.alarm(0)


def parts(height: int, inner: int, blocks: int) -> set[int]:
    """As many as make a program for every multiprocessor, and half of them."""
    most = row_products.num_processors(torch.device(DEVICE)) // triton.cdiv(height, 128 * blocks)
    most = max(1, min(most, inner // 256, 12))
    return {most, (most + 1) // 2}


def form_of(words: list[str]) -> Form:
    return words[0], int(words[1]), int(words[2]), int(words[3])


def checked(rows: int) -> set[Form]:
    """Forms that are right; whatever ends a process, those behind it are tried by another."""
    left, right = forms(rows), set[Form]()
    while left:
        words = [",".join(map(str, form)) for form in left]
        done = subprocess.run([sys.executable, __file__, str(rows), *words], capture_output=True, text=True)
        passed = [form_of(line.split()) for line in done.stdout.splitlines()]
        right |= set(passed)
        wrong = [line for line in done.stderr.splitlines() if line.startswith("WRONG")]
        for line in wrong:
            say(line)
        if done.returncode == 0:
            break
        behind = len(passed) + len(wrong)
        last = (done.stderr.strip().splitlines() or [""])[-1][:90]
        say(f"FAILED rows {rows} {left[behind]}: {'hangs' if done.returncode == -signal.SIGALRM else last}")
        left = left[behind + 1 :]
    return right


def timed(run: Callable[[int], object], num_weights: int) -> float:
    """us of one of at least 16 launches."""
    signal.alarm(PATIENCE)
    count = max(num_weights, 16) // num_weights * num_weights
    run(0)
    if SMOKE:
        begin = time.perf_counter()
        run(0)
        return (time.perf_counter() - begin) * 1e6
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for number in range(count):
            run(number % num_weights)
    graph.replay()
    found = []
    for _ in range(7):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / count)
    signal.alarm(0)
    return statistics.median(found)


def tiles(rows: int, height: int, inner: int, after: str, right: set[Form]) -> list[Tile]:
    """Of forms that are right, among them the one that is chosen by default."""
    found = []
    for each, blocks, stages, joined in sorted(right):
        if each == after:
            splits = {1} if after == GATED and blocks == 2 else parts(height, inner, blocks)
            found += [Tile(blocks, stages, split, bool(joined)) for split in sorted(splits) if split > joined]
    chosen = row_products.tile_for(rows, height, inner, int(after == GATED), 132)
    return found if chosen in found or (after, chosen.blocks, chosen.stages, 0) not in right else [chosen, *found]


def compare(name: str, rows: int, height: int, inner: int, after: str, right: set[Form]) -> None:
    num_weights = 2 if SMOKE else max(2, 2**28 // (height * inner * 2))
    x, weights, residual = operands(rows, height, inner, after, num_weights)
    in_place, scratch = name.endswith("down"), residual.clone()
    theirs = timed(lambda number: library(x, weights[number], scratch, after, in_place), num_weights)
    found = []
    for tile in tiles(rows, height, inner, after, right):

        def run(number: int, tile: Tile = tile) -> Tensor:
            return ours(x, weights[number], residual, after, tile)

        found.append((timed(run, num_weights), tile, error(run(0), x, weights[0], residual, after)))
    line = f"{rows:3} {name:17} {height:5} cuBLAS {theirs:5.1f} weight {height * inner * 2 / TERABYTES / 1e6:4.1f}"
    if after == PLAIN and sum(row_products.blocks_of_rows(rows)) in (64, 128, 256):
        out = x.new_empty(rows, height)
        padded = row_products.blocks_of_rows(rows)[0]
        line += f" Triton {timed(lambda number: plain(x, weights[number], out, padded), num_weights):.1f}"
    best = sorted(found, key=lambda each: each[0])
    line += f" ours, error {max((each[2] for each in best), default=0.0):.4f}:"
    for us, tile, _ in best:
        line += f" {us:.1f} ({tile.blocks},{tile.stages},{tile.split}{'x' * tile.joined})"
    say(line[:160])


def as_on_hopper() -> None:
    """Without a GPU: Gluon's words in numpy, as the tests have them."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
    from gluon_words import Kernel

    row_products.num_processors = lambda device: 5  # type: ignore[assignment]
    row_products._row_products = Kernel("_row_products", gates, epilogue, row_exchange, row_products)
    row_products._row_products.at_a_time = 5


def main() -> None:
    begin = time.time()
    if len(sys.argv) > 1:
        check(int(sys.argv[1]), [form_of(word.split(",")) for word in sys.argv[2:]])
        return
    say(f"{'cpu' if SMOKE else torch.cuda.get_device_name()}, Triton {triton.__version__}, torch {torch.__version__}")
    covered = {sum(row_products.blocks_of_rows(rows)) for rows in ROWS}
    with ThreadPoolExecutor() as pool:
        found = dict(zip(covered, pool.map(checked, covered), strict=True))
    say(f"right: {sum(map(len, found.values()))} of {sum(len(forms(rows)) for rows in covered)} forms")
    for rows in ROWS:
        right = found[sum(row_products.blocks_of_rows(rows))]
        for name, height, inner, after, counts in MATRICES:
            if rows in counts and time.time() - begin < END:
                shape = (rows, height, inner, after, right)
                attempt(f"{rows} {name}", partial(compare, name, *shape))


if __name__ == "__main__":
    if SMOKE:
        as_on_hopper()
    main()
