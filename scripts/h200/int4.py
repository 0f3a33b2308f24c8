"""Products with matrices of 4 bits (Llama-3.1-8B's, groups of 128) in every form, on one GPU in two minutes.

    PYTHONPATH=src python scripts/h200/int4.py

First every form is checked against torch, in a process for each matrix and number of rows, all at once: what hangs is
ended. Then forms that were right are timed, in CUDA graphs over more weights than the L2 holds. A line: rows and
matrix, us of reading the weight once, then every form from the fastest on; `*`: the one that is chosen today.
h, held.py: tiles of 16 outputs . warps . stages, and . parts where inputs are shared; s, sliced.py: slices . outputs .
stages . warps; w, wide.py: outputs . stages . warps . parts."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import torch
from common import SMOKE, attempt, say
from products import DEVICE, PATIENCE, TERABYTES, timed
from torch import Tensor

from outrider.kernels.activation import silu_mul
from outrider.kernels.gpu import epilogue, gates, held, quantised, sliced, wide, widen
from outrider.kernels.quantised import Kind, Quantised, quantise

KIND = torch.float32 if SMOKE else torch.bfloat16
END = 1e9 if SMOKE else 170  # seconds after the beginning
WIDTH = 260  # of a line
ROWS = (1, 6, 16, 64)
MATRICES = {  # outputs, inputs, gated
    "qkv": (6144, 4096, gates.NONE),
    "out": (4096, 4096, gates.NONE),
    "up": (28672, 4096, gates.SILU),
    "down": (4096, 14336, gates.NONE),
    "head": (128256, 4096, gates.NONE),
}
HELD = ("1.4.4", "1.4.8", "1.8.2", "2.4.2", "2.4.4", "2.8.2", "4.4.1", "4.4.2")
HELD_16 = (*HELD, "8.4.1")
SHARED = ("2.8.2.2", "4.4.2.2", "4.4.1.4", "4.8.1.2")
SHARED_16 = (*SHARED, "2.4.2.2", "2.4.2.4", "4.4.1.2", "4.4.2.4", "4.8.2.2", "8.4.1.4", "8.8.1.4")
SLICED = ("4.16.4.4", "4.32.4.4", "4.32.2.4", "8.32.3.4", "4.64.3.4")
WIDE = ("64.3.4.1", "64.4.4.1", "64.4.4.2", "64.4.4.4", "128.3.8.1", "128.3.8.2")
WIDE_16 = ("64.4.4.1", "64.6.4.1", "128.3.8.1", "64.4.4.2", "64.4.4.4", "64.4.4.8")
if SMOKE:
    ROWS = (1, 16, 64)
    MATRICES = {"plain": (128, 1024, gates.NONE), "gated": (256, 1024, gates.SILU)}
    HELD, SLICED, WIDE = ("1.4.2", "2.4.1"), ("4.16.4.4",), ("64.3.4.1", "64.3.4.2")
    HELD_16, SHARED, SHARED_16, WIDE_16 = HELD, ("2.4.1.2",), ("4.4.1.3",), WIDE


def forms(rows: int, name: str) -> list[str]:
    """Those that make sense for so many rows; the first is today's."""
    height, _, gated = MATRICES[name]
    few = not gated and height < held.MANY  # outputs, so that programs share the inputs of one
    wides = WIDE if rows > 16 else WIDE_16 if rows > 8 else ()
    chosen = [f"w{each}" for each in wides if few or each.endswith(".1")]
    if rows <= 16:
        chosen += [f"h{each}" for each in (HELD if rows <= 8 else HELD_16) if not gated or not each.startswith("1")]
        shared = () if rows == 1 or not few else SHARED if rows <= 8 else SHARED_16
        chosen += [f"h{each}" for each in shared]
    return ["now", *chosen, *(f"s{each}" for each in SLICED if rows <= 8)]


def product(form: str, x: Tensor, weight: Quantised, gated: int) -> Tensor:
    if form == "now":
        return quantised.linear(x, weight, gated=gated)
    sizes = tuple(map(int, form[1:].split(".")))
    if form[0] == "h":
        return held.linear(x, weight, gated=gated, tile=held.Tile(*sizes))
    if form[0] == "w":
        return wide.linear(x, weight, gated=gated, tile=wide.Tile(*sizes))
    slices, block_n, stages, warps = sizes
    tile = sliced.Tile(slices, 8 if len(x) <= 8 else 16, block_n, stages, warps)
    return sliced.linear(
        x, weight.data, widen.NUMBERS[weight.kind], weight.scale, part=weight.part, group=weight.group, gated=gated,
        exact=False, out=None, tile=tile,
    )  # fmt: skip


def weights(name: str, num_weights: int) -> list[Quantised]:
    height, inner, _ = MATRICES[name]
    torch.manual_seed(height)
    found = []
    for _ in range(num_weights):
        weight = quantise(torch.randn(height, inner, device=DEVICE) * inner**-0.5, Kind.INT4)
        assert weight is not None
        found.append(weight)
    return found


def check(name: str, words: list[str]) -> None:
    """In a process of its own: a line for every form that is right."""
    weight, gated = weights(name, 1)[0], MATRICES[name][2]
    dense = weight.dense(torch.float32)
    for text in words:
        signal.alarm(2 * PATIENCE)  # many compile at once
        rows, form = text.split(",")
        torch.manual_seed(int(rows))
        x = torch.randn(int(rows), dense.shape[1], device=DEVICE).to(KIND)
        wanted = x.float() @ dense.T
        wanted = silu_mul(wanted) if gated else wanted
        found = product(form, x, weight, gated)
        error = float((found.float() - wanted).abs().max() / wanted.abs().max())
        again = [product(form, x, weight, gated) for _ in range(4)]  # counters must be as they were
        same = all(torch.equal(each, found) for each in again)
        print("right" if error < 0.02 and same else "WRONG", text, f"{error:.4f}" + "!" * (not same), flush=True)
    signal.alarm(0)


def checked(case: tuple[str, int]) -> set[str]:
    """Forms that are right; whatever ends a process, those behind it are tried by another."""
    name, rows = case
    left = [f"{rows},{form}" for form in forms(rows, name)]
    right = set()
    while left:
        done = subprocess.run([sys.executable, __file__, name, *left], capture_output=True, text=True)
        lines = [line.split() for line in done.stdout.splitlines() if line.startswith(("right", "WRONG"))]
        right |= {text for verdict, text, _ in lines if verdict == "right"}
        for _, text, error in (line for line in lines if line[0] == "WRONG"):
            say(f"WRONG {name} {text}: {error}")
        if done.returncode == 0:
            break
        last = (done.stderr.strip().splitlines() or [""])[-1][:90]
        say(f"FAILED {name} {left[len(lines)]}: {'hangs' if done.returncode == -signal.SIGALRM else last}")
        left = left[len(lines) + 1 :]
    return right


def compare(name: str, rows: int, matrices: list[Quantised], right: set[str]) -> None:
    height, inner, gated = MATRICES[name]
    x = torch.randn(rows, inner, device=DEVICE).to(KIND)
    found = []
    for form in forms(rows, name):
        if f"{rows},{form}" in right:

            def run(number: int, form: str = form) -> Tensor:
                return product(form, x, matrices[number], gated)

            found.append((timed(run, len(matrices)), "*" if form == "now" else form))
    line = f"{rows:2} {name:5} {height} x {inner}: {matrices[0].num_bytes / TERABYTES / 1e6:.1f};"
    say((line + "".join(f" {us:.1f} {form}" for us, form in sorted(found)))[:WIDTH])


def main() -> None:
    begin = time.time()
    if len(sys.argv) > 1:
        check(sys.argv[1], sys.argv[2:])
        return
    cases = [(name, rows) for rows in ROWS for name in MATRICES]
    with ThreadPoolExecutor(2 if SMOKE else len(cases)) as pool:
        found = dict(zip(cases, pool.map(checked, cases), strict=True))
    total = sum(len(forms(rows, name)) for rows in ROWS for name in MATRICES)
    say(f"right: {sum(map(len, found.values()))} of {total} forms")
    for name, (height, inner, _) in MATRICES.items():
        matrices = weights(name, 2 if SMOKE else max(2, 2**28 // (height * inner // 2)))
        for rows in ROWS:
            if time.time() - begin < END:
                attempt(f"{rows} {name}", partial(compare, name, rows, matrices, found[name, rows]))
        del matrices


def as_on_hopper() -> None:
    """Without a GPU: Gluon's words in numpy, as the tests have them."""
    sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))
    from gluon_words import Kernel

    held._held = Kernel("_held", gates, epilogue, held)


if __name__ == "__main__":
    if SMOKE:
        as_on_hopper()
    main()
