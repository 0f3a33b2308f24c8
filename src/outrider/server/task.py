"""A client's job as the engine sees it: several sequences, and how much of each has been told."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider.engine.request import Request
from outrider.sampling_params import Speculation
from outrider.server.log import log
from outrider.server.protocol import Ending, Piece, Submit


@dataclass(eq=False)
class Task:
    job: int
    job_id: str
    streams: bool
    submitted: float  # when the client asked, by time.monotonic()
    deadline: float
    n: int  # answers to each prompt
    max_tokens: int | None
    requests: list[Request] = field(default_factory=list)  # none while they are being prepared
    num_prompt_tokens: int = 0  # every prompt once, however many answers it gets
    started: float | None = None  # when the engine first worked at it
    first_token: float | None = None

    @classmethod
    def of(cls, asked: Submit) -> Task:
        now, params = time.monotonic(), asked.params[0]
        return cls(
            job=asked.job,
            job_id=asked.job_id,
            streams=asked.streams,
            submitted=now - asked.waited,
            deadline=now + asked.left,
            n=params.n,
            max_tokens=params.max_tokens,
        )

    def take(self, requests: Sequence[Request]) -> None:
        self.requests = list(requests)
        self.num_prompt_tokens = sum(len(request.prompt) for request in self.requests[:: self.n])

    @property
    def finished(self) -> bool:
        return all(request.finished for request in self.requests)

    @property
    def num_outputs(self) -> int:
        return sum(request.num_outputs for request in self.requests)

    def log_end(self, outcome: str, seconds: float) -> None:
        made = sum((request.speculation for request in self.requests), Speculation())
        log(
            "request",
            id=self.job_id,
            outcome=outcome,
            prompt_tokens=self.num_prompt_tokens,
            cached_tokens=self.requests[0].num_cached if self.requests else 0,
            completion_tokens=self.num_outputs,
            ttft=round(self.first_token - self.submitted, 4) if self.first_token is not None else None,
            seconds=round(seconds, 4),
            rounds=made.rounds,
            drafted=made.drafted,
            accepted=made.accepted,
            accept_length=round(made.accept_length, 3) if made.rounds else None,
        )


@dataclass(eq=False)
class TaskSequence:
    """One answer of a task."""

    task: Task
    index: int
    request: Request
    num_told: int = 0  # tokens that were counted; of a stream: sent
    num_traced: int = 0  # rounds whose draft was sent
    last_token: float | None = None  # when it came
    started: bool = False
    num_faults: int = 0

    @property
    def num_new(self) -> int:
        return self.request.num_outputs - self.num_told

    def piece(self) -> Piece:
        """What has not been told yet; all of it where the task does not stream."""
        request, begin = self.request, self.num_told if self.task.streams else 0
        text_begin = request.text_ends[begin - 1] if begin else 0
        params = request.params
        has_draft = params.trace and len(request.trace) > self.num_traced
        return Piece(
            job=self.task.job,
            index=self.index,
            text=request.text.text[text_begin:] if request.text is not None else "",
            token_ids=request.tokens[len(request.prompt) + begin :],
            draft_positions=request.draft_positions[begin:],
            text_ends=request.text_ends[begin:],
            counts=(request.num_cached, request.num_predicted, request.num_predicted_accepted),
            logprobs=request.logprobs[begin:] if params.logprobs is not None else None,
            draft=(request.trace[-1]["draft"] if has_draft else []) if params.trace else None,
            prompt_logprobs=request.prompt_logprobs if params.prompt_logprobs is not None and not begin else None,
            ending=_ending(request) if request.finished else None,
        )

    def note_told(self) -> None:
        self.num_told, self.num_traced = self.request.num_outputs, len(self.request.trace)


def _ending(request: Request) -> Ending:
    return Ending(request.finish_reason, request.stop_reason, request.speculation)
