"""AsyncLLM: an LLM for programs that run an event loop. Requests go the way that the server's go: the engine runs in a
thread of its own, an EngineClient on the event loop tells it what to do, and a Job brings what comes of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from outrider.compatibility.llm import CALLS
from outrider.extras import extra_missing
from outrider.llm import LLM
from outrider.llm_arguments import EngineArgs
from outrider.offline import tokenized
from outrider.outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from outrider.prompts import Prompt, salted
from outrider.sampling_params import RequestOutputKind, SamplingParams, Speculation
from outrider.tokenizer import Tokenizer

try:
    from outrider.server.engine_client import EngineClient, QueueLimits, ReadyPrompt
    from outrider.server.engine_host import ThreadHost
    from outrider.server.errors import ApiError
    from outrider.server.job import Job
    from outrider.server.protocol import Piece
except ImportError as error:
    raise extra_missing("AsyncLLM", "serve", error) from error

NO_DEADLINE = 1e9  # seconds
NO_LIMIT = 2**40


class AsyncLLM:
    """Takes the arguments of LLM. Everything but making it belongs to one event loop; call shutdown() at the end."""

    def __init__(self, *values: Any, **arguments: Any) -> None:
        self.llm = LLM(*values, **arguments)
        self.llm.warm_up()
        self._host = ThreadHost(self.llm, str(self.llm.config.model))
        limits = QueueLimits(max_queue=NO_LIMIT, max_queued_tokens=NO_LIMIT, deadline=NO_DEADLINE)
        self._client = EngineClient(
            self._host.link, self._host.model, str(self.llm.config.model), limits, self._host.why_ended
        )
        self._jobs: dict[str, Job | None] = {}  # by request_id; None while a prompt becomes tokens
        self._loop: asyncio.AbstractEventLoop | None = None

    @classmethod
    def from_engine_args(cls, arguments: EngineArgs) -> AsyncLLM:
        return cls(**vars(arguments))

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str = "", **others: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """The growing output, as it grows, or what output_kind says. Leaving the loop early aborts the request, as
        abort(request_id) does; the last output then says "abort"."""
        self._start()
        request_id = request_id or f"request-{time.monotonic_ns()}"
        if request_id in self._jobs:
            raise ValueError(f"a request {request_id!r} is running already: choose another request_id")
        self._jobs[request_id] = None
        try:
            async with aclosing(self._generate(prompt, sampling_params, request_id, others)) as outputs:
                async for output in outputs:
                    yield output
        finally:
            job = self._jobs.pop(request_id)
            if job is not None:
                self._client.abort(job)

    async def _generate(
        self, prompt: Prompt, params: SamplingParams | None, request_id: str, others: Mapping[str, Any]
    ) -> AsyncGenerator[RequestOutput, None]:
        (prompt,) = tokenized([prompt], CALLS.settle(others, "generate()"))
        params = params or self.llm.get_default_sampling_params()
        asked = await asyncio.to_thread(self._asked, prompt, params)
        answer = _Answer(request_id, prompt, asked)
        streams = asked.params.output_kind is not FINAL_ONLY
        try:
            job = self._client.submit([asked], answer.arrived + NO_DEADLINE, answer.arrived, streams=streams)
            self._jobs[request_id] = job
            await job.accepted()
            answer.prompt_token_ids = job.prompts[0]
            async with aclosing(job.pieces()) as pieces:
                async for piece in pieces:
                    output = answer.after(piece)
                    if output is not None:
                        yield output
        except ApiError as error:
            if error.code != ABORTED.code:
                raise _raised(error) from error
            yield answer.aborted()

    async def abort(self, request_id: str) -> None:
        """Ends a request that is running; nothing happens where there is none."""
        job = self._jobs.get(request_id)
        if job is not None:
            self._client.abort(job, ABORTED)

    def get_tokenizer(self) -> Tokenizer:
        return self.llm.get_tokenizer()

    def get_default_sampling_params(self) -> SamplingParams:
        return self.llm.get_default_sampling_params()

    async def metrics(self) -> bytes:
        """Figures in the text form of Prometheus, as the server's /metrics has them."""
        self._start()
        return await self._client.metrics()

    async def check_health(self) -> None:
        """Raises where the engine has ended, or makes no progress."""
        if not self._client.is_alive:
            raise RuntimeError("the engine has ended: make a new AsyncLLM")
        if self._client.is_stalled:
            raise RuntimeError("the engine makes no progress")

    def shutdown(self) -> None:
        """Ends everything that is running, and frees the memory."""
        self._client.stop()
        self._host.close()
        self.llm.close()

    def _start(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
            self._client.start()
        elif self._loop is not loop:
            raise ValueError("this AsyncLLM is used by another event loop: make one for each")

    def _asked(self, prompt: Prompt, params: SamplingParams) -> ReadyPrompt:
        """Texts become tokens beside the event loop. The seed is chosen here, so that it can be told."""
        prompts = self.llm.prompts
        ids = prompts.ids(prompt, "the prompt")
        prompts.check(ids, "the prompt")
        params = replace(salted(params, prompt), seed=self.llm.seed_of(params))
        if isinstance(prompt, Mapping) and prompt.get("multi_modal_data"):  # the engine knows what an image takes
            return ReadyPrompt(ids, prompt, params)
        return ReadyPrompt(ids, ids, prompts.settled(params, ids))


FINAL_ONLY = RequestOutputKind.FINAL_ONLY
ABORTED = ApiError(499, "the request was aborted", "aborted")


class _Sequence:
    """One answer, as far as it has come."""

    def __init__(self, index: int, seed: int) -> None:
        self.index, self.seed = index, seed
        self.text = ""
        self.token_ids: list[int] = []
        self.draft_positions: list[int] = []
        self.text_ends: list[int] = []
        self.logprobs: list[dict[int, Logprob]] | None = None
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None
        self.speculation = Speculation()

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.token_ids += piece.token_ids
        self.draft_positions += piece.draft_positions
        self.text_ends += piece.text_ends
        if piece.logprobs is not None:
            self.logprobs = (self.logprobs or []) + piece.logprobs
        if piece.ending is not None:
            self.finish_reason, self.stop_reason = piece.ending.finish_reason, piece.ending.stop_reason
            self.speculation = piece.ending.speculation

    def output(self, new: Piece | None = None) -> CompletionOutput:
        """The output so far; or with `new`, what that piece has brought."""
        part = self if new is None else new
        return CompletionOutput(
            index=self.index,
            text=part.text,
            token_ids=list(part.token_ids),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            logprobs=None if part.logprobs is None else list(part.logprobs),
            speculation=self.speculation,
            seed=self.seed,
            draft_positions=list(part.draft_positions),
            text_ends=list(part.text_ends),
        )


class _Answer:
    """All answers to one prompt, as far as they have come."""

    def __init__(self, request_id: str, prompt: Prompt, asked: ReadyPrompt) -> None:
        self.request_id, self.prompt_token_ids = request_id, asked.ids
        self.arrived, self._arrival_time = time.monotonic(), time.time()
        given = prompt.get("prompt") if isinstance(prompt, Mapping) else prompt
        self._prompt = given if isinstance(given, str) else None
        self._kind, seed = asked.params.output_kind, asked.params.seed or 0
        self._sequences = [_Sequence(index, seed + index) for index in range(asked.params.n)]
        self._prompt_logprobs: list[dict[int, Logprob] | None] | None = None
        self._num_cached = 0
        self._first_token = self._last_token = 0.0

    @property
    def finished(self) -> bool:
        return all(each.finish_reason is not None for each in self._sequences)

    def after(self, piece: Piece) -> RequestOutput | None:
        """What is to be told now that a piece has come."""
        self._last_token = time.monotonic()
        self._first_token = self._first_token or self._last_token
        self._num_cached = max(self._num_cached, piece.counts[0])
        if piece.prompt_logprobs is not None:
            self._prompt_logprobs = piece.prompt_logprobs
        sequence = self._sequences[piece.index]
        sequence.add(piece)
        if self._kind is RequestOutputKind.DELTA:
            return self._output([sequence.output(piece)])
        return self._output() if self._kind is not FINAL_ONLY or self.finished else None

    def aborted(self) -> RequestOutput:
        """The output of an answer that was aborted: what has come so far."""
        ended = [each for each in self._sequences if each.finish_reason is None]
        for each in ended:
            each.finish_reason = "abort"
        nothing = Piece(0, 0, "", [], [], [], (0, 0, 0))
        is_delta = self._kind is RequestOutputKind.DELTA
        return self._output([each.output(nothing) for each in ended] if is_delta else None)

    def _output(self, outputs: list[CompletionOutput] | None = None) -> RequestOutput:
        return RequestOutput(
            request_id=self.request_id,
            prompt=self._prompt,
            prompt_token_ids=list(self.prompt_token_ids),
            outputs=[each.output() for each in self._sequences] if outputs is None else outputs,
            prompt_logprobs=self._prompt_logprobs,
            num_cached_tokens=self._num_cached,
            finished=self.finished,
            metrics=RequestMetrics(
                arrival_time=self._arrival_time,
                queued_ts=self.arrived,
                first_token_ts=self._first_token,
                last_token_ts=self._last_token,
                num_generation_tokens=sum(len(each.token_ids) for each in self._sequences),
            ),
        )


def _raised(error: ApiError) -> Exception:
    """What the caller can mend is a ValueError, as with LLM."""
    return (ValueError if error.status == 400 else RuntimeError)(error.message)
