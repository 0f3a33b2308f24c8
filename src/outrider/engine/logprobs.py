"""The target's own log-probabilities, before any sampling option, for those who ask."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from outrider.engine.request import Work
from outrider.kernels.logprobs import logprobs_of
from outrider.outputs import Logprob
from outrider.tokenizer import Tokenizer
from outrider.types import Hidden, Outcome

MANY = 64  # rows: the logits of a whole prompt at once would be large

Figures = tuple[float, int, list[float], list[int]]  # of a row, as in kernels/logprobs.py


def figures_of_round(logits: Tensor | None, read: Sequence[tuple[Work, Outcome, int]]) -> dict[Work, list[Figures]]:
    """For each request that asks, those of the tokens that a round brought it: all in one go. `read`: as of a Flight;
    logits [L, V] of the judged rows."""
    asked = [each for each in read if each[0].request.params.logprobs is not None and each[1].tokens]
    if not asked:
        return {}
    assert logits is not None
    rows = [begin + place for _, outcome, begin in asked for place in range(len(outcome.tokens))]
    chosen = [token for _, outcome, _ in asked for token in outcome.tokens]
    found = iter(_figures(logits, rows, chosen, max(work.request.params.logprobs or 0 for work, _, _ in asked)))
    return {work: [next(found) for _ in outcome.tokens] for work, outcome, _ in asked}


def told(
    figures: Sequence[Figures], chosen: Sequence[int], wanted: int, tokenizer: Tokenizer | None
) -> list[dict[int, Logprob]]:
    """As a request is told: of each token that was chosen, and of the `wanted` best ones in its place."""
    rows = []
    for token, (own, own_rank, values, ids) in zip(chosen, figures, strict=True):
        entries = {token: Logprob(own, own_rank, _text(tokenizer, token))}
        for rank, (value, id) in enumerate(zip(values[:wanted], ids, strict=False), start=1):
            entries.setdefault(id, Logprob(value, rank, _text(tokenizer, id)))
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
                logits, tokens = logits_of(states[part : part + MANY]), known[part : part + MANY]
                figures = _figures(logits, range(len(tokens)), tokens, wanted)
                request.prompt_logprobs += told(figures, tokens, wanted, tokenizer)


def _figures(logits: Tensor, rows: Sequence[int], chosen: Sequence[int], most: int) -> list[Figures]:
    """Of rows of logits [L, V], and the token that was chosen after each."""
    places, tokens = torch.tensor([list(rows), list(chosen)], device=logits.device)
    found = logprobs_of(logits, places, tokens, min(most, logits.shape[1]))
    return list(zip(*(each.tolist() for each in found), strict=True))


def _text(tokenizer: Tokenizer | None, token: int) -> str:
    return tokenizer.token(token) if tokenizer is not None else ""
