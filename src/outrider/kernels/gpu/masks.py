"""What grammars forbid, taken out of the logits in place; kernels/masks.py says how. Rows without a mask cost a look at
one number."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu import launch
from outrider.types import Guidance

BLOCK = 4096


@triton.jit
def _mask_and_row(masks, judged_start, masks_row, num_judged):
    """Of program (seat * num_judged + place, block): which mask, 0 if none, and whose row of the logits."""
    seat, place = tl.program_id(0) // num_judged, tl.program_id(0) % num_judged
    row = tl.load(judged_start + seat) + place
    mask = tl.load(masks + seat * masks_row + place)
    return tl.where(row < tl.load(judged_start + seat + 1), mask, 0), row.to(tl.int64)


@triton.jit
def _allowed(bits, mask, column, fits, num_words):
    word = tl.load(bits + (mask - 1).to(tl.int64) * num_words + column // 32, mask=fits, other=0)
    return ((word >> (column % 32)) & 1) == 1


@triton.jit
def _restrict(
    logits, masks, bits, judged_start, found, masks_row, num_judged, row_stride, width, num_words, num_blocks,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """`found`: whether anything is left of this block."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    mask, row = _mask_and_row(masks, judged_start, masks_row, num_judged)
    if mask == 0:
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    fits = column < width
    at = logits + row * row_stride + column
    value = tl.load(at, mask=fits, other=float("-inf"))
    value = tl.where(_allowed(bits, mask, column, fits, num_words), value, float("-inf"))
    tl.store(at, value, mask=fits)
    is_left = (tl.max(value.to(tl.float32)) != float("-inf")).to(tl.int32)
    tl.store(found + tl.program_id(0) * num_blocks + tl.program_id(1), is_left)


@triton.jit
def _yield_to_masks(
    logits, own, masks, bits, judged_start, found, masks_row, num_judged, row_stride, own_stride, width, num_words,
    num_blocks, BLOCK: tl.constexpr, BLOCKS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Rows of which nothing is left become what the target itself says about what is allowed."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    mask, row = _mask_and_row(masks, judged_start, masks_row, num_judged)
    if mask == 0:
        return
    block = tl.arange(0, BLOCKS)
    if tl.max(tl.load(found + tl.program_id(0) * num_blocks + block, mask=block < num_blocks, other=0)) > 0:
        return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    fits = column < width
    value = tl.load(own + row * own_stride + column, mask=fits, other=float("-inf")).to(tl.float32)
    value = tl.where(_allowed(bits, mask, column, fits, num_words), value, float("-inf"))
    tl.store(logits + row * row_stride + column, value, mask=fits)


def restrict(logits: Tensor, own: Tensor, guidance: Guidance, judged_start: Tensor) -> None:
    num_seats, num_judged = guidance.masks.shape
    width, early = logits.shape[1], launch.early(logits)
    num_blocks = triton.cdiv(width, BLOCK)
    found = torch.empty(num_seats * num_judged, num_blocks, dtype=torch.int32, device=logits.device)
    grid = num_seats * num_judged, num_blocks
    given = guidance.masks, guidance.bits, judged_start, found, guidance.masks.stride(0), num_judged
    _restrict[grid](
        logits, *given, logits.stride(0), width, guidance.bits.shape[1], num_blocks,
        BLOCK=BLOCK, EARLY=early, **launch.options(early),
    )  # fmt: skip
    if own is not logits:
        _yield_to_masks[grid](
            logits, own, *given, logits.stride(0), own.stride(0), width, guidance.bits.shape[1], num_blocks,
            BLOCK=BLOCK, BLOCKS=triton.next_power_of_2(num_blocks), EARLY=early, **launch.options(early),
        )  # fmt: skip
