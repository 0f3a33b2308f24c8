"""/v1/completions: a text, or several, and how it goes on."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

from fastapi import Request as HttpRequest

from outrider.engine.request import Logprob
from outrider.llm import Prompt
from outrider.outputs import CompletionOutput
from outrider.server.chat import MIN_LOGPROB
from outrider.server.errors import bad_request
from outrider.server.generation import Service, aborting, extras, finished, metrics_of, sampling_params, usage
from outrider.server.job import Job, Piece
from outrider.server.schema import CompletionRequest

DEFAULT_MAX_TOKENS = 16  # OpenAI's


async def start_completion(service: Service, body: CompletionRequest, tenant: str | None) -> Job:
    service.check_model(body.model)
    if body.echo and body.logprobs is not None:
        raise bad_request("echo with logprobs is not supported: ask for one of them", "echo")
    max_tokens = body.max_tokens if body.max_tokens is not None else max(DEFAULT_MAX_TOKENS, body.min_tokens)
    params = sampling_params(body, max_tokens=max_tokens, logprobs=body.logprobs, tenant=tenant)
    return await service.submit(body, [_maker(prompt) for prompt in prompts_of(body)], params)


def prompts_of(body: CompletionRequest) -> list[str] | list[list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    return [prompt] if isinstance(prompt[0], int) else prompt  # type: ignore[return-value, list-item]


def _maker(prompt: str | list[int]) -> Callable[[], Prompt]:
    return lambda: prompt


async def whole_completion(http: HttpRequest, service: Service, body: CompletionRequest, job: Job) -> dict[str, Any]:
    outputs = await finished(http, service, job)
    choices = [_choice(service, body, output) for output in outputs]
    return {
        **_head(service, job),
        "choices": choices,
        "usage": usage(job, sum(len(output.token_ids) for output in outputs)),
        "metrics": metrics_of([output.speculation for output in outputs]),
    }


def _choice(service: Service, body: CompletionRequest, output: CompletionOutput) -> dict[str, Any]:
    return {
        "index": output.index,
        "text": _echo(service, body, output.index) + output.text,
        "logprobs": _logprobs(body, output.token_ids, output.logprobs or [], [0, *output.text_ends]),
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        **extras(body, output.token_ids, output.draft_positions),
    }


async def completion_chunks(
    http: HttpRequest, service: Service, body: CompletionRequest, job: Job
) -> AsyncIterator[dict[str, Any]]:
    head = _head(service, job)
    options = body.stream_options
    num_generated, speculations = 0, []
    ends = dict.fromkeys(range(len(job.requests)), 0)  # of each sequence: length of the text so far
    echoed: set[int] = set()
    async with aborting(http, service, job):
        async for piece in job.pieces():
            num_generated += len(piece.token_ids)
            if piece.final is not None:
                speculations.append(piece.final.speculation)
            elif not (piece.text or body.logprobs is not None or body.return_token_ids):
                continue
            begin = "" if piece.index in echoed else _echo(service, body, piece.index)
            echoed.add(piece.index)
            chunk = {**head, "choices": [_delta(body, piece, begin, ends[piece.index])]}
            ends[piece.index] = piece.text_ends[-1]
            if options is not None and options.continuous_usage_stats:
                chunk["usage"] = usage(job, num_generated)
            if len(speculations) == len(job.requests):
                chunk["metrics"] = metrics_of(speculations)
            yield chunk
    if options is not None and options.include_usage:
        totals = {"usage": usage(job, num_generated), "metrics": metrics_of(speculations)}
        yield {**head, "choices": [], **totals}


def _delta(body: CompletionRequest, piece: Piece, begin: str, end: int) -> dict[str, Any]:
    return {
        "index": piece.index,
        "text": begin + piece.text,
        "logprobs": _logprobs(body, piece.token_ids, piece.logprobs, [end, *piece.text_ends]),
        "finish_reason": piece.final.finish_reason if piece.final is not None else None,
        "stop_reason": piece.final.stop_reason if piece.final is not None else None,
        **extras(body, piece.token_ids, piece.draft_positions),
    }


def _echo(service: Service, body: CompletionRequest, index: int) -> str:
    if not body.echo:
        return ""
    prompt = prompts_of(body)[index // body.n]
    if isinstance(prompt, str):
        return prompt
    return service.llm.tokenizer.decode(prompt) if service.llm.tokenizer is not None else ""


def _logprobs(
    body: CompletionRequest, token_ids: Sequence[int], rows: Sequence[dict[int, Logprob]], offsets: Sequence[int]
) -> dict[str, Any] | None:
    if body.logprobs is None:
        return None
    chosen = [row[token] for token, row in zip(token_ids, rows, strict=True)]
    return {
        "tokens": [found.decoded for found in chosen],
        "token_logprobs": [max(found.logprob, MIN_LOGPROB) for found in chosen],
        "top_logprobs": [{found.decoded: max(found.logprob, MIN_LOGPROB) for found in row.values()} for row in rows],
        "text_offset": list(offsets[: len(chosen)]),
    }


def _head(service: Service, job: Job) -> dict[str, Any]:
    return {
        "id": f"cmpl-{job.job_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": service.model_name,
    }
