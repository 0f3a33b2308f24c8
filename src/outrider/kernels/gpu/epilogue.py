"""What follows a product of matrices on its way out: bias, silu(gate) * up, residual, rounding."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def finish(
    total, second, bias, residual, out, row, column, fits, num_columns, residual_stride,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Stores float32 sums; row and column broadcast to their shape. GATED: `total` is of gates, `second` of ups."""
    kind = out.dtype.element_ty
    column_fits = column < num_columns
    if HAS_BIAS:
        total += tl.load(bias + column, mask=column_fits, other=0.0).to(tl.float32)
        if GATED:
            second += tl.load(bias + num_columns + column, mask=column_fits, other=0.0).to(tl.float32)
    if GATED:
        gate = total.to(kind).to(tl.float32)
        total = (gate / (1 + tl.exp(-gate))).to(kind).to(tl.float32) * second.to(kind).to(tl.float32)
    if HAS_RESIDUAL:
        at = residual + row.to(tl.int64) * residual_stride + column
        total = total.to(kind).to(tl.float32) + tl.load(at, mask=fits, other=0.0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * num_columns + column, total.to(kind), mask=fits)
