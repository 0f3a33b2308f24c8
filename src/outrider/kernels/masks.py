"""What a grammar forbids is taken out of the logits, on the rows that it has a say in."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.kernels.dispatch import use_triton
from outrider.types import Guidance


def restrict(logits: Tensor, own: Tensor, guidance: Guidance, judged_start: Tensor) -> None:
    """-inf in logits [L, V] where a grammar forbids. It has the last word: where the options that made them from the
    target's `own` [L, V] leave nothing of what it allows (an end token under min_tokens, say), they yield. The two may
    be one tensor. judged_start [B + 1]: where the rows of each request begin."""
    if use_triton(logits):
        from outrider.kernels.gpu import masks as gpu

        gpu.restrict(logits, own, guidance, judged_start)
    else:
        restrict_reference(logits, own, guidance, judged_start)


def restrict_reference(logits: Tensor, own: Tensor, guidance: Guidance, judged_start: Tensor) -> None:
    seats, places = guidance.masks.nonzero().unbind(1)
    rows = judged_start[seats].long() + places
    inside = rows < judged_start[seats + 1]
    seats, places, rows = seats[inside], places[inside], rows[inside]
    ids = torch.arange(logits.shape[-1], device=logits.device)
    bits = guidance.bits[guidance.masks[seats, places].long() - 1]
    forbidden = (bits[:, ids // 32] >> (ids % 32)) & 1 == 0  # [G, V]
    kept = logits[rows].masked_fill(forbidden, -torch.inf)
    nothing = kept.amax(-1, keepdim=True) == -torch.inf
    logits[rows] = torch.where(nothing, own[rows].to(kept.dtype).masked_fill(forbidden, -torch.inf), kept)
