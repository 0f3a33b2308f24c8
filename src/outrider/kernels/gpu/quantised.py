"""Products with matrices in few bits, and what these stand for, on a GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu import gates, product_parts, sliced, wide, widen
from outrider.kernels.gpu.hopper import on_hopper
from outrider.kernels.quantised import Quantised, scales

BLOCK = 1024  # words that a program widens


def linear(
    x: Tensor,
    weight: Quantised,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    *,
    gated: int = gates.NONE,
    exact: bool = False,
    out: Tensor | None = None,
) -> Tensor:
    """x [T, in], weight [out, in] -> [T, out], plus residual [T, out]; `gated`, a gate's number:
    [T, out / 2], act(gate) * up. `exact`: a row's bits do not depend on how many there are. `out`: where to put the
    result, dense."""
    num_columns = len(weight.data) // 2 if gated else len(weight.data)
    held = on_hopper("held", x.device) if not exact and x.dtype == torch.bfloat16 else None
    if held is not None:
        product_parts.counters_for(x.device, 0)  # they are made here, whoever comes first: not within a recording
    if held is not None and held.fits(x, weight, residual, gated):
        return held.linear(x, weight, bias, residual, gated=gated, out=out)
    if not exact and wide.is_for(len(x), num_columns, weight.num_columns, weight.kind.num_parts, gated):
        return wide.linear(x, weight, bias, residual, gated=gated, out=out)
    if weight.order is not None:
        x = x.index_select(1, weight.order)
    is_flat = len(weight.scale) == 1 and weight.offset is None
    return sliced.linear(
        x,
        weight.data,
        widen.NUMBERS[weight.kind],
        weight.scale,
        weight.offset,
        bias,
        residual,
        part=weight.part,
        group=0 if is_flat else weight.group,
        gated=gated,
        exact=exact,
        out=out,
    )


@triton.jit
def _dense(
    data, scale, offset, order, out, num_words, inner, scale_stride,
    KIND: tl.constexpr, PARTS: tl.constexpr, PART: tl.constexpr, GROUP: tl.constexpr,
    HAS_OFFSET: tl.constexpr, HAS_ORDER: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A program widens some words of a row."""
    row = tl.program_id(0).to(tl.int64)
    word = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    bits = tl.load(data + row * num_words + word, mask=word < num_words, other=0)
    for part in tl.static_range(PARTS):
        place = word // PART * (PARTS * PART) + part * PART + word % PART
        fits = (word < num_words) & (place < inner)
        number = widen.number_of(bits, part, PARTS, KIND)
        at = place // GROUP * scale_stride + row
        value = widen.widened(number, KIND, tl.float32) * tl.load(scale + at, mask=fits, other=0.0).to(tl.float32)
        if HAS_OFFSET:
            value += tl.load(offset + at, mask=fits, other=0.0).to(tl.float32)
        if HAS_ORDER:
            place = tl.load(order + place, mask=fits, other=0)
        tl.store(out + row * inner + place, value.to(out.dtype.element_ty), mask=fits)


def dense(weight: Quantised, dtype: torch.dtype) -> Tensor:
    num_rows, num_words = weight.data.shape
    scale = scales(weight) if weight.has_exponents else weight.scale
    out = torch.empty(num_rows, weight.num_columns, dtype=dtype, device=weight.data.device)
    _dense[(num_rows, triton.cdiv(num_words, BLOCK))](
        weight.data, scale, scale if weight.offset is None else weight.offset,
        weight.data if weight.order is None else weight.order, out, num_words, weight.num_columns,
        scale.stride(0), KIND=widen.NUMBERS[weight.kind], PARTS=weight.kind.num_parts, PART=weight.part,
        GROUP=weight.group, HAS_OFFSET=weight.offset is not None, HAS_ORDER=weight.order is not None, BLOCK=BLOCK,
    )  # fmt: skip
    return out
