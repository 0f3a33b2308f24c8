"""The one pipeline between logits and tokens. It runs on every row, drafts included, each with its own prefix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.penalties import penalise
from outrider.kernels.sampling import choose
from outrider.types import Batch, Sampling, SlotState


@dataclass(frozen=True)
class Masks:
    """Which tokens a grammar allows, for those rows of the logits that a grammar has a say in."""

    rows: Tensor  # [G]
    bits: Tensor  # [G, ceil(V / 32)] int32, lowest bit first


def adjust(logits: Tensor, sampling: Sampling, batch: Batch, rows: Tensor, state: SlotState) -> Tensor:
    """Bias, bars and penalties on logits [R, V] of batch rows `rows` [R]: row j is judged by tokens[: j + 1]."""
    if not sampling.adjusts:
        return logits
    slots, last = batch.row_slots[rows], batch.indices[rows]
    adjusted = logits.to(torch.float32, copy=True)
    if sampling.bias is not None:
        adjusted += sampling.bias[slots]
    if sampling.bounded:
        _bar(adjusted, sampling.end_ids[slots], (last + 1 < sampling.min_len[slots])[:, None])
    if sampling.bad_words is not None:
        _bar_bad_words(adjusted, sampling.bad_words[slots], state.tokens, slots, last)
    if sampling.penalised:
        penalise(adjusted, sampling, slots, last, state.tokens, batch.max_len)
    return adjusted


def sample(
    logits: Tensor, sampling: Sampling, batch: Batch, rows: Tensor, state: SlotState, masks: Masks | None = None
) -> Tensor:
    """The target's own token after each of `rows` [R]; logits [R, V] -> [R]."""
    adjusted = adjust(logits, sampling, batch, rows, state)
    if masks is not None:
        adjusted = restrict(adjusted, logits, masks)
    return choose(adjusted, sampling, batch.row_slots[rows], batch.indices[rows] + 1)


def restrict(adjusted: Tensor, logits: Tensor, masks: Masks) -> Tensor:
    """-inf where a grammar forbids. It has the last word: where the other options leave nothing of what it allows
    (an end token under min_tokens, say), they yield, and the target's own logits [R, V] count."""
    ids = torch.arange(logits.shape[-1], device=logits.device)
    forbidden = (masks.bits[:, ids // 32] >> (ids % 32)) & 1 == 0  # [G, V]
    adjusted = adjusted.float()
    kept = adjusted[masks.rows].masked_fill(forbidden, -torch.inf)
    nothing = kept.amax(-1, keepdim=True) == -torch.inf
    own = logits[masks.rows].float().masked_fill(forbidden, -torch.inf)
    return adjusted.index_copy(0, masks.rows, torch.where(nothing, own, kept))


def _bar(logits: Tensor, ids: Tensor, where: Tensor) -> None:
    """-inf at `ids` [R, E] (-1: none) where `where` broadcasts to true."""
    limits = torch.where(where & (ids >= 0), -torch.inf, torch.inf)
    logits.scatter_reduce_(-1, ids.clamp(min=0), limits, "amin")


def _bar_bad_words(logits: Tensor, words: Tensor, texts: Tensor, slots: Tensor, last: Tensor) -> None:
    """words [R, W, M] aligned right. A word's last token is barred where the text ends with all the others."""
    length = words.shape[-1] - 1
    place = last[:, None] - torch.arange(length - 1, -1, -1, device=last.device)  # [R, M - 1]
    tail = torch.where(place >= 0, texts[slots[:, None], place.clamp(min=0)], -2)
    matches = ((words[..., :-1] == tail[:, None]) | (words[..., :-1] == -1)).all(-1)  # [R, W]
    _bar(logits, words[..., -1], matches)
