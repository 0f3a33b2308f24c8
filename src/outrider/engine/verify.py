"""Made-up acceptance, for measuring rounds with random weights. How drafts are really judged: kernels/round.py."""

import torch
from torch import Tensor

from outrider.types import Step


def synthetic_choice(choice: Tensor, step: Step, length: float) -> Tensor:
    """Choices [L] of which so many agree with the draft that `length` tokens come of a round on average, as far as the
    draft reaches. What comes out is no text."""
    if not len(choice):
        return choice
    request = step.batch.request[step.judged]
    lengths = (step.starts + step.num_rows)[request]
    certain, rest = int(length - 1), (length - 1) % 1
    wanted = certain + ((lengths * 0.6180339887).frac() < rest).long()  # spread evenly over the rounds
    place = torch.arange(len(choice), device=choice.device) - step.judged_start[request]
    has_draft = place < step.num_drafts[request]
    draft = step.batch.input_ids[torch.where(has_draft, step.judged + 1, 0)]
    another = (draft - 1).abs()  # a token that exists
    return torch.where(has_draft, torch.where(place < wanted, draft, another), choice)
