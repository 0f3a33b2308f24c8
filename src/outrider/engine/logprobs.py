"""The target's own log-probabilities, before any sampling option, for those who ask."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.engine.request import Work
from outrider.kernels.logprobs import logprobs_of
from outrider.outputs import Logprob
from outrider.tokenizer import Tokenizer
from outrider.types import Hidden

MANY = 64  # rows: the logits of a whole prompt at once would be large


def logprob_table(
    logits: Tensor, chosen: list[int], wanted: int, tokenizer: Tokenizer | None
) -> list[dict[int, Logprob]]:
    """For rows of logits [R, V] and the token that stands after each: the token's and the `wanted` best ones'."""
    found = logprobs_of(logits, torch.tensor(chosen, device=logits.device), wanted)
    rows = []
    for token, own, own_rank, values, tops in zip(chosen, *(each.tolist() for each in found), strict=True):
        entries = {token: Logprob(own, own_rank, _text(tokenizer, token))}
        for rank, (value, top) in enumerate(zip(values, tops, strict=True), start=1):
            entries.setdefault(top, Logprob(value, rank, _text(tokenizer, top)))
        rows.append(entries)
    return rows


def add_prompt_logprobs(
    rows: Sequence[tuple[Work, int]],
    hidden: Hidden,
    logits_of: Callable[[Tensor], Tensor],
    tokenizer: Tokenizer | None,
) -> None:
    """Those of prompt tokens, for the rows of a round whose requests asked; `rows` says where each one's begin.
    `logits_of`: hidden states [R, H] -> [R, V]."""
    for work, begin in rows:
        request, wanted = work.request, work.request.params.prompt_logprobs
        done = len(request.prompt_logprobs)
        if wanted is not None and done < len(request.prompt):
            if not done:
                request.prompt_logprobs.append(None)  # nothing comes before the first token
                done = 1
            start = work.end - work.num_rows
            known = request.prompt[done : work.end + 1]
            first = begin + done - 1 - start
            states = hidden.last[first : first + len(known)]
            for part in range(0, len(known), MANY):
                logits = logits_of(states[part : part + MANY])
                request.prompt_logprobs += logprob_table(logits, known[part : part + MANY], wanted, tokenizer)


def _text(tokenizer: Tokenizer | None, token: int) -> str:
    return tokenizer.token(token) if tokenizer is not None else ""
