"""The one pipeline between logits and tokens. It runs on every row, drafts included, each with its own prefix."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.kernels.masks import restrict
from outrider.kernels.sampling import choose
from outrider.types import Batch, Sampling, SlotState, Step

ADJUSTED_ROWS = 128  # at a time: what it takes to adjust logits is several times as large as they are


def adjust(logits: Tensor, sampling: Sampling, batch: Batch, rows: Tensor, state: SlotState) -> Tensor:
    """Bias, bars and penalties on logits [R, V] of batch rows `rows` [R]: row j is judged by tokens[: j + 1]."""
    if not sampling.adjusts:
        return logits
    if len(rows) <= ADJUSTED_ROWS:
        return _adjust(logits, sampling, batch, rows, state)
    adjusted = torch.empty_like(logits, dtype=torch.float32)
    parts = zip(*(each.split(ADJUSTED_ROWS) for each in (adjusted, logits, rows)), strict=True)
    for part, own, judged in parts:
        part.copy_(_adjust(own, sampling, batch, judged, state))
    return adjusted


def _adjust(logits: Tensor, sampling: Sampling, batch: Batch, rows: Tensor, state: SlotState) -> Tensor:
    slots = batch.row_slots[rows]
    logits = logits.float()
    if sampling.bias is not None:
        logits = logits + sampling.bias[slots]
    if sampling.bounded:
        short = (batch.indices[rows] + 1 < sampling.min_len[slots])[:, None]
        logits = _bar(logits, sampling.end_ids[slots], short)
    if sampling.bad_words is None and not sampling.penalised:
        return logits
    # Only now is the text itself needed: [R, L], each row's own prefix
    tokens = state.tokens[slots, : batch.max_len]
    end = batch.indices[rows][:, None]
    if sampling.bad_words is not None:
        logits = _bar_bad_words(logits, sampling.bad_words[slots], tokens, end)
    if sampling.penalised:
        logits = _penalise(logits, sampling, slots, tokens, end)
    return logits


def sample(logits: Tensor, step: Step) -> Tensor:
    """The target's own token after each judged row; logits [L, V] -> [L]. Where a grammar forbids something, the logits
    are written over."""
    batch, sampling, rows = step.batch, step.sampling, step.judged
    adjusted = adjust(logits, sampling, batch, rows, step.state)
    if step.guidance is not None:
        restrict(adjusted, logits, step.guidance, step.judged_start)
    return choose(adjusted, sampling, batch.row_slots[rows], batch.indices[rows] + 1)


def _bar(logits: Tensor, ids: Tensor, where: Tensor) -> Tensor:
    """-inf at `ids` [R, E] (-1: none) where `where` broadcasts to true."""
    barred = torch.where(where & (ids >= 0), ids, logits.shape[-1])
    padded = torch.cat([logits, logits[:, :1]], dim=-1)  # a column to bar when there is nothing to bar
    return padded.scatter(-1, barred, -torch.inf)[:, :-1]


def _bar_bad_words(logits: Tensor, words: Tensor, tokens: Tensor, end: Tensor) -> Tensor:
    """words [R, W, M] aligned right. A word's last token is barred where the text ends with all the others."""
    length = words.shape[-1] - 1
    place = end - torch.arange(length - 1, -1, -1, device=end.device)  # [R, M - 1]
    tail = torch.where(place >= 0, tokens.gather(1, place.clamp(min=0)), -2)  # [R, M - 1]
    matches = ((words[..., :-1] == tail[:, None]) | (words[..., :-1] == -1)).all(-1)  # [R, W]
    return _bar(logits, words[..., -1], matches)


def _penalise(logits: Tensor, sampling: Sampling, slots: Tensor, tokens: Tensor, end: Tensor) -> Tensor:
    index = torch.arange(tokens.shape[1], device=tokens.device)
    said = index <= end  # [R, L]
    answer = said & (index >= sampling.prompt_len[slots][:, None])
    empty = torch.zeros_like(logits)
    seen = empty.scatter_add(1, tokens, said.to(logits.dtype)) > 0
    count = empty.scatter_add(1, tokens, answer.to(logits.dtype))
    repetition = sampling.repetition[slots][:, None]
    logits = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    logits = logits - sampling.frequency[slots][:, None] * count
    return logits - sampling.presence[slots][:, None] * (count > 0)
