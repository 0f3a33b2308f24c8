"""Answers that were begun elsewhere. A token is a function of the prompt, the seed and its position, so whoever has the
tokens so far can ask any server for the rest. They are committed again here, one by one, as when they were made: what
counts them (penalties, stop strings, grammars, max_tokens) stands where it stood."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from outrider.server.schema import Generation

if TYPE_CHECKING:  # it imports torch, which the front does without
    from outrider.engine.request import Request


def checked(body: Generation, num_sequences: int, temperature: float) -> list[list[int]]:
    """The tokens of each answer so far; none where nothing was begun."""
    begun = body.continuation
    if begun is None:
        return []
    if len(begun) != num_sequences:
        raise ValueError(f"continuation must hold a list of tokens for each of {num_sequences} answers: {len(begun)}")
    if body.prompt_logprobs is not None:
        raise ValueError("prompt_logprobs come with the beginning of an answer: leave out continuation")
    if temperature > 0 and body.seed is None:
        raise ValueError("continuation needs the seed that the answer was begun with: give seed from the start")
    return begun


def resume(requests: Sequence[Request], begun: Sequence[Sequence[int]], max_model_len: int) -> None:
    """Every request stands after the tokens that it has; one may have ended with them."""
    for index, (request, tokens) in enumerate(zip(requests, begun, strict=True)):
        for token in tokens:
            if request.error is not None:
                raise ValueError(f"continuation {index}: {request.error}")
            if request.finished:
                raise ValueError(f"continuation {index} goes on after its end: this request does not belong to it")
            request.append(token, max_model_len)
        if request.error is not None:
            raise ValueError(f"continuation {index}: {request.error}")
        request.logprobs = [{} for _ in tokens]  # whoever has the tokens has had these too
