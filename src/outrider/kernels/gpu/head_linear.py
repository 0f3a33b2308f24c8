"""Every head's rows by that head's own weight: one launch for all heads, into any place."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu import launch

BLOCK_K = 128  # numbers that are added at once, at most: as many for any number of rows, so bits are a row's own
FEW_ROWS = 64


@triton.jit
def _head_linear(
    x, weight, out, num_rows, num_columns, inner,
    x_row, x_head, weight_head, weight_column, weight_place, out_row, out_head,
    IEEE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = (tl.program_id(2) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    place = tl.arange(0, BLOCK_K)
    row_fits, column_fits = row < num_rows, column < num_columns
    x_at = x + head * x_head + row[:, None] * x_row + place[None, :]
    weight_at = weight + head * weight_head + column[None, :] * weight_column + place[:, None] * weight_place
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    precision: tl.constexpr = "ieee" if IEEE else "tf32"
    for shift in range(0, inner, BLOCK_K):
        inside = place + shift < inner
        a = tl.load(x_at + shift, mask=row_fits[:, None] & inside[None, :], other=0.0)
        w = tl.load(weight_at + shift * weight_place, mask=inside[:, None] & column_fits[None, :], other=0.0)
        total = tl.dot(a, w, total, input_precision=precision)
    at = out + head * out_head + row[:, None] * out_row + column[None, :]
    tl.store(at, total.to(out.dtype.element_ty), mask=row_fits[:, None] & column_fits[None, :])


def head_linear(x: Tensor, weight: Tensor, out: Tensor) -> Tensor:
    """x [T, heads, in], weight [heads, out, in] -> out [T, heads, out], whose last dimension is dense."""
    num_rows, num_heads, inner = x.shape
    num_columns, early = weight.shape[1], launch.early(x)
    x = x if x.stride(-1) == 1 else x.contiguous()
    if num_rows:
        block_m = 16
        while block_m < min(num_rows, 64):
            block_m *= 2
        grid = (triton.cdiv(num_columns, 32), num_heads, triton.cdiv(num_rows, block_m))
        _head_linear[grid](
            x, weight, out, num_rows, num_columns, inner, x.stride(0), x.stride(1), *weight.stride(),
            out.stride(0), out.stride(1), IEEE=x.dtype == torch.float32, BLOCK_M=block_m, BLOCK_N=32,
            BLOCK_K=min(max(triton.next_power_of_2(inner), 16), BLOCK_K), EARLY=early, num_warps=4, num_stages=3,
            **launch.options(early),
        )  # fmt: skip
    return out
