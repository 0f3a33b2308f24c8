"""Root-mean-square norm, one program a row."""

import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu import launch


@triton.jit
def _rms_norm(
    x, weight, residual, out, size, out_stride, row_stride, inner_stride, per_row, residual_stride, eps, offset,
    HAS_WEIGHT: tl.constexpr, HAS_RESIDUAL: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    fits = place < size
    start = (row // per_row) * row_stride + (row % per_row) * inner_stride
    value = tl.load(x + start + place, mask=fits, other=0.0).to(tl.float32)
    value = value * tl.rsqrt(tl.sum(value * value) / size + eps)
    kind = out.dtype.element_ty
    if HAS_WEIGHT:
        scale = tl.load(weight + place, mask=fits, other=0.0).to(tl.float32) + offset
        value = value * scale if WIDE else value.to(kind).to(tl.float32) * scale
    if HAS_RESIDUAL:
        more = tl.load(residual + row * residual_stride + place, mask=fits, other=0.0)
        value = value.to(kind).to(tl.float32) + more.to(tl.float32)
    tl.store(out + row * out_stride + place, value.to(kind), mask=fits)


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    offset: float = 0.0,
    wide: bool = False,
    out: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """x [T, H] or [T, heads, D] (heads of a wider row, too), weight [H] or None -> the same shape, contiguous, or in
    `out` [T, H], whose rows may be part of wider ones; plus the residual [T, H]."""
    residual = residual if residual is None or residual.stride(-1) == 1 else residual.contiguous()
    size = x.shape[-1]
    if x.dim() > 3 or x.stride(-1) != 1:
        x = x.contiguous().view(-1, size) if x.dim() > 3 else x.contiguous()
    out = x.new_empty(x.shape) if out is None else out
    per_row = x.shape[1] if x.dim() == 3 else 1
    num_rows = out.numel() // size if size else 0
    if num_rows:
        block, early = triton.next_power_of_2(size), launch.early(x)
        _rms_norm[(num_rows,)](
            x, out if weight is None else weight, out if residual is None else residual, out,
            size, out.stride(-2), x.stride(0), x.stride(-2), per_row, 0 if residual is None else residual.stride(0),
            eps, offset, HAS_WEIGHT=weight is not None, HAS_RESIDUAL=residual is not None, WIDE=wide, BLOCK=block,
            EARLY=early, num_warps=min(max(block // 512, 1), 16), **launch.options(early),
        )  # fmt: skip
    return out
