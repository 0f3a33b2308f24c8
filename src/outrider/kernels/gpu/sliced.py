"""y = x W^T for few rows, with the inner dimension sliced over the warps of a program ("sliced K"): each adds up its
own runs of numbers, and their sums are added in the end. The weight has 16, 8 or 4 bits a number, which are widened in
registers; scales are applied to the sum of a group."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu import launch
from outrider.kernels.gpu.epilogue import beside, finish
from outrider.kernels.gpu.sums import sums
from outrider.kernels.gpu.widen import DENSE, NUMBERS
from outrider.kernels.quantised import Kind

LONG = 8192  # inputs that give more slices enough to do
FEW, MANY = 4224, 16384  # outputs: at most a program of 32 for each multiprocessor, or plenty
MAX_SHARED = 200 * 2**10  # bytes of a program's buffers


@dataclass(frozen=True)
class Tile:
    slices: int
    block_m: int
    block_n: int
    stages: int
    warps: int = 4


@triton.jit(do_not_specialize=["num_rows"])  # compiled once for any number
def _linear(
    x, data, scale, offset, bias, residual, out,
    num_rows, num_columns, inner, num_runs, width, scale_stride, x_stride, residual_stride,
    KIND: tl.constexpr, PART: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, HAS_SCALE: tl.constexpr,
    HAS_OFFSET: tl.constexpr, GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    IEEE: tl.constexpr, FAST: tl.constexpr, SLICES: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, MANY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """data [N, width]: runs of PARTS * PART numbers, PART words each. GATED: its rows are gates, then ups."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    run = tl.arange(0, SLICES)
    place = tl.arange(0, PART)
    near = tl.minimum(column, num_columns - 1)  # a column that does not exist is computed, and not stored
    up = tl.cast(num_columns, tl.int64) * width
    if EARLY:
        tl.extra.cuda.gdc_wait()
    data_at = data + near.to(tl.int64)[None, :, None] * width + run[:, None, None] * PART + place[None, None, :]
    x_at = x + row.to(tl.int64)[None, None, :] * x_stride
    row_fits = (row < num_rows)[None, None, :]
    scale_at, offset_at = scale + near[None, :], offset + near[None, :]
    fits = (row < num_rows)[None, :] & (column < num_columns)[:, None]
    first_bias, second_bias, more = beside(
        bias, residual, row[None, :], column[:, None], fits, num_columns, residual_stride, GATED, HAS_BIAS, HAS_RESIDUAL
    )
    whole, second_whole = 1.0, 1.0  # scales of whole rows
    if GROUP == 0 and HAS_SCALE:
        whole = tl.load(scale + near).to(tl.float32)[:, None]
        if GATED:
            second_whole = tl.load(scale + num_columns + near).to(tl.float32)[:, None]
    total, second, _ = sums(
        x_at, row_fits, data_at, up, scale_at, offset_at, x, 0.0, num_columns, run, inner, num_runs, scale_stride,
        KIND, PART, GROUP, EVEN, False, HAS_OFFSET, False, GATED, IEEE, FAST, SLICES, SLICES, BLOCK_M, BLOCK_N, STAGES,
        MANY,
    )  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    total, second = tl.sum(total, 0), tl.sum(second, 0)
    if GROUP == 0 and HAS_SCALE:
        total, second = total * whole, second * second_whole
    finish(
        total, second, first_bias, second_bias, more, out, row[None, :], column[:, None], fits, num_columns,
        GATED, HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip


def linear(
    x: Tensor,
    data: Tensor,
    kind: int,
    scale: Tensor | None = None,
    offset: Tensor | None = None,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    part: int,
    group: int,
    gated: int,
    exact: bool,
    out: Tensor | None,
    tile: Tile | None = None,
) -> Tensor:
    """x [T, in], data [out, words] -> [T, out], plus residual [T, out]; `gated`, a gate's number: [T, out / 2],
    act(gate) * up. scale and offset [groups, out]; `group`: numbers that share one, 0: all of a row. `exact`: a row's
    bits do not depend on how many there are. `out`: where to put the result, dense."""
    x = x if x.stride(-1) == 1 else x.contiguous()
    residual = residual if residual is None or residual.stride(-1) == 1 else residual.contiguous()
    num_rows, inner = x.shape
    num_columns = len(data) // 2 if gated else len(data)
    out = x.new_empty(num_rows, num_columns) if out is None else out
    if not num_rows:
        return out
    num_parts = 1 if kind == DENSE else 2 if kind > NUMBERS[Kind.FP4] else 4
    run = part * num_parts
    num_runs = triton.cdiv(inner, run)
    tile = tile or tile_for(num_rows, num_columns, inner, num_parts, gated, exact, x.element_size())
    even = inner % (run * tile.slices) == 0
    early = launch.early(x)
    nothing = out if scale is None else scale
    _linear[(triton.cdiv(num_columns, tile.block_n), triton.cdiv(num_rows, tile.block_m))](
        x, data, nothing, nothing if offset is None else offset, out if bias is None else bias,
        out if residual is None else residual, out,
        num_rows, num_columns, inner, num_runs, data.stride(0), 0 if scale is None else scale.stride(0), x.stride(0),
        0 if residual is None else residual.stride(0),
        KIND=kind, PART=part, GROUP=group, EVEN=even, HAS_SCALE=scale is not None, HAS_OFFSET=offset is not None,
        GATED=int(gated), HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, IEEE=x.dtype == torch.float32,
        FAST=x.is_cuda and x.dtype == torch.bfloat16, SLICES=tile.slices, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
        STAGES=tile.stages, MANY=bool(gated) or (not exact and tile.block_n >= 64), EARLY=early,
        num_warps=tile.warps, num_stages=tile.stages,
        **launch.options(bool(early)),
    )  # fmt: skip
    return out


def tile_for(
    num_rows: int, num_columns: int, inner: int, num_parts: int, gated: int, exact: bool, num_bytes: int
) -> Tile:
    """Measured on an H200 (docs/diary.md). Only the number of slices, and 64 outputs, change the order of a sum."""
    block_m = 8 if num_rows <= 8 else 16 if num_rows <= 16 else 32
    slices = 8 if num_parts > 1 and inner >= LONG and block_m < 32 and not exact and not gated else 4
    block_n = 16 if block_m == 8 or (gated and num_parts < 4) else 32
    if num_parts > 1 and not gated and num_columns >= MANY:
        block_n = 32
    if num_parts == 4:  # inputs count as much as weights: more outputs share them
        slices = 8 if slices == 8 and block_m == 16 else 4
        if gated or num_rows > 1 or num_columns <= FEW:
            block_n = 32
        if num_rows > 32:
            block_n = 64 if not gated else 32
        elif block_m == 8 and (num_rows > 1 if gated else num_columns >= MANY):
            block_n = 64
    stages = 3 if gated or block_m == 32 or (block_m == 16 and num_parts > 1 and slices == 4) else 4
    if num_parts == 1 and block_m == 8 and inner < LONG:
        stages = 3
    if block_m == 8 and num_parts == 4:
        stages = 3 if block_n == 64 else 2 if gated else stages
    matrices = 2 if gated else 1
    while stages > 2 and stages * slices * 128 * num_bytes * (block_n * matrices / num_parts + block_m) > MAX_SHARED:
        stages -= 1
    return Tile(slices, block_m, block_n, stages)
