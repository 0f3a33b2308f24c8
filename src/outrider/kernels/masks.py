"""What a grammar forbids is taken out of the logits, on the rows that it has a say in."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.kernels import native_sampling
from outrider.kernels.dispatch import use_native, use_triton
from outrider.kernels.sampling import Columns
from outrider.types import Guidance


def restrict(
    logits: Tensor, own: Tensor, guidance: Guidance, judged_start: Tensor, columns: Columns | None = None
) -> None:
    """-inf in logits [L, V] where a grammar forbids. It has the last word: where the options that made them from the
    target's `own` [L, V] leave nothing of what it allows (an end token under min_tokens, say), they yield. The two may
    be one tensor. judged_start [B + 1]: where the rows of each request begin. `columns`: which ids the logits are
    about, where they are not about all."""
    if use_triton(logits) and columns is None:
        from outrider.kernels.gpu import masks as gpu

        gpu.restrict(logits, own, guidance, judged_start)
    elif use_native(logits) and use_native(own) and columns is None:
        native_sampling.restrict(logits, own, guidance, judged_start)
    else:
        restrict_reference(logits, own, guidance, judged_start, columns)


def restrict_reference(
    logits: Tensor, own: Tensor, guidance: Guidance, judged_start: Tensor, columns: Columns | None = None
) -> None:
    seats, places = guidance.masks.nonzero().unbind(1)
    rows = judged_start[seats].long() + places
    inside = rows < judged_start[seats + 1]
    seats, places, rows = seats[inside], places[inside], rows[inside]
    ids = torch.arange(logits.shape[-1], device=logits.device)
    if columns is not None:
        ids = columns.ids(logits.device).clamp(max=columns.vocab_size - 1)
    bits = guidance.bits[guidance.masks[seats, places].long() - 1]
    forbidden = (bits[:, ids // 32] >> (ids % 32)) & 1 == 0  # [G, V]
    kept = logits[rows].masked_fill(forbidden, -torch.inf)
    highest = kept.amax(-1)
    if columns is not None:
        highest = columns.highest(highest)
    nothing = highest[:, None] == -torch.inf
    logits[rows] = torch.where(nothing, own[rows].to(kept.dtype).masked_fill(forbidden, -torch.inf), kept)
