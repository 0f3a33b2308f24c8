"""/v1/completions: a text, or several, and how it goes on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from fastapi import Request as HttpRequest

from outrider.detokenizer import Detokenizer
from outrider.outputs import Logprob
from outrider.prompts import Prompt
from outrider.server.errors import bad_request
from outrider.server.generation import (
    MIN_LOGPROB,
    Service,
    aborting,
    extras,
    finished,
    metrics_of,
    prompt_logprobs_of,
    sampling_params,
    speculations_of,
    usage,
)
from outrider.server.job import Job
from outrider.server.protocol import Piece
from outrider.server.schema import CompletionRequest

DEFAULT_MAX_TOKENS = 16  # OpenAI's
MAX_ECHOED = 2**18  # log-probabilities of prompts in one answer


async def start_completion(service: Service, body: CompletionRequest, tenant: str | None) -> Job:
    service.check_model(body.model)
    _check_size(service, body)
    max_tokens = body.max_tokens if body.max_tokens is not None else max(DEFAULT_MAX_TOKENS, body.min_tokens)
    # without an answer, one token is made all the same, and left out
    params = sampling_params(service, body, max_tokens=max_tokens or 1, logprobs=body.logprobs, tenant=tenant)
    if body.echo and body.logprobs is not None and not (body.continuation and all(body.continuation)):
        params = replace(params, prompt_logprobs=max(body.logprobs, body.prompt_logprobs or 0))
    return await service.submit(body, [_maker(service, body, prompt) for prompt in prompts_of(body)], params)


def _check_size(service: Service, body: CompletionRequest) -> None:
    """Log-probabilities of prompts are all kept until the answer is sent."""
    if body.echo and body.logprobs is not None:
        lengths = [len(prompt) if isinstance(prompt, list) else len(prompt.encode()) for prompt in prompts_of(body)]
        rows = sum(min(length, service.prompts.max_model_len) for length in lengths) * body.n
        if rows * (body.logprobs + 1) > MAX_ECHOED:
            raise bad_request(f"echo with logprobs is limited to {MAX_ECHOED} figures: ask for fewer", "logprobs")


def prompts_of(body: CompletionRequest) -> list[str] | list[list[int]]:
    prompt = body.prompt
    if isinstance(prompt, str):
        return [prompt]
    return [prompt] if isinstance(prompt[0], int) else prompt


def _maker(service: Service, body: CompletionRequest, prompt: str | list[int]) -> Callable[[], Prompt]:
    if isinstance(prompt, str) and not body.add_special_tokens:
        return lambda: service.prompts.tokenizer_for("a text").encode(prompt, add_special_tokens=False)
    return lambda: prompt


async def whole_completion(http: HttpRequest, service: Service, body: CompletionRequest, job: Job) -> dict[str, Any]:
    outputs = [_cut(body, output) for output in await finished(http, service, job)]

    def choices_of() -> list[dict[str, Any]]:
        for output in outputs:  # the first answer to a prompt has brought its log-probabilities
            output.prompt_logprobs = outputs[output.index - output.index % body.n].prompt_logprobs
        return [_choice(service, body, output, job) for output in outputs]

    may_be_long = body.echo or body.prompt_logprobs is not None
    choices = await asyncio.to_thread(choices_of) if may_be_long else choices_of()
    return {
        **_head(service, job),
        "choices": choices,
        "usage": usage(job, sum(len(output.token_ids) for output in outputs)),
        "metrics": metrics_of(speculations_of(outputs)),
    }


def _cut(body: CompletionRequest, made: Piece) -> Piece:
    """Without what was made for somebody who wants the prompt alone."""
    if body.max_tokens != 0 or made.ending is None:
        return made
    logprobs: list[dict[int, Logprob]] | None = None if made.logprobs is None else []
    ending = replace(made.ending, finish_reason="length", stop_reason=None)
    return replace(made, text="", token_ids=[], draft_positions=[], text_ends=[], logprobs=logprobs, ending=ending)


def _choice(service: Service, body: CompletionRequest, output: Piece, job: Job) -> dict[str, Any]:
    assert output.ending is not None
    index = output.index
    text = _echo(service, body, index)
    offsets = [len(text) + end for end in (job.text_begin(index), *output.text_ends)]
    logprobs = _logprobs(body, output.token_ids, output.logprobs or [], offsets)
    if job.begun and job.begun[index]:  # the prompt came with its beginning
        text = ""
    else:
        logprobs = _with_prompt(service, body, job.prompt_of(index), output, logprobs)
    return {
        "index": index,
        "text": text + output.text,
        "logprobs": logprobs,
        "finish_reason": output.ending.finish_reason,
        "stop_reason": output.ending.stop_reason,
        **prompt_logprobs_of(body, output),
        **extras(service, body, output),
    }


async def completion_chunks(
    http: HttpRequest, service: Service, body: CompletionRequest, job: Job
) -> AsyncGenerator[dict[str, Any], None]:
    head = _head(service, job)
    options = body.stream_options
    num_generated, speculations = 0, []
    ends = dict.fromkeys(range(job.num_sequences), 0)  # of each sequence: length of the text so far
    echoed = {index for index, tokens in enumerate(job.begun) if tokens}
    async with aborting(http, service, job), aclosing(job.pieces()) as pieces:
        async for whole in pieces:
            piece = _cut(body, whole)
            ends[piece.index] = ends[piece.index] or job.text_begin(piece.index)
            num_generated += len(piece.token_ids)
            if piece.ending is not None:
                speculations.append(piece.ending.speculation)
            elif not (piece.text or body.logprobs is not None or body.return_token_ids):
                continue
            choice = _delta(service, body, piece, ends[piece.index])
            if piece.index not in echoed:
                choice["text"] = _echo(service, body, piece.index) + choice["text"]
                choice["logprobs"] = _with_prompt(service, body, job.prompt_of(piece.index), piece, choice["logprobs"])
                echoed.add(piece.index)
            chunk = {**head, "choices": [choice]}
            ends[piece.index] = piece.text_ends[-1] if piece.text_ends else ends[piece.index]
            if options is not None and options.continuous_usage_stats:
                chunk["usage"] = usage(job, num_generated)
            if len(speculations) == job.num_sequences:
                chunk["metrics"] = metrics_of(speculations)
            yield chunk
    if options is not None and options.include_usage:
        totals = {"usage": usage(job, num_generated), "metrics": metrics_of(speculations)}
        yield {**head, "choices": [], **totals}


def _delta(service: Service, body: CompletionRequest, piece: Piece, end: int) -> dict[str, Any]:
    """`end`: how much text came before."""
    echoed = len(_echo(service, body, piece.index)) if body.logprobs is not None else 0
    offsets = [echoed + place for place in (end, *piece.text_ends)]
    return {
        "index": piece.index,
        "text": piece.text,
        "logprobs": _logprobs(body, piece.token_ids, piece.logprobs or [], offsets),
        "finish_reason": piece.ending.finish_reason if piece.ending is not None else None,
        "stop_reason": piece.ending.stop_reason if piece.ending is not None else None,
        **extras(service, body, piece),
    }


def _echo(service: Service, body: CompletionRequest, index: int) -> str:
    if not body.echo:
        return ""
    prompt = prompts_of(body)[index // body.n]
    if isinstance(prompt, str):
        return prompt
    return service.tokenizer.decode(prompt) if service.tokenizer is not None else ""


def _logprobs(
    body: CompletionRequest, token_ids: Sequence[int], rows: Sequence[dict[int, Logprob]], offsets: Sequence[int]
) -> dict[str, Any] | None:
    if body.logprobs is None:
        return None
    chosen = [row[token] for token, row in zip(token_ids, rows, strict=True)]
    return {
        "tokens": [found.decoded_token for found in chosen],
        "token_logprobs": [max(found.logprob, MIN_LOGPROB) for found in chosen],
        "top_logprobs": [
            {found.decoded_token: max(found.logprob, MIN_LOGPROB) for found in row.values()} for row in rows
        ],
        "text_offset": list(offsets[: len(chosen)]),
    }


def _with_prompt(
    service: Service, body: CompletionRequest, prompt: Sequence[int], piece: Piece, logprobs: dict[str, Any] | None
) -> dict[str, Any] | None:
    """An answer that begins with its prompt has the prompt's log-probabilities first; its first token has none."""
    tokenizer = service.tokenizer
    if logprobs is None or not body.echo or tokenizer is None:
        return logprobs
    written = Detokenizer(tokenizer)
    offsets = [0]
    for token in prompt:
        offsets.append(offsets[-1] + len(written.add(token)))
    first: dict[str, list[Any]] = {
        "tokens": [tokenizer.token(prompt[0])],
        "token_logprobs": [None],
        "top_logprobs": [None],
        "text_offset": [0],
    }
    others = _logprobs(body, prompt[1:], piece.prompt_rows(), offsets[1:])
    assert others is not None
    return {name: [*first[name], *others[name], *logprobs[name]] for name in logprobs}


def _head(service: Service, job: Job) -> dict[str, Any]:
    return {
        "id": f"cmpl-{job.job_id}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": service.model_name,
        "system_fingerprint": service.fingerprint,
    }
