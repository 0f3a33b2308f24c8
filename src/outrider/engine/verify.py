"""Made-up acceptance, for measuring rounds with random weights. How drafts are really judged: kernels/round.py."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from outrider.config import SpeculativeConfig
from outrider.kernels.dispatch import use_triton
from outrider.kernels.sampling import gumbel
from outrider.types import Step

Accepts = Callable[[Step, Tensor, Tensor], Tensor]
SyntheticChoice = Callable[[Tensor, Step], Tensor]
SPREAD = 0.6180339887  # times a length, without the whole part: numbers that are spread evenly over the rounds


def synthetic_choice(settings: SpeculativeConfig | None) -> SyntheticChoice | None:
    """Changes the target's choices [L] so that as much of each draft agrees with them as the settings say. What comes
    out is no text. None: the settings say nothing."""
    if settings is None or not settings.is_synthetic:
        return None
    if settings.synthetic_acceptance_length is not None:
        return partial(_first_ones, settings.synthetic_acceptance_length)
    return partial(_changed, _by_rate(settings.synthetic_acceptance_rates or ()))


def _first_ones(length: float, choice: Tensor, step: Step) -> Tensor:
    """The first tokens of each draft are right, so many that `length` come of a round on average, as far as it
    reaches."""
    if len(choice) and use_triton(choice):
        from outrider.kernels.gpu import synthetic as gpu

        return gpu.accept_first(choice, step, int(length - 1), (length - 1) % 1, SPREAD)
    return _changed(_by_length(length), choice, step)


def _changed(accepts: Accepts, choice: Tensor, step: Step) -> Tensor:
    """`accepts` says of each judged row, given its request and its place in the draft, whether the draft token after it
    is right. So does a row whose draft token is not judged: what it says is what the token would have been."""
    if not len(choice):
        return choice
    state, slots = step.state, step.judged_slots
    request = step.batch.request[step.judged]
    place = torch.arange(len(choice), device=choice.device) - step.judged_start[request]
    draft = state.tokens[slots, step.judged_next]
    another = (draft - 1).abs()  # a token that exists
    agreed = torch.where(accepts(step, request, place), draft, another)
    return torch.where(place < state.draft_count[slots], agreed, choice)


def _by_length(length: float) -> Accepts:
    certain, rest = int(length - 1), (length - 1) % 1

    def accepts(step: Step, request: Tensor, place: Tensor) -> Tensor:
        lengths = (step.starts + step.num_rows - step.num_drafts)[request]
        return place < certain + ((lengths * SPREAD).frac() < rest).long()

    return accepts


def _by_rate(rates: tuple[float, ...]) -> Accepts:
    """Each token by itself, at the rate of its request: the seed says which, and seed and position whether."""

    def accepts(step: Step, request: Tensor, place: Tensor) -> Tensor:
        seeds = step.sampling.seed[step.batch.slots[request]]
        noise = gumbel(seeds, step.judged_next, torch.zeros_like(seeds[:1]))[:, 0]
        mine = torch.full_like(noise, rates[0])
        for number, rate in enumerate(rates[1:], start=1):  # a round that is recorded uploads nothing, no table either
            mine = torch.where(seeds % len(rates) == number, rate, mine)
        return (-(-noise).exp()).exp() < mine

    return accepts
