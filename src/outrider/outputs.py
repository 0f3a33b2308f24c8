"""What comes back to the caller. Plain data, which another process can hold without a model or torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from outrider.sampling_params import Speculation


@dataclass(frozen=True)
class Logprob:
    logprob: float
    rank: int  # 1: the most likely token
    decoded: str = ""


@dataclass(frozen=True)
class CompletionOutput:
    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None  # "stop", "length", "abort", or None while it is running
    stop_reason: int | str | None
    logprobs: list[dict[int, Logprob]] | None
    speculation: Speculation
    seed: int
    draft_positions: list[int] = field(repr=False)  # of each token: its place in the draft, 0: the target's own
    text_ends: list[int] = field(repr=False)  # of each token: length of the text up to and with it
    trace: list[dict[str, Any]] | None = None

    @property
    def cumulative_logprob(self) -> float | None:
        if self.logprobs is None:
            return None
        return sum(row[token].logprob for row, token in zip(self.logprobs, self.token_ids, strict=True))


@dataclass(frozen=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    num_cached_tokens: int
    finished: bool
