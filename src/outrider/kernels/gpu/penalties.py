"""Penalties without a pass over the logits: a text is walked through twice, first to count, then to change the logits
of each token that it holds, once. Rows without a penalty cost nothing."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.types import Sampling

CHUNK = 512  # tokens of a text that a program walks through
IN_PROMPT = 1 << 30  # marks a token that the prompt holds; below it, how often the answer does


@triton.jit
def _count(
    counts, slots, last, texts, prompt_len, repetition, presence, frequency, text_row, size,
    CHUNK: tl.constexpr, IN_PROMPT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    slot, end = tl.load(slots + row), tl.load(last + row) + 1
    begin = tl.program_id(1) * CHUNK
    repeated = tl.load(repetition + slot) != 1
    if (begin < end) & (repeated | (tl.load(presence + slot) != 0) | (tl.load(frequency + slot) != 0)):
        place = begin + tl.arange(0, CHUNK)
        token = tl.load(texts + slot * text_row + place, mask=place < end, other=0)
        answers = place >= tl.load(prompt_len + slot)
        at = counts + row * size + token
        tl.atomic_add(at, 1, mask=(place < end) & answers, sem="relaxed")
        tl.atomic_or(at, IN_PROMPT, mask=(place < end) & (answers == 0), sem="relaxed")


@triton.jit
def _apply(
    logits, counts, slots, last, texts, repetition, presence, frequency, text_row, size,
    CHUNK: tl.constexpr, IN_PROMPT: tl.constexpr,
):  # fmt: skip
    """Of all places of a text that hold the same token, the first takes the count, and leaves 0 to the others."""
    row = tl.program_id(0).to(tl.int64)
    slot, end = tl.load(slots + row), tl.load(last + row) + 1
    begin = tl.program_id(1) * CHUNK
    factor, per_text, per_token = tl.load(repetition + slot), tl.load(presence + slot), tl.load(frequency + slot)
    if (begin < end) & ((factor != 1) | (per_text != 0) | (per_token != 0)):
        place = begin + tl.arange(0, CHUNK)
        token = tl.load(texts + slot * text_row + place, mask=place < end, other=0)
        found = tl.atomic_xchg(counts + row * size + token, 0, mask=place < end, sem="relaxed")
        mine = (place < end) & (found != 0)
        count = (found & (IN_PROMPT - 1)).to(tl.float32)
        logit = tl.load(logits + row * size + token, mask=mine, other=0.0)
        logit = tl.where(logit > 0, tl.div_rn(logit, factor + place * 0.0), logit * factor)
        logit = logit - per_token * count
        logit = logit - tl.where(count > 0, per_text, 0.0)
        tl.store(logits + row * size + token, logit, mask=mine)


def penalise(logits: Tensor, sampling: Sampling, slots: Tensor, last: Tensor, texts: Tensor, max_len: int) -> None:
    num_rows, size = logits.shape
    assert logits.is_contiguous()
    if not num_rows:
        return
    counts = torch.zeros(num_rows, size, dtype=torch.int32, device=logits.device)
    grid = (num_rows, triton.cdiv(max_len, CHUNK))
    options = sampling.repetition, sampling.presence, sampling.frequency
    _count[grid](
        counts, slots, last, texts, sampling.prompt_len, *options, texts.stride(0), size,
        CHUNK=CHUNK, IN_PROMPT=IN_PROMPT,
    )  # fmt: skip
    _apply[grid](
        logits, counts, slots, last, texts, *options, texts.stride(0), size, CHUNK=CHUNK, IN_PROMPT=IN_PROMPT
    )  # fmt: skip
