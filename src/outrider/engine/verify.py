"""Verification by agreement: a draft token stands if and only if it is the token the target chooses itself."""

import torch
from torch import Tensor

from outrider.types import Step, Verdict


def agree(choice: Tensor, draft: Tensor, num_drafts: Tensor) -> Tensor:
    """How many draft tokens are accepted: the longest prefix that equals the target's choices.

    choice [B, K + 1], draft [B, K], num_drafts [B] -> [B]
    """
    column = torch.arange(draft.shape[1], device=draft.device)
    same = (choice[:, :-1] == draft) & (column < num_drafts[:, None])
    return same.long().cumprod(dim=1).sum(dim=1)


def pretend(choice: Tensor, step: Step, length: float) -> Tensor:
    """For measuring rounds with random weights: choices [B, J] of which so many agree with the draft that `length`
    tokens come of a round on average, as far as the draft reaches. What comes out is no text."""
    lengths = step.starts + step.num_rows
    whole, rest = int(length - 1), (length - 1) % 1
    wanted = whole + ((lengths * 0.6180339887).frac() < rest).long()  # spread evenly over the rounds
    draft = step.batch.input_ids[step.logit_rows[:, 1:]]
    column = torch.arange(draft.shape[1], device=draft.device)
    another = (draft - 1).abs()  # a token that exists
    agreeing = torch.where(column < wanted[:, None], draft, another)
    return torch.cat([agreeing, choice[:, -1:]], dim=1)


def verify(step: Step, choice: Tensor) -> Verdict:
    """choice [B, J]: the target's token after each judged row."""
    after_first = step.logit_rows[:, 1:]  # the rows that hold the draft
    accepted = agree(choice, step.batch.input_ids[after_first], step.num_valid)
    rejected = step.num_drafts - accepted
    return Verdict(
        tokens=choice,
        count=torch.where(step.emits, accepted + 1, 0),
        kept=step.num_rows - torch.where(step.emits, rejected, 0),
    )
