"""The target's own log-probabilities, before any sampling option, for those who ask."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.engine.request import Logprob
from outrider.tokenizer import Tokenizer


def logprob_table(
    logits: Tensor, chosen: list[int], wanted: int, tokenizer: Tokenizer | None
) -> list[dict[int, Logprob]]:
    """For rows of logits [R, V] and the token that stands after each: the token's and the `wanted` best ones'."""
    logprobs = logits.float().log_softmax(-1)
    ids = torch.tensor(chosen, device=logits.device)
    own = logprobs.gather(1, ids[:, None])
    ranks = ((logprobs > own).sum(-1) + 1).tolist()
    best_values, best_ids = logprobs.topk(wanted, dim=-1) if wanted else (own[:, :0], own[:, :0].long())
    rows = []
    for number, token in enumerate(chosen):
        entries = {token: Logprob(float(own[number, 0]), ranks[number], _text(tokenizer, token))}
        values, tops = best_values[number].tolist(), best_ids[number].tolist()
        for rank, (value, top) in enumerate(zip(values, tops, strict=True), start=1):
            entries.setdefault(top, Logprob(value, rank, _text(tokenizer, top)))
        rows.append(entries)
    return rows


def _text(tokenizer: Tokenizer | None, token: int) -> str:
    return tokenizer.token(token) if tokenizer is not None else ""
