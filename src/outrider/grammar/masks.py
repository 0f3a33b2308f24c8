"""Masks of allowed tokens as bits. To fill one in takes a matcher up to a few hundred microseconds, as in the middle of
a JSON string: those of a whole round are filled in together, on several threads (fillers.py)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from outrider.grammar.fillers import fillers

if TYPE_CHECKING:
    import xgrammar


class Unfilled(NamedTuple):
    """A mask that a matcher has yet to fill in."""

    matcher: xgrammar.GrammarMatcher
    ends: Tensor  # the mask where the matcher allows nothing


def fill_masks(masks: Sequence[Tensor | Unfilled]) -> Tensor:
    """Masks as one table [G, ceil(V / 32)] int32, lowest bit first; those that are unfilled are filled in."""
    words = len(masks[0].ends if isinstance(masks[0], Unfilled) else masks[0])
    bits = torch.empty(len(masks), words, dtype=torch.int32)
    unfilled = []
    for row, mask in enumerate(masks):
        if isinstance(mask, Unfilled):
            unfilled.append((row, mask))
        else:
            bits[row] = mask
    if len(unfilled) == 1:
        ((row, only),) = unfilled
        only.matcher.fill_next_token_bitmask(bits, row)
    elif unfilled:
        fillers().fill([mask.matcher for _, mask in unfilled], bits, [row for row, _ in unfilled])
    empty = bits.numpy().view(np.uint32).max(axis=1) == 0
    for row, mask in unfilled:
        if empty[row]:
            bits[row] = mask.ends
    return bits


def mask_of(matcher: xgrammar.GrammarMatcher, num_words: int) -> Tensor:
    """What a matcher allows next."""
    bits = torch.empty(1, num_words, dtype=torch.int32)
    matcher.fill_next_token_bitmask(bits)
    return bits[0]
