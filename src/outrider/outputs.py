"""What comes back to the caller."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from outrider.engine.request import Logprob, Request
from outrider.sampling_params import Speculation


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

    @classmethod
    def of(cls, request: Request, index: int) -> CompletionOutput:
        return cls(
            index=index,
            text=request.text.text if request.text is not None else "",
            token_ids=request.outputs,
            finish_reason=request.finish_reason,
            stop_reason=request.stop_reason,
            logprobs=list(request.logprobs) if request.params.logprobs is not None else None,
            speculation=request.speculation,
            seed=request.seed,
            draft_positions=list(request.draft_positions),
            text_ends=list(request.text_ends),
            trace=list(request.trace) if request.params.trace else None,
        )


@dataclass(frozen=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    num_cached_tokens: int
    finished: bool

    @classmethod
    def of(cls, request_id: str, prompt: str | None, requests: list[Request]) -> RequestOutput:
        first = requests[0]
        return cls(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=list(first.prompt),
            outputs=[CompletionOutput.of(request, index) for index, request in enumerate(requests)],
            prompt_logprobs=list(first.prompt_logprobs) if first.params.prompt_logprobs is not None else None,
            num_cached_tokens=first.num_cached,
            finished=all(request.finished for request in requests),
        )
