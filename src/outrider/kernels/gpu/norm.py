"""Root-mean-square norm, one program a row."""

import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu import launch
from outrider.kernels.norm import Normed


@triton.jit
def _rms_norm(
    x, weight, residual, next_weight, out, next_out,
    size, out_stride, row_stride, inner_stride, per_row, residual_stride, eps, offset, next_eps, next_offset,
    HAS_WEIGHT: tl.constexpr, HAS_RESIDUAL: tl.constexpr, WIDE: tl.constexpr, HAS_NEXT: tl.constexpr,
    NEXT_WIDE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.arange(0, BLOCK)
    fits = place < size
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
    # everything is asked for before the first sum: what is asked for behind one waits for memory once more
    if HAS_WEIGHT:
        scale = tl.load(weight + place, mask=fits, other=0.0).to(tl.float32) + offset
    if HAS_NEXT:
        next_scale = tl.load(next_weight + place, mask=fits, other=0.0).to(tl.float32) + next_offset
    if EARLY:
        tl.extra.cuda.gdc_wait()
    start = (row // per_row) * row_stride + (row % per_row) * inner_stride
    value = tl.load(x + start + place, mask=fits, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        more = tl.load(residual + row * residual_stride + place, mask=fits, other=0.0)
    value = value * tl.rsqrt(tl.sum(value * value) / size + eps)
    kind = out.dtype.element_ty
    if HAS_WEIGHT:
        value = value * scale if WIDE else value.to(kind).to(tl.float32) * scale
    if HAS_RESIDUAL:
        value = value.to(kind).to(tl.float32) + more.to(tl.float32)
    tl.store(out + row * out_stride + place, value.to(kind), mask=fits)
    if HAS_NEXT:
        value = value.to(kind).to(tl.float32)
        value = value * tl.rsqrt(tl.sum(value * value) / size + next_eps)
        value = value * next_scale if NEXT_WIDE else value.to(kind).to(tl.float32) * next_scale
        tl.store(next_out + row * size + place, value.to(kind), mask=fits)


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
    size = x.shape[-1]
    if x.dim() > 3 or x.stride(-1) != 1:
        x = x.contiguous().view(-1, size) if x.dim() > 3 else x.contiguous()
    out = x.new_empty(x.shape) if out is None else out
    _run(x, weight, eps, offset, wide, out, residual, None, out)
    return out


def normed_twice(x: Normed, residual: Tensor, following: Normed) -> tuple[Tensor, Tensor]:
    """x [T, H], normed, plus the residual [T, H]; and that, normed in turn as `following`, whose rows do not matter."""
    rows = x.x if x.x.stride(-1) == 1 else x.x.contiguous()
    out, next_out = rows.new_empty(2, *rows.shape).unbind()
    _run(rows, x.weight, x.eps, x.offset, x.wide, out, residual, following, next_out)
    return out, next_out


def _run(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float,
    wide: bool,
    out: Tensor,
    residual: Tensor | None,
    following: Normed | None,
    next_out: Tensor,
) -> None:
    residual = residual if residual is None or residual.stride(-1) == 1 else residual.contiguous()
    size = x.shape[-1]
    per_row = x.shape[1] if x.dim() == 3 else 1
    num_rows = out.numel() // size if size else 0
    if num_rows:
        block, early = triton.next_power_of_2(size), launch.early(x)
        _rms_norm[(num_rows,)](
            x, out if weight is None else weight, out if residual is None else residual,
            out if following is None else following.weight, out, next_out,
            size, out.stride(-2), x.stride(0), x.stride(-2), per_row, 0 if residual is None else residual.stride(0),
            eps, offset, 0.0 if following is None else following.eps, 0.0 if following is None else following.offset,
            HAS_WEIGHT=weight is not None, HAS_RESIDUAL=residual is not None, WIDE=wide,
            HAS_NEXT=following is not None, NEXT_WIDE=following is not None and following.wide, BLOCK=block,
            EARLY=early, num_warps=min(max(block // 512, 1), 16), **launch.options(early),
        )  # fmt: skip
