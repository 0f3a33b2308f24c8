"""Drafting in parallel: a mask token stands in the places after the newest token, and one pass guesses them all.
What P-EAGLE and PARD share: which token is the mask, which rows are masked, and the choice of all tokens at once."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.drafters.base import SHARPNESS, Extension
from outrider.drafters.reader import Reader
from outrider.kernels.sampling import choose
from outrider.types import Batch, Draft, Resolved, Step


def resolve_mask_token(config: dict[str, Any], vocab_size: int) -> Resolved:
    """The mask token's id, which must be one of the `vocab_size` that are embedded, and where it was read."""
    token = Reader(config).mask_token()
    if not 0 <= token.value < vocab_size:
        raise ValueError(f"{token.source} = {token.value} is no token id that is embedded: ids are 0..{vocab_size - 1}")
    return token


def num_masked(step: Step) -> int:
    """How many rows are masked: the newest token's own row already gives the first draft token."""
    return max(step.depth - 1, 0)


def mask_rows(extension: Extension, step: Step, token: int) -> tuple[Batch, Tensor]:
    """The extension's rows with the mask token in those that follow each request's last, and which they are [T]."""
    batch = extension.batch
    row = torch.arange(len(batch.input_ids), device=batch.input_ids.device)
    ahead = row - extension.last[batch.request]
    masked = (ahead > 0) & (ahead <= num_masked(step))
    return replace(batch, input_ids=torch.where(masked, token, batch.input_ids)), masked


def draft_rows(extension: Extension, step: Step) -> Tensor:
    """The rows that say a draft token, [B * depth]: each request's last, and the masked ones after it."""
    ahead = torch.arange(step.depth, device=extension.last.device)
    return (extension.last[:, None] + ahead).flatten()


def draft_at_once(
    step: Step, lookahead: int, logits: Tensor, ids: Tensor | None = None, sharpness: float = SHARPNESS
) -> Draft:
    """All draft tokens from their logits [B * depth, V], with the target's own noise. `ids` as in draft_chain()."""
    slots, depth = step.batch.slots, step.depth
    row_slots = slots.repeat_interleave(depth)
    places = (step.state.lengths[slots][:, None] + torch.arange(depth, device=slots.device)).flatten()
    chosen = choose(logits, step.sampling, row_slots, places, ids, sharpness=sharpness)
    tokens = torch.zeros(len(slots), lookahead, dtype=torch.long, device=slots.device)
    tokens[:, :depth] = chosen.view(len(slots), depth)
    return Draft(tokens, torch.where(step.emits, depth, 0))
