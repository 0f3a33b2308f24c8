"""Rows in the blocks of GGUF files for tests, of every quantised type: random numbers with scales of a usual size."""

from __future__ import annotations

import gguf
import numpy
import torch

from outrider.checkpoints.finite import SCALES
from outrider.checkpoints.gguf_file import TENSOR_TYPES
from outrider.kernels.packed import Blocks

QUANTISED = {number: name for number, (name, _, _) in TENSOR_TYPES.items() if name in SCALES}
UNIT = {number: length for number, (_, length, _) in TENSOR_TYPES.items()}


def random_bytes(type_number: int, num_rows: int, row_len: int, seed: int) -> numpy.ndarray:
    """[num_rows, bytes of a row]. Levels are any; so are the whole scales of nested types."""
    name, length, size = TENSOR_TYPES[type_number]
    chance = numpy.random.default_rng(seed)
    blocks = chance.integers(0, 256, (num_rows, row_len // length, size), dtype=numpy.uint8)
    usual = 2e-4 if name.endswith("_K") else 1e-2
    for number, place in enumerate(SCALES[name]):
        scales = (chance.random((num_rows, row_len // length, 1)) + 0.5) * usual
        offset = name in ("Q4_1", "Q5_1") and number == 1
        halves = (scales * (-8 if offset else 1)).astype(numpy.float16)
        blocks[:, :, place : place + 2] = halves.view(numpy.uint8)
    return blocks.reshape(num_rows, -1)


def random_blocks(type_number: int, num_rows: int, row_len: int, seed: int) -> Blocks:
    return Blocks(torch.from_numpy(random_bytes(type_number, num_rows, row_len, seed)), type_number, row_len)


def floats_of(blocks: Blocks) -> torch.Tensor:
    """As the gguf package reads them."""
    kind = gguf.GGMLQuantizationType(blocks.type_number)
    return torch.from_numpy(gguf.quants.dequantize(blocks.data.numpy(), kind))


def rounded(x: torch.Tensor, unit: int) -> torch.Tensor:
    """x [T, K] as 8 bits stand for it, in float64: the largest of every `unit` numbers is 127 steps."""
    parts = x.view(len(x), -1, unit)
    most = parts.abs().amax(-1, keepdim=True)
    inverse = torch.div(127.0, most)  # 127 / most would be 127 times one over it, rounded twice
    steps = torch.where(most > 0, parts * inverse, 0.0).round()
    return (steps.double() * (most / 127).double()).view(x.shape)
