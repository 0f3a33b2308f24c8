"""The weighed sum of what a row's experts have answered, one by one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu import launch

BLOCK = 512  # columns that a program adds up


@triton.jit
def _sum_up(
    answers, shares, residual, out, num_columns, residual_stride,
    CHOSEN: tl.constexpr, HAS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Of a row's experts [T, k, N], by their shares, in their order; all of them are asked for at once."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    fits = column < num_columns
    kind: tl.constexpr = out.dtype.element_ty
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    answers_of, shares_of = (), ()
    for place in tl.static_range(CHOSEN):
        pair = row * CHOSEN + place
        answer = tl.load(answers + pair * num_columns + column, mask=fits, other=0.0)
        answers_of = answers_of + (answer,)  # type: ignore[assignment] # noqa: RUF005
        shares_of = shares_of + (tl.load(shares + pair),)  # type: ignore[assignment] # noqa: RUF005
    more = tl.zeros((BLOCK,), dtype=kind)
    if HAS_RESIDUAL:
        more = tl.load(residual + row * residual_stride + column, mask=fits, other=0.0)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for place in tl.static_range(CHOSEN):
        total += answers_of[place] * shares_of[place].to(kind).to(tl.float32)
    if HAS_RESIDUAL:
        total = total.to(kind).to(tl.float32) + more.to(tl.float32)
    tl.store(out + row * num_columns + column, total.to(kind), mask=fits)


def sum_up(answers: Tensor, shares: Tensor, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
    """answers [T * k, N] in float32, shares [T, k] -> [T, N], plus the residual."""
    (num_rows, num_chosen), num_columns = shares.shape, answers.shape[1]
    out, early = answers.new_empty(num_rows, num_columns, dtype=dtype), launch.early(answers)
    _sum_up[(num_rows, triton.cdiv(num_columns, BLOCK))](
        answers, shares, out if residual is None else residual, out, num_columns,
        0 if residual is None else residual.stride(0), CHOSEN=num_chosen, HAS_RESIDUAL=residual is not None,
        BLOCK=BLOCK, EARLY=early, num_warps=4, **launch.options(early),
    )  # fmt: skip
    return out
