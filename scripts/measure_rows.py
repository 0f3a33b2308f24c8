"""What products of so many rows take on a CPU: of the matrices of a GGUF file as they lie there, those of all layers in
turn, so that they come from memory; and of a random one as floats, in bfloat16, in 4 bits with a scale for every 64
numbers, and in fp8 and int8 with a scale for every row. Milliseconds (medians), and how many times as long as one row.

    python scripts/measure_rows.py MODEL.gguf --threads 1 --threads 2"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider import LLM
from outrider.kernels.native import linear
from outrider.kernels.packed import Packed, pack, pack_quantised
from outrider.kernels.quantised import Kind, pack_numbers

ROWS = (1, 2, 3, 4, 6, 8, 16, 64, 512)
SHAPE = (17920, 1536)
Matrix = tuple[Tensor, Packed | None]


def milliseconds(matrices: Sequence[Matrix], num_rows: int) -> float:
    """The median over all of them, and at least nine products."""
    x, taken = torch.randn(num_rows, matrices[0][0].shape[1]), []
    for _ in range(-(-9 // len(matrices))):
        for weight, packed in matrices:
            begin = time.perf_counter()
            linear(x, weight, None, packed)
            taken.append(time.perf_counter() - begin)
    return statistics.median(taken) * 1e3


def few_bits(kind: Kind, group: int) -> list[Matrix]:
    """Random ones."""
    found = []
    for _ in range(3):
        numbers = torch.randint(0, 1 << kind.num_bits, SHAPE).to(torch.uint8)
        numbers[numbers == 0x7F], numbers[numbers == 0xFF] = 0, 0  # none in fp8
        scale = torch.rand(SHAPE[0], SHAPE[1] // group) / 100
        found.append((torch.empty(1).expand(SHAPE), pack_quantised(pack_numbers(kind, numbers, scale))))
    return found


def show(name: str, matrices: Sequence[Matrix]) -> None:
    found = [milliseconds(matrices, count) for count in ROWS]
    cells = "  ".join(f"{count}: {each:.2f} ({each / found[0]:.1f})" for count, each in zip(ROWS, found, strict=True))
    print(f"{name:12} {' x '.join(map(str, matrices[0][0].shape)):15} {cells}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", help="a .gguf file; without one, random matrices alone")
    parser.add_argument("--threads", type=int, action="append", help="again for more")
    options = parser.parse_args()
    halves = [torch.randn(SHAPE).bfloat16().float() for _ in range(3)]
    sides = {"bfloat16": [(each, pack(each)) for each in halves], "float32": [(each, None) for each in halves]}
    sides |= {
        "int4": few_bits(Kind.INT4, 64),
        "fp8": few_bits(Kind.FP8, SHAPE[1]),
        "int8": few_bits(Kind.INT8, SHAPE[1]),
    }
    if options.model:
        with LLM(options.model, None, device="cpu", max_model_len=256) as llm:
            layers, head = list(llm.target.layers), llm.target.head
        named = {"qkv": [each.attention.qkv for each in layers], "gate and up": [each.mlp.gate_up for each in layers]}
        named |= {"down": [each.mlp.down for each in layers], "head": [head]}
        sides |= {name: [(each.weight, each.packed) for each in found] for name, found in named.items()}
    with torch.inference_mode():
        for count in options.threads or [torch.get_num_threads()]:
            torch.set_num_threads(count)
            print(f"{count} threads")
            for name, matrices in sides.items():
                show(name, matrices)


if __name__ == "__main__":
    main()
