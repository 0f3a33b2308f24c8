"""What comes back to the caller. Plain data, which another process can hold without a model or torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from outrider.sampling_params import Speculation


@dataclass(frozen=True)
class Logprob:
    logprob: float
    rank: int  # 1: the most likely token
    decoded_token: str = ""


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

    def finished(self) -> bool:
        return self.finish_reason is not None

    def delta(self, before: CompletionOutput) -> CompletionOutput:
        """What has come since then. What is told of the whole, such as how drafting went, stays so."""
        begin = len(before.token_ids)
        return replace(
            self,
            text=self.text[len(before.text) :],
            token_ids=self.token_ids[begin:],
            logprobs=None if self.logprobs is None else self.logprobs[begin:],
            draft_positions=self.draft_positions[begin:],
            text_ends=self.text_ends[begin:],
        )

    @property
    def cumulative_logprob(self) -> float | None:
        if self.logprobs is None:
            return None
        return sum(row[token].logprob for row, token in zip(self.logprobs, self.token_ids, strict=True))


@dataclass(frozen=True)
class RequestMetrics:
    """When things happened to a request, in vLLM's names: seconds of time.monotonic(), 0 for what has not happened. Of
    several answers, the first token is the earliest and the last one the latest."""

    arrival_time: float  # by the wall clock, as time.time() has it
    queued_ts: float
    scheduled_ts: float = 0.0
    first_token_ts: float = 0.0
    last_token_ts: float = 0.0
    num_generation_tokens: int = 0
    num_preemptions: int = 0

    @property
    def first_token_latency(self) -> float:
        """Seconds from its arrival to its first token."""
        return max(self.first_token_ts - self.queued_ts, 0.0)


@dataclass(frozen=True)
class RequestOutput:
    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    num_cached_tokens: int
    finished: bool
    metrics: RequestMetrics | None = None

    def delta(self, before: RequestOutput | None) -> RequestOutput:
        """What has come since then, answer by answer; answers without anything new are left out."""
        if before is None:
            return self
        pairs = zip(self.outputs, before.outputs, strict=True)
        return replace(self, outputs=[now.delta(then) for now, then in pairs if now != then])


def total_speculation(outputs: Sequence[RequestOutput]) -> Speculation:
    total = Speculation()
    for output in outputs:
        for completion in output.outputs:
            total += completion.speculation
    return total
