"""The one pipeline between logits and tokens. It runs on every row, drafts included, each with its own prefix."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.kernels.masks import restrict
from outrider.kernels.penalties import add_bias, penalise
from outrider.kernels.sampling import Columns, choose, choose_split
from outrider.types import Batch, Sampling, SlotState, Step

ADJUSTED_ROWS = 128  # at a time: what it takes to adjust logits is several times as large as they are


def adjust(
    logits: Tensor,
    sampling: Sampling,
    batch: Batch,
    rows: Tensor,
    state: SlotState,
    columns: Columns | None = None,
    *,
    copy: bool = True,
) -> Tensor:
    """Bias, bars and penalties on logits [R, V] of batch rows `rows` [R]: row j is judged by tokens[: j + 1]. Without
    `copy` they may be written over. `columns`: which ids the logits are about, where those of others are with other
    ranks."""
    if not sampling.needs_adjusting:
        return logits
    adjusted = logits.to(torch.float32, copy=copy)
    for part, judged in zip(adjusted.split(ADJUSTED_ROWS), rows.split(ADJUSTED_ROWS), strict=True):
        _adjust(part, sampling, batch, judged, state, columns)
    return adjusted


def _adjust(
    logits: Tensor, sampling: Sampling, batch: Batch, rows: Tensor, state: SlotState, columns: Columns | None
) -> None:
    slots, last = batch.row_slots[rows], batch.indices[rows]
    if sampling.bias is not None:
        add_bias(logits, sampling.bias, slots, columns)
    if sampling.bounded:
        _ban(logits, sampling.end_ids[slots], (last + 1 < sampling.min_len[slots])[:, None], columns)
    if sampling.bad_words is not None:
        _bar_bad_words(logits, sampling.bad_words[slots], state.tokens, (slots, last), columns)
    if sampling.penalised:
        penalise(logits, sampling, slots, last, state.tokens, batch.max_len, columns)


def sample(logits: Tensor, step: Step, columns: Columns | None = None) -> Tensor:
    """The target's own token after each judged row; logits [L, V] -> [L]. What options and grammars make of the logits
    is written over them. `columns`: which ids they are about, where those of others are with other ranks."""
    batch, sampling, rows = step.batch, step.sampling, step.judged
    is_guided = step.guidance is not None  # a grammar may ask for what the target said itself
    adjusted = adjust(logits, sampling, batch, rows, step.state, columns, copy=is_guided)
    if step.guidance is not None:
        restrict(adjusted, logits, step.guidance, step.judged_start, columns)
    slots, positions = step.judged_slots, step.judged_next
    if columns is not None:
        return choose_split(adjusted, sampling, slots, positions, columns)
    return choose(adjusted, sampling, slots, positions)


def _ban(logits: Tensor, ids: Tensor, where: Tensor, columns: Columns | None) -> None:
    """-inf at `ids` [R, E] (-1: none) where `where` broadcasts to true."""
    if columns is not None:
        ids = columns.place(ids)
    limits = torch.where(where & (ids >= 0), -torch.inf, torch.inf)
    logits.scatter_reduce_(-1, ids.clamp(min=0), limits, "amin")


def _bar_bad_words(
    logits: Tensor, words: Tensor, texts: Tensor, where: tuple[Tensor, Tensor], columns: Columns | None
) -> None:
    """words [R, W, M] aligned right. A word's last token is barred where the text ends with all the others. `where`:
    the row's slot, and the index of its last token."""
    slots, last = where
    length = words.shape[-1] - 1
    place = last[:, None] - torch.arange(length - 1, -1, -1, device=last.device)  # [R, M - 1]
    tail = torch.where(place >= 0, texts[slots[:, None], place.clamp(min=0)], -2)
    matches = ((words[..., :-1] == tail[:, None]) | (words[..., :-1] == -1)).all(-1)  # [R, W]
    _ban(logits, words[..., -1], matches, columns)
