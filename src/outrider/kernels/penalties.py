"""Bias: what is added to the logits of a request. Penalties: tokens that a text already holds become less likely. Each
row has a text of its own: that of its slot, up to its place, drafts included."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.kernels import native_sampling
from outrider.kernels.dispatch import use_native, use_triton
from outrider.kernels.sampling import Columns
from outrider.types import Sampling


def add_bias(logits: Tensor, bias: Tensor, slots: Tensor, columns: Columns | None = None) -> None:
    """logits [R, V], float32, += bias[slots], of a table [S, V] of all ids. `columns`: as below."""
    if use_native(logits) and columns is None:
        native_sampling.add_bias(logits, bias, slots)
        return
    found = bias[slots]
    logits += found if columns is None else columns.own(found)


def penalise(
    logits: Tensor,
    sampling: Sampling,
    slots: Tensor,
    last: Tensor,
    texts: Tensor,
    max_len: int,
    columns: Columns | None = None,
) -> None:
    """Changes logits [R, V], float32, of rows whose text is texts[slot, : last + 1]. slots [R], last [R] < max_len,
    texts [S, W].
    A repetition penalty counts the prompt too, presence and frequency the answer alone. `columns`: which ids the logits
    are about, where they are not about all."""
    if use_triton(logits) and columns is None:
        from outrider.kernels.gpu import penalties as gpu

        gpu.penalise(logits, sampling, slots, last, texts, max_len)
    elif use_native(logits):
        native_sampling.penalise(logits, sampling, slots, last, texts, 0 if columns is None else columns.begin)
    else:
        penalise_reference(logits, sampling, slots, last, texts, max_len, columns)


def penalise_reference(
    logits: Tensor,
    sampling: Sampling,
    slots: Tensor,
    last: Tensor,
    texts: Tensor,
    max_len: int,
    columns: Columns | None = None,
) -> None:
    tokens = texts[slots, :max_len]  # [R, L]
    index = torch.arange(max_len, device=tokens.device)
    said = index <= last[:, None]
    if columns is not None:
        tokens = columns.place(tokens)
        said, tokens = said & (tokens >= 0), tokens.clamp(min=0)
    answer = said & (index >= sampling.prompt_len[slots][:, None])
    empty = torch.zeros_like(logits)
    seen = empty.scatter_add(1, tokens, said.to(logits.dtype)) > 0
    count = empty.scatter_add(1, tokens, answer.to(logits.dtype))
    repetition = sampling.repetition[slots][:, None]
    changed = torch.where(seen, torch.where(logits > 0, logits / repetition, logits * repetition), logits)
    changed -= sampling.frequency[slots][:, None] * count
    changed -= sampling.presence[slots][:, None] * (count > 0)
    logits.copy_(changed)
