"""Log-probabilities of the tokens that were chosen, and of the best ones."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from outrider.kernels import native_sampling
from outrider.kernels.dispatch import use_native


class Logprobs(NamedTuple):
    """Of rows of logits."""

    own: Tensor  # [R] of the chosen tokens
    ranks: Tensor  # [R] of the chosen tokens: 1, and one for each that is more likely
    values: Tensor  # [R, most] of the best ones, the best first
    ids: Tensor  # [R, most]


def logprobs_reference(logits: Tensor, rows: Tensor, chosen: Tensor, most: int) -> Logprobs:
    every = logits[rows].float().log_softmax(-1)
    own = every.gather(1, chosen[:, None])
    values, ids = every.topk(most, dim=-1)
    return Logprobs(own[:, 0], (every > own).sum(-1) + 1, values, ids)


def logprobs_of(logits: Tensor, rows: Tensor, chosen: Tensor, most: int) -> Logprobs:
    """Of some rows [R] of logits [L, V], and the token that was chosen after each [R]; `most`: how many of the best."""
    if use_native(logits):
        return Logprobs(*native_sampling.logprobs(logits, rows, chosen, most))
    return logprobs_reference(logits, rows, chosen, most)
