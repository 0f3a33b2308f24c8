"""y = x W^T for few rows: every weight is read once, at the speed of memory; what follows it is done on the way out.
This kernel's tiles and the order of its sums depend on the weight's shape alone, so a row's bits do not depend on its
company; others, which are faster for some numbers of rows, are taken where that need not be so."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu import gates, launch, sliced, widen
from outrider.kernels.gpu.epilogue import beside, finish
from outrider.kernels.gpu.hopper import on_hopper
from outrider.kernels.gpu.launch import prefetch

SMALL = 2**22  # numbers in a weight: time goes into starting, not into reading
WIDE = 16384  # outputs that make enough programs for any tile
FEW = 4096  # outputs that leave cuBLAS, too, without enough to do
NARROW = 8192  # outputs: a larger tile would leave most of the device without work


@dataclass(frozen=True)
class Tile:
    block_n: int  # outputs of a program
    block_k: int
    stages: int
    warps: int
    ahead: int = 0  # bytes of every weight row that are fetched before the input is there


@triton.jit(do_not_specialize=["num_rows"])  # compiled once for any number
def _linear(
    x, weight, bias, residual, out, num_rows, num_columns, inner, x_stride, residual_stride,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, EVEN: tl.constexpr, IEEE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, AHEAD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """GATED, a gate's number: the weight's rows are gates, then ups; the result is act(gate) * up."""
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    place = tl.arange(0, BLOCK_K)
    column_fits, row_fits = column < num_columns, row < num_rows
    up_shift = tl.cast(num_columns, tl.int64) * inner
    if EARLY:  # the launch before this one may still be at work; its result is not needed for weights
        if EARLY == 1:
            tl.extra.cuda.gdc_launch_dependents()
        if AHEAD > 0:
            ahead = weight + tl.minimum(column, num_columns - 1).to(tl.int64) * inner
            prefetch(ahead, AHEAD)
            if GATED:
                prefetch(ahead + up_shift, AHEAD)
        tl.extra.cuda.gdc_wait()
    fits = row_fits[:, None] & column_fits[None, :]
    first_bias, second_bias, more = beside(
        bias, residual, row[:, None], column[None, :], fits, num_columns, residual_stride, GATED, HAS_BIAS, HAS_RESIDUAL
    )
    weight_at = weight + column.to(tl.int64)[:, None] * inner + place[None, :]
    x_at = x + row.to(tl.int64)[:, None] * x_stride + place[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    second = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    for shift in range(0, inner, BLOCK_K):
        fits_k = (place + shift < inner)[None, :] | EVEN
        a = tl.load(x_at + shift, mask=row_fits[:, None] & fits_k, other=0.0)
        w = tl.load(weight_at + shift, mask=column_fits[:, None] & fits_k, other=0.0)
        total = tl.dot(a, w.T, total, input_precision=precision)
        if GATED:
            u = tl.load(weight_at + up_shift + shift, mask=column_fits[:, None] & fits_k, other=0.0)
            second = tl.dot(a, u.T, second, input_precision=precision)
    if EARLY == 2:
        tl.extra.cuda.gdc_launch_dependents()
    finish(
        total, second, first_bias, second_bias, more, out, row[:, None], column[None, :], fits, num_columns,
        GATED, HAS_BIAS, HAS_RESIDUAL,
    )  # fmt: skip


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    gated: int = gates.NONE,
    tile: Tile | None = None,
    exact: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """x [T, in], weight [out, in] -> [T, out], plus residual [T, out]; `gated`, a gate's number:
    [T, out / 2], act(gate) * up. `exact`: a row's bits do not depend on how many there are. `out`: where to put the
    result, dense."""
    products = None
    if tile is None and not exact and x.dtype == weight.dtype:
        products = _row_products(len(x), weight, gated, bias is not None)
        products = products or _held(x, weight, residual, gated)
    if products is not None:
        return products.linear(x, weight, bias, residual, gated=gated, out=out)
    if tile is None and not exact and not gated and _is_better_sliced(len(x), weight):
        part = widen.DENSE_PART
        return sliced.linear(
            x, weight, widen.DENSE, bias=bias, residual=residual, part=part, group=0, gated=False, exact=False, out=out
        )
    x = x if x.stride(-1) == 1 else x.contiguous()
    residual = residual if residual is None or residual.stride(-1) == 1 else residual.contiguous()
    num_rows, inner = x.shape
    num_columns = weight.shape[0] // 2 if gated else weight.shape[0]
    out = x.new_empty(num_rows, num_columns) if out is None else out
    if not num_rows:
        return out
    tile = tile or tile_for(num_columns, inner, gated)
    block_m = 16
    while block_m < min(num_rows, 128):
        block_m *= 2
    if block_m > 32:  # compute counts now: larger tiles, and room for them
        stages, warps = (2 if x.dtype == torch.float32 else 3), (4 if block_m == 64 else 8)
        few = num_columns < NARROW and num_rows <= block_m
        tile = Tile(32 if few else 64 if gated or block_m == 64 else 128, 64, stages, warps)
    elif block_m == 32 and gated and num_columns * inner >= SMALL:
        tile = Tile(64, 64, 4, 8)
    early = launch.early(x) and (1 if num_columns * inner < SMALL else 2)
    _linear[(triton.cdiv(num_columns, tile.block_n), triton.cdiv(num_rows, block_m))](
        x, weight, out if bias is None else bias, out if residual is None else residual, out,
        num_rows, num_columns, inner, x.stride(0), 0 if residual is None else residual.stride(0),
        GATED=int(gated), HAS_BIAS=bias is not None, HAS_RESIDUAL=residual is not None, EVEN=inner % tile.block_k == 0,
        IEEE=x.dtype == torch.float32, BLOCK_M=block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k,
        AHEAD=min(tile.ahead, inner * 2) // 16 * 16 if inner % 8 == 0 else 0, EARLY=int(early),
        num_warps=tile.warps, num_stages=tile.stages, **launch.options(bool(early)),
    )  # fmt: skip
    return out


def _is_better_sliced(num_rows: int, weight: Tensor) -> bool:
    """A weight that makes too few programs to hide how long each of them waits."""
    if weight.numel() < SMALL or len(weight) >= WIDE or weight.stride(1) != 1:
        return False
    return num_rows <= (32 if len(weight) <= FEW else 8)


def _row_products(num_rows: int, weight: Tensor, gated: int, has_bias: bool) -> Any:
    """The module that multiplies some hundred rows, where that is faster than cuBLAS."""
    if num_rows <= 32 or has_bias or weight.numel() < SMALL:
        return None
    module = on_hopper("row_products", weight.device)
    if module is None or not module.fits(num_rows, weight):
        return None
    return module if module.is_faster(num_rows, *weight.shape, gated) else None


def _held(x: Tensor, weight: Tensor, residual: Tensor | None, gated: int) -> Any:
    """The module that multiplies few rows, where that is faster."""
    if len(x) > 8 or weight.numel() < SMALL:
        return None
    module = on_hopper("dense_held", weight.device)
    return module if module is not None and module.fits(x, weight, residual, gated) else None


def is_faster(num_rows: int, weight: Tensor, gated: int = gates.NONE, *, has_bias: bool = False) -> bool:
    """Whether it is faster than cuBLAS: with few rows always, with more the smaller the weight, or the wider."""
    if num_rows <= 16 or _is_better_sliced(num_rows, weight):
        return True
    if _row_products(num_rows, weight, gated, has_bias) is not None:
        return True
    if weight.numel() < SMALL:
        return num_rows <= 32
    return num_rows <= 64 and len(weight) >= WIDE


def tile_for(num_columns: int, inner: int, gated: int) -> Tile:
    """Measured on an H200 with 8 rows in bfloat16 (docs/diary.md). The order of a sum is the same in all of them."""
    if num_columns * inner < SMALL:
        if gated:
            return Tile(32, 64, 6, 4, ahead=512)
        return Tile(16, 256, 4, 4, ahead=512) if inner >= 1024 else Tile(16, 128, 6, 4, ahead=512)
    if gated:
        return Tile(32, 128, 3, 4)
    return Tile(64, 128, 4, 4) if num_columns >= 16384 else Tile(32, 128, 6, 4)
