"""Where the end of each text stood in it before, and what followed there."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels.dispatch import use_native_round


@dataclass(frozen=True)
class Lookup:
    """How far to look."""

    depth: int  # tokens to propose at most
    room: int  # columns of what is returned
    shortest: int  # tokens of the end that must have stood there
    longest: int  # more of them count no more


def lookup(tokens: Tensor, slots: Tensor, lengths: Tensor, max_len: int, how: Lookup) -> tuple[Tensor, Tensor]:
    """Texts tokens [S, W], each request's slot [B] and length [B], of which none is above `max_len` -> what followed
    [B, room], and how many of them are proposed [B].

    The longest suffix that occurred before wins; of its occurrences, the latest with a full draft after it."""
    if use_native_round(tokens):
        from outrider.kernels import native_round

        return native_round.lookup(tokens, slots, lengths, how)
    return lookup_reference(tokens, slots, lengths, max_len, how)


def lookup_reference(
    tokens: Tensor, slots: Tensor, lengths: Tensor, max_len: int, how: Lookup
) -> tuple[Tensor, Tensor]:
    width = min(max_len, tokens.shape[1])
    lengths = lengths[:, None].clamp(max=width)  # [B, 1]; a prompt may go on beyond this chunk
    texts = tokens[slots, :width]  # [B, L]
    index = torch.arange(width, device=texts.device)
    # run[b, i]: how many tokens ending at i equal the last ones of the text, up to `longest`
    run = torch.zeros_like(texts)
    alike = torch.ones_like(texts, dtype=torch.bool)
    for back in range(min(how.longest, width)):
        last = texts.gather(1, (lengths - 1 - back).clamp(min=0))
        shifted = torch.cat([texts.new_full((len(texts), back), -1), texts[:, : width - back]], dim=1)
        alike = alike & (shifted == last) & (lengths > back)
        run += alike
    earlier = index < lengths - 1
    run = torch.where(earlier & (run >= how.shortest), run, 0)
    room = (lengths - 1 - index).clamp(max=how.room)
    score = (run * (how.room + 1) + room) * width + index
    best = torch.where(run > 0, score, -1).argmax(1)  # [B]
    match = run.gather(1, best[:, None])[:, 0]
    start = best + 1
    # As far ahead as the texts agreed so far: a chance match is short, and a copy soon earns the full depth.
    count = torch.minimum(lengths[:, 0] - start, match).clamp(max=how.depth)
    place = (start[:, None] + torch.arange(how.room, device=texts.device)).clamp(max=width - 1)
    return texts.gather(1, place), count
