"""Drafts from texts that are known beforehand. A random drafter is always wrong, and one that is told the truth never:
so that both are tried, drafts are right with a chosen probability."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import torch

from outrider.drafters.base import Drafter
from outrider.kernels.sampling import gumbel
from outrider.types import Draft, Hidden, Step, Verdict


@lru_cache(maxsize=8)
def _table(texts: tuple[tuple[int, ...], ...], width: int, device: torch.device) -> torch.Tensor:
    rows = [(*text, *[0] * width)[:width] for text in texts] or [(0,) * width]
    return torch.tensor(rows, device=device)


def told(step: Step, truth: Sequence[Sequence[int]], lookahead: int, skill: float, vocab_size: int) -> Draft:
    """Drafts from the true continuations, each token right with probability `skill`. Keyed by the text, so that the
    same text always gets the same draft. Asks the host nothing, so that it can be recorded."""
    slots, device = step.batch.slots, step.batch.slots.device
    tokens, lengths = step.state.tokens[slots], step.state.lengths[slots]
    place = torch.arange(tokens.shape[1], device=device)
    said = place < lengths[:, None]
    table = _table(tuple(map(tuple, truth)), tokens.shape[1] + lookahead, device)
    fits = ((tokens[:, None] == table[None, :, : len(place)]) | ~said[:, None]).all(-1)  # [B, texts]
    known = table[fits.int().argmax(1)] * fits.any(1)[:, None]
    draft = known.gather(1, lengths[:, None] + torch.arange(lookahead, device=device))
    key = torch.where(said, (tokens + 1) * (2654435761 * place + 1), 0).sum(1)
    chance = (-(-gumbel(key, lengths, torch.arange(lookahead + 1, device=device))).exp()).exp()  # uniform
    count = (chance[:, -1] * (lookahead + 1)).long().clamp(max=step.depth)
    wrong = (chance[:, :-1] > skill).long()
    return Draft((draft + wrong) % vocab_size, torch.where(step.emits, count, 0))


def guide(drafter: Drafter, truth: Sequence[Sequence[int]], vocab_size: int, skill: float = 0.7) -> None:
    """Wherever a text's length is even, the drafter's own proposal is replaced by one that is mostly right: a random
    drafter is always wrong, and would never be tried with accepted drafts."""
    propose = drafter.propose

    def guided(step: Step, hidden: Hidden, verdict: Verdict) -> Draft:
        own = propose(step, hidden, verdict)
        if not step.depth:
            return own
        other = told(step, truth, drafter.lookahead, skill, vocab_size)
        replaced = step.state.lengths[step.batch.slots] % 2 == 0
        return Draft(
            torch.where(replaced[:, None], other.tokens, own.tokens), torch.where(replaced, other.count, own.count)
        )

    drafter.propose = guided  # type: ignore[method-assign]
