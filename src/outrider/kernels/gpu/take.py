"""Rows of a table by number, in a launch that may begin early: torch's own wait for everything, which costs as much as
they do."""

from __future__ import annotations

import math

import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu import launch

BLOCK = 1024  # numbers of a row that a program takes


@triton.jit(do_not_specialize=["index", "scale"])
def _take_rows(table, index, out, size, scale, SCALED: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    number = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = place < size
    row = tl.load(index + number).to(tl.int64)
    value = tl.load(table + row * size + place, mask=inside)
    if SCALED:
        value = (value.to(tl.float32) * scale).to(value.dtype)
    tl.store(out + number * size + place, value, mask=inside)


def take_rows(table: Tensor, index: Tensor, scale: float = 1.0) -> Tensor:
    """`scale` is one of the table's own precision."""
    out = table.new_empty(*index.shape, *table.shape[1:])
    size, early = math.prod(table.shape[1:]), launch.early(table)
    if out.numel():
        _take_rows[(index.numel(), triton.cdiv(size, BLOCK))](
            table, index.contiguous(), out, size, scale,
            SCALED=scale != 1.0, BLOCK=min(BLOCK, triton.next_power_of_2(size)), EARLY=early, num_warps=4,
            **launch.options(early),
        )  # fmt: skip
    return out
