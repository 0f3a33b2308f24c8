"""y = x W^T for more rows than a few, and a weight in few bits: a program's warps share one product, whose weights go
from registers to the tensor cores as soon as they are widened. Where outputs are few, several programs share the inputs
of one, and a second launch adds up their sums in their order."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu import gates, launch, sliced, widen
from outrider.kernels.gpu.epilogue import beside, finish
from outrider.kernels.gpu.sums import operand
from outrider.kernels.quantised import Quantised

MAX_BLOCK = 64  # rows of a program: more do not fit into registers
MAX_SPLIT = 4
MIN_RUNS = 16  # of a part, about: shorter ones are not worth a second launch
BLOCK = 1024  # outputs whose parts a program adds up


@dataclass(frozen=True)
class Tile:
    block_n: int  # outputs of a program; of gates, and as many ups
    stages: int
    warps: int = 4
    split: int = 1  # programs that share an output's inputs


@triton.jit(do_not_specialize=["num_rows"])  # compiled once for any number
def _wide(
    x, data, scale, offset, bias, residual, out,
    num_rows, num_columns, inner, num_runs, width, scale_stride, x_stride, residual_stride,
    KIND: tl.constexpr, PART: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, HAS_OFFSET: tl.constexpr,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, IEEE: tl.constexpr, FAST: tl.constexpr,
    SPLIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """As sliced._linear, without slices. SPLIT: out [SPLIT, T, N] has the sums of each part of the inputs."""
    PARTS: tl.constexpr = 2 if KIND > 2 else 4
    RUN: tl.constexpr = PARTS * PART
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # programs with the same weights are neighbours
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    near = tl.minimum(column, num_columns - 1)  # a column that does not exist is computed, and not stored
    place = tl.arange(0, PART)
    if EARLY:
        tl.extra.cuda.gdc_wait()
    row_fits = row < num_rows
    fits = row_fits[None, :] & (column < num_columns)[:, None]
    first_bias, second_bias, more = beside(
        bias, residual, row[None, :], column[:, None], fits, num_columns, residual_stride, GATED, HAS_BIAS, HAS_RESIDUAL
    )
    share = tl.cdiv(num_runs, SPLIT)
    begin = tl.program_id(2) * share
    end = tl.minimum(begin + share, num_runs)
    up = tl.cast(num_columns, tl.int64) * width
    data_at = data + near.to(tl.int64)[:, None] * width + place[None, :]
    x_at = x + row.to(tl.int64)[:, None] * x_stride
    whole = tl.arange(0, RUN)
    scale_at, offset_at = scale + near, offset + near
    total = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    second = tl.zeros_like(total)
    for run in tl.range(begin, end, num_stages=STAGES):
        number = run * RUN
        at = number + tl.arange(0, 1)
        if PARTS == 4 and (GROUP == 0 or GROUP >= RUN):
            inside = (number + whole)[None, :] < inner
            a = tl.load(x_at + number + whole[None, :], mask=row_fits[:, None] & (EVEN | inside), other=0.0).T
            bits = tl.load(data_at + run * PART)
            total = widen.plus_whole(
                total, bits, a, scale_at, offset_at, at, inner, scale_stride, KIND, GROUP, EVEN, HAS_OFFSET, IEEE, FAST
            )
            if GATED:
                bits = tl.load(data_at + up + run * PART)
                second = widen.plus_whole(
                    second, bits, a, scale_at + num_columns, offset_at + num_columns, at, inner, scale_stride, KIND,
                    GROUP, EVEN, HAS_OFFSET, IEEE, FAST,
                )  # fmt: skip
        else:
            first = x_at + number + place[None, :]
            inside = (number + place)[None, :] < inner
            a0 = tl.load(first, mask=row_fits[:, None] & (EVEN | inside), other=0.0).T
            inside = (number + PART + place)[None, :] < inner
            a1 = tl.load(first + PART, mask=row_fits[:, None] & (EVEN | inside), other=0.0).T
            a2, a3 = a1, a1
            if PARTS > 2:
                inside = (number + 2 * PART + place)[None, :] < inner
                a2 = tl.load(first + 2 * PART, mask=row_fits[:, None] & (EVEN | inside), other=0.0).T
                inside = (number + 3 * PART + place)[None, :] < inner
                a3 = tl.load(first + 3 * PART, mask=row_fits[:, None] & (EVEN | inside), other=0.0).T
            m0, m1, m2, m3 = 0.0, 0.0, 0.0, 0.0
            if HAS_OFFSET:
                m0, m1 = tl.sum(a0.to(tl.float32), 0), tl.sum(a1.to(tl.float32), 0)
                m2, m3 = m1, m1
                if PARTS > 2:
                    m2, m3 = tl.sum(a2.to(tl.float32), 0), tl.sum(a3.to(tl.float32), 0)
            bits = tl.load(data_at + run * PART)
            total = widen.plus(
                total, bits, a0, a1, a2, a3, m0, m1, m2, m3, scale_at, offset_at, at, inner, scale_stride,
                KIND, PART, GROUP, EVEN, HAS_OFFSET, IEEE, FAST, False,
            )  # fmt: skip
            if GATED:
                bits = tl.load(data_at + up + run * PART)
                second = widen.plus(
                    second, bits, a0, a1, a2, a3, m0, m1, m2, m3, scale_at + num_columns, offset_at + num_columns, at,
                    inner, scale_stride, KIND, PART, GROUP, EVEN, HAS_OFFSET, IEEE, FAST, False,
                )  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    if GROUP == 0:
        total *= tl.load(scale_at).to(tl.float32)[:, None]
        if GATED:
            second *= tl.load(scale_at + num_columns).to(tl.float32)[:, None]
    if SPLIT > 1:
        out += tl.program_id(2).to(tl.int64) * num_rows * num_columns
    finish(
        total, second, first_bias, second_bias, more, out, row[None, :], column[:, None], fits, num_columns,
        GATED, HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip


@triton.jit
def _add_up(
    parts, bias, residual, out, num_rows, num_columns, residual_stride,
    SPLIT: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    fits = column < num_columns
    first_bias, second_bias, more = beside(
        bias, residual, row, column, fits, num_columns, residual_stride, False, HAS_BIAS, HAS_RESIDUAL
    )
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for part in tl.static_range(SPLIT):
        at = (row + part * num_rows).to(tl.int64) * num_columns + column
        total += tl.load(parts + at, mask=fits, other=0.0)
    finish(
        total, total, first_bias, second_bias, more, out, row, column, fits, num_columns, False, HAS_BIAS, HAS_RESIDUAL
    )


def linear(
    x: Tensor,
    weight: Quantised,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    gated: int = gates.NONE,
    out: Tensor | None = None,
    tile: Tile | None = None,
) -> Tensor:
    """x [T, in], weight [out, in] -> [T, out], plus residual [T, out]; `gated`, a gate's number:
    [T, out / 2], act(gate) * up. A row's bits may depend on how many there are."""
    form = operand(weight)
    x = form.ordered(x)
    x = x if x.stride(-1) == 1 else x.contiguous()
    residual = residual if residual is None or residual.stride(-1) == 1 else residual.contiguous()
    num_rows, inner = x.shape
    num_columns = form.num_rows // 2 if gated else form.num_rows
    out = x.new_empty(num_rows, num_columns) if out is None else out
    if not num_rows:
        return out
    block_m = min(max(triton.next_power_of_2(num_rows), 16), MAX_BLOCK)
    tile = tile or tile_for(num_rows, num_columns, triton.cdiv(inner, form.run), form.num_parts, gated)
    early, scale = launch.early(x), form.scale
    assert scale is not None
    split = min(tile.split, triton.cdiv(inner, form.run)) if not gated else 1
    sums = out if split == 1 else torch.empty(split, num_rows, num_columns, dtype=torch.float32, device=x.device)
    has_bias, has_residual = bias is not None, residual is not None
    beside_it = (out if bias is None else bias, out if residual is None else residual)
    residual_stride = 0 if residual is None else residual.stride(0)
    _wide[(triton.cdiv(num_rows, block_m), triton.cdiv(num_columns, tile.block_n), split)](
        x, form.data, scale, scale if form.offset is None else form.offset, *beside_it, sums,
        num_rows, num_columns, inner, triton.cdiv(inner, form.run), form.data.stride(0), scale.stride(0), x.stride(0),
        residual_stride, KIND=form.kind, PART=form.part, GROUP=form.group, EVEN=inner % form.run == 0,
        HAS_OFFSET=form.offset is not None, GATED=int(gated), HAS_BIAS=has_bias and split == 1,
        HAS_RESIDUAL=has_residual and split == 1, IEEE=x.dtype == torch.float32,
        FAST=x.is_cuda and x.dtype == torch.bfloat16, SPLIT=split, BLOCK_M=block_m, BLOCK_N=tile.block_n,
        STAGES=tile.stages, EARLY=early, num_warps=tile.warps, num_stages=tile.stages, **launch.options(early),
    )  # fmt: skip
    if split > 1:
        _add_up[(num_rows, triton.cdiv(num_columns, BLOCK))](
            sums, *beside_it, out, num_rows, num_columns, residual_stride, SPLIT=split, HAS_BIAS=has_bias,
            HAS_RESIDUAL=has_residual, BLOCK=BLOCK, EARLY=early, **launch.options(early),
        )  # fmt: skip
    return out


def tile_for(num_rows: int, num_columns: int, num_runs: int, num_parts: int, gated: int) -> Tile:
    """Measured on an H200 (docs/diary.md). Enough programs for every multiprocessor, where inputs are long enough to
    be shared."""
    large = num_rows > 64 or (num_rows > 16 and (gated or (num_parts == 2 and num_columns >= sliced.MANY)))
    tile = Tile(128, 3, 8) if large else Tile(64, 4 if num_parts == 4 else 3, 4)
    num_programs = triton.cdiv(num_rows, MAX_BLOCK) * triton.cdiv(num_columns, tile.block_n)
    split, wanted = 1, 90 if large else 180 if num_parts == 4 else 200
    while not gated and split < MAX_SPLIT and num_programs * split < wanted and num_runs // split >= MIN_RUNS:
        split *= 2
    return replace(tile, split=split)


def is_for(num_rows: int, num_columns: int, inner: int, num_parts: int, gated: int) -> bool:
    """Whether it is faster than slices; measured on an H200."""
    if num_rows > 32:
        return True
    if num_rows > 16:
        return bool(gated) or num_columns >= sliced.MANY or inner >= sliced.LONG
    if num_rows > 8 and num_parts == 4:
        return bool(gated) or num_columns >= sliced.MANY or (num_columns <= sliced.FEW and inner < sliced.LONG)
    return False
