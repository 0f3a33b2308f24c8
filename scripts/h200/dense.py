"""Products of few rows with weights of 16 bits in every form, on one GPU in a minute.

    PYTHONPATH=src python scripts/h200/dense.py [WORD...]          words: parts of the names below; none: all

First every form is checked against torch, in a process for each matrix, all at once. Then forms that were right are
timed, in CUDA graphs over more weights than the L2 holds. A line: rows and matrix, us of reading the weight once, then
every form from the fastest on; `now`: what is chosen today. l, one row (dense_held.Spread): outputs of a warp . warps
beside each other . warps that share; f, few rows (dense_held.Tile): outputs . warps . inputs . stages; t, linear.Tile:
outputs . inputs . stages . warps; s, sliced.Tile: slices . 8 . outputs . stages . warps."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path

import torch
from common import SMOKE, attempt, say
from products import DEVICE, PATIENCE, TERABYTES, timed
from torch import Tensor

from outrider.kernels.activation import gelu_tanh_mul, silu_mul
from outrider.kernels.gpu import dense_held, epilogue, gates, linear, sliced, widen
from outrider.kernels.gpu.dense_held import Spread, Tile

KIND = torch.float32 if SMOKE else torch.bfloat16
ROWS = (1, 6)
FEWEST, MOST = 10, 28  # requests of a lane for weights that are on their way
MOST_SHARED = 110 << 10  # bytes of a program
END = 1e9 if SMOKE else 100  # seconds after the beginning
MATRICES = {  # outputs, inputs, gate, whether a residual follows
    "gemma-qkv": (4096, 2560, gates.NONE, False),
    "gemma-out": (2560, 2048, gates.NONE, False),
    "gemma-up": (20480, 2560, gates.GELU, False),
    "gemma-down": (2560, 10240, gates.NONE, False),
    "gemma-head": (262144, 2560, gates.NONE, False),
    "llama-qkv": (6144, 4096, gates.NONE, False),
    "llama-out": (4096, 4096, gates.NONE, True),
    "llama-up": (28672, 4096, gates.SILU, False),
    "llama-down": (4096, 14336, gates.NONE, True),
    "qwen30-qkv": (5120, 2048, gates.NONE, False),
    "qwen30-out": (2048, 4096, gates.NONE, True),
}

if SMOKE:
    MATRICES = {"plain": (64, 2048, gates.NONE, True), "gated": (64, 2560, gates.SILU, False)}


def forms(rows: int, name: str) -> list[str]:
    _, inner, gate, _ = MATRICES[name]
    each, found = 2 if gate else 1, ["now"]
    if rows > 1:
        for outputs, warps, span, stages in product((16, 32), (2, 4), (64, 128), (2, 3, 4, 6)):
            size = (outputs + 8) * warps * span * stages * 2
            if not gate and inner % (warps * span) == 0 and 48 << 10 <= size <= MOST_SHARED:
                found.append(f"f{outputs}.{warps}.{span}.{stages}")
        for outputs, inputs, stages in ((32, 128, 3), (64, 128, 3)):
            if (outputs * each + 16) * inputs * stages * 2 <= MOST_SHARED:
                found.append(f"t{outputs}.{inputs}.{stages}.4")
        for slices, outputs, stages in ((4, 16, 3), (4, 16, 4), (2, 16, 4)):
            if slices * 128 * (outputs * each + 8) * stages * 2 <= MOST_SHARED:
                found.append(f"s{slices}.8.{outputs}.{stages}.{max(slices, 4)}")
        return found
    for warps, sharing, outputs in product((4, 8), (1, 2, 4, 8), (1, 2, 4)):
        requests = inner // (256 * sharing) * outputs * each
        if sharing <= warps and inner % (256 * sharing) == 0 and FEWEST <= requests <= MOST:
            found.append(f"l{outputs}.{warps // sharing}.{sharing}")
    return found


def product_of(form: str, x: Tensor, weight: Tensor, residual: Tensor | None, gate: int) -> Tensor:
    if form == "now":
        return linear.linear(x, weight, None, residual, gated=gate)
    sizes = tuple(map(int, form[1:].split(".")))
    if form[0] == "t":
        return linear.linear(x, weight, None, residual, gated=gate, tile=linear.Tile(*sizes))
    if form[0] == "s":
        return sliced.linear(
            x, weight, widen.DENSE, residual=residual, part=widen.DENSE_PART, group=0, gated=gate, exact=False,
            out=None, tile=sliced.Tile(*sizes),
        )  # fmt: skip
    chosen = Spread(*sizes) if form[0] == "l" else Tile(*sizes)
    return dense_held.linear(x, weight, None, residual, gated=gate, form=chosen)


def operands(name: str, rows: int) -> tuple[Tensor, Tensor | None]:
    height, inner, _, has_residual = MATRICES[name]
    x = torch.randn(rows, inner, device=DEVICE).to(KIND)
    return x, torch.randn(rows, height, device=DEVICE).to(KIND) if has_residual else None


def weights(name: str, num_weights: int) -> list[Tensor]:
    height, inner, *_ = MATRICES[name]
    return [(torch.randn(height, inner, device=DEVICE) * inner**-0.5).to(KIND) for _ in range(num_weights)]


def check(name: str, words: list[str]) -> None:
    """In a process of its own: a line for every form that is right."""
    torch.manual_seed(0)
    weight, gate = weights(name, 1)[0], MATRICES[name][2]
    for text in words:
        signal.alarm(4 * PATIENCE)  # many compile at once
        rows, form = text.split(",")
        x, residual = operands(name, int(rows))
        wanted = (x @ weight.T).float()
        wanted = {gates.NONE: lambda y: y, gates.SILU: silu_mul, gates.GELU: gelu_tanh_mul}[gate](wanted)
        wanted = wanted if residual is None else wanted + residual.float()
        error = float((product_of(form, x, weight, residual, gate).float() - wanted).abs().max() / wanted.abs().max())
        print("right" if error < 0.02 else "WRONG", text, f"{error:.4f}", flush=True)
    signal.alarm(0)


def checked(name: str) -> set[str]:
    words = [f"{rows},{form}" for rows in ROWS for form in forms(rows, name)]
    parts = [words[n::4] for n in range(4)]
    with ThreadPoolExecutor(4) as pool:
        done = list(pool.map(partial(run_check, name), parts))
    return set().union(*done)


def run_check(name: str, words: list[str]) -> set[str]:
    done = subprocess.run([sys.executable, __file__, "--check", name, *words], capture_output=True, text=True)
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith(("right", "WRONG"))]
    for _, text, error in (line for line in lines if line[0] == "WRONG"):
        say(f"WRONG {name} {text}: {error}")
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1][:200]
        say(f"FAILED {name} {words[len(lines)] if len(lines) < len(words) else ''}: {last}")
    return {text for verdict, text, _ in lines if verdict == "right"}


def compare(name: str, rows: int, matrices: list[Tensor], right: set[str]) -> None:
    height, inner, gate, _ = MATRICES[name]
    (x, residual), found = operands(name, rows), []
    for form in forms(rows, name):
        if f"{rows},{form}" in right:

            def run(number: int, form: str = form) -> Tensor:
                return product_of(form, x, matrices[number], residual, gate)

            found.append((timed(run, len(matrices)), form))
    line = f"{rows} {name} {height} x {inner}: {height * inner * 2 / TERABYTES / 1e6:.1f};"
    say(line + "".join(f" {us:.1f} {form}" for us, form in sorted(found)))


def main() -> None:
    if sys.argv[1:2] == ["--check"]:
        check(sys.argv[2], sys.argv[3:])
        return
    begin = time.time()
    names = [name for name in MATRICES if not sys.argv[1:] or any(word in name for word in sys.argv[1:])]
    with ThreadPoolExecutor(2 if SMOKE else len(names)) as pool:
        found = dict(zip(names, pool.map(checked, names), strict=True))
    total = sum(len(forms(rows, name)) for rows in ROWS for name in names)
    say(f"right: {sum(map(len, found.values()))} of {total} forms")
    for name in names:
        height, inner, *_ = MATRICES[name]
        matrices = weights(name, 2 if SMOKE else max(2, 2**27 // (height * inner)))
        for rows in ROWS:
            if time.time() - begin < END:
                attempt(f"{rows} {name}", partial(compare, name, rows, matrices, found[name]))
        del matrices


def as_on_hopper() -> None:
    """Runs these kernels in numpy."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
    from gluon_words import Kernel

    for name in ("_one_row", "_few_rows"):
        setattr(dense_held, name, Kernel(name, gates, epilogue, dense_held))


if __name__ == "__main__":
    if SMOKE:
        as_on_hopper()
    main()
