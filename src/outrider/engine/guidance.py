"""What grammars say about a round, written down on the host for the device; see Guidance."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.engine.masks import Unfilled, fill_masks
from outrider.engine.request import Work
from outrider.types import RoundShape


def guidance_of(plan: Sequence[Work], shape: RoundShape, num_judged: int) -> tuple[Tensor, Tensor] | None:
    """Head [B, 3 J] and bits [G, W] of a plan whose requests' drafts are known, None where no grammar has a say in it.
    `num_judged`: J."""
    head: Tensor | None = None
    bits: list[Tensor | Unfilled] = []
    for seat, work in enumerate(plan):
        guide = work.request.guide
        if guide is None or not work.emits or not work.is_current:
            continue
        draft = work.request.draft[: work.allowed]
        masks = guide.masks(draft)
        if not masks:
            continue
        row = [0] * (3 * num_judged)
        for place, mask in masks:
            bits.append(mask)
            row[place] = len(bits)
        if shape.depth:
            forced = guide.forced(1 + len(draft) + shape.depth)
            row[num_judged : num_judged + 1 + len(forced)] = [len(forced), *forced]
        if head is None:
            head = torch.zeros(shape.num_seats, 3 * num_judged, dtype=torch.int32)
        head[seat] = torch.tensor(row, dtype=torch.int32)
    return None if head is None else (head, fill_masks(bits))
