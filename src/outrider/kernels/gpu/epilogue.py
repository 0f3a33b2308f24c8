"""What follows a product of matrices on its way out: bias, act(gate) * up, residual, rounding."""

from __future__ import annotations

import triton
import triton.language as tl

from outrider.kernels.gpu.gates import activated


@triton.jit
def beside(
    bias, residual, row, column, fits, num_columns, residual_stride,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """What sums will be added to: biases of gate and up, and the residual. Asked for before the sums are made, it is
    there when they are, and not half a microsecond later. row and column broadcast to the sums' shape."""
    first, second, more = 0.0, 0.0, 0.0
    column_fits = column < num_columns
    if HAS_BIAS:
        first = tl.load(bias + column, mask=column_fits, other=0.0).to(tl.float32)
        if GATED:
            second = tl.load(bias + num_columns + column, mask=column_fits, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        at = residual + row.to(tl.int64) * residual_stride + column
        more = tl.load(at, mask=fits, other=0.0)
    return first, second, more


@triton.jit
def finish(
    total, second, first_bias, second_bias, more, out, row, column, fits, num_columns,
    GATED: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Stores float32 sums, with what is beside() them. GATED, a gate's number: `total` is of gates, `second` of ups."""
    kind = out.dtype.element_ty
    if HAS_BIAS:
        total += first_bias
        if GATED:
            second += second_bias
    if GATED:
        total = activated(total, second, 1.0, 0.0, GATED, kind)
    if HAS_RESIDUAL:
        total = total.to(kind).to(tl.float32) + more.to(tl.float32)
    tl.store(out + row.to(tl.int64) * num_columns + column, total.to(kind), mask=fits)
