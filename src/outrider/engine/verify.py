"""Made-up acceptance, for measuring rounds with random weights. How drafts are really judged: kernels/round.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
from torch import Tensor

from outrider.config import SpeculativeConfig
from outrider.kernels.sampling import gumbel
from outrider.types import Step

Accepts = Callable[[Step, Tensor, Tensor], Tensor]
SyntheticChoice = Callable[[Tensor, Step], Tensor]


def synthetic_choice(settings: SpeculativeConfig | None) -> SyntheticChoice | None:
    """Changes the target's choices [L] so that as much of each draft agrees with them as the settings say. What comes
    out is no text. None: the settings say nothing."""
    if settings is None or not settings.is_synthetic:
        return None
    accepts = _by_rate(settings.synthetic_acceptance_rates or ())
    if settings.synthetic_acceptance_length is not None:
        accepts = _by_length(settings.synthetic_acceptance_length)
    return partial(_changed, accepts)


def _changed(accepts: Accepts, choice: Tensor, step: Step) -> Tensor:
    """`accepts` says of each judged row, given its request and its place in the draft, whether the draft token after it
    is right. So does a row whose draft token is not judged: what it says is what the token would have been."""
    if not len(choice):
        return choice
    batch, state, row = step.batch, step.state, step.judged
    request, slots = batch.request[row], batch.row_slots[row]
    place = torch.arange(len(choice), device=choice.device) - step.judged_start[request]
    draft = state.tokens[slots, batch.indices[row] + 1]
    another = (draft - 1).abs()  # a token that exists
    agreed = torch.where(accepts(step, request, place), draft, another)
    return torch.where(place < state.draft_count[slots], agreed, choice)


def _by_length(length: float) -> Accepts:
    """The first tokens, so many that `length` come of a round on average, as far as the draft reaches."""
    certain, rest = int(length - 1), (length - 1) % 1

    def accepts(step: Step, request: Tensor, place: Tensor) -> Tensor:
        lengths = (step.starts + step.num_rows - step.num_drafts)[request]
        return place < certain + ((lengths * 0.6180339887).frac() < rest).long()  # spread evenly over the rounds

    return accepts


def _by_rate(rates: tuple[float, ...]) -> Accepts:
    """Each token by itself, at the rate of its request: the seed says which, and seed and position whether."""

    @cache
    def on(device: torch.device) -> tuple[Tensor, Tensor]:  # a round that is recorded uploads nothing
        return torch.tensor(rates, device=device), torch.zeros(1, dtype=torch.long, device=device)

    def accepts(step: Step, request: Tensor, place: Tensor) -> Tensor:
        seeds = step.sampling.seed[step.batch.slots[request]]
        table, zero = on(seeds.device)
        noise = gumbel(seeds, step.batch.indices[step.judged] + 1, zero)[:, 0]
        return (-(-noise).exp()).exp() < table[seeds % len(rates)]

    return accepts
