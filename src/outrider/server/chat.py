"""/v1/chat/completions: a conversation in, the assistant's next message out, whole or in chunks."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Any

from fastapi import Request as HttpRequest

from outrider.chat_template import ChatOptions
from outrider.outputs import Logprob
from outrider.prompts import Prompt
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
from outrider.server.messages import MessageReader, message_of
from outrider.server.protocol import Piece
from outrider.server.schema import ChatRequest, Message, RefusalPart
from outrider.server.tool_choice import bound, check_tools, offered, reading_of
from outrider.tokenizer import Tokenizer


async def start_chat(service: Service, body: ChatRequest, tenant: str | None) -> Job:
    service.check_model(body.model)
    tokenizer = service.tokenizer
    check_tools(service.parsers, body)
    reading = reading_of(tokenizer, service.parsers, body)
    max_tokens = body.max_completion_tokens if body.max_completion_tokens is not None else body.max_tokens
    max_tokens = service.defaults.max_tokens if max_tokens is None else max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    params = sampling_params(service, body, max_tokens=max_tokens, logprobs=logprobs, tenant=tenant)
    params = bound(params, tokenizer, reading, body)
    return await service.submit(body, [lambda: _prompt(service, body)], params)


def _prompt(service: Service, body: ChatRequest) -> Prompt:
    tools = [tool.model_dump(exclude_none=True) for tool in offered(body)] or None
    options = ChatOptions(
        tools=tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        template_kwargs=_variables(body),
    )
    return service.prompts.of_chat(messages_of(body.messages, service.tokenizer), options)


def _variables(body: ChatRequest) -> dict[str, Any]:
    """Of the chat template. What is said there counts more than reasoning_effort."""
    effort = body.reasoning_effort
    told: dict[str, Any] = {} if effort is None else {"reasoning_effort": effort}
    if effort == "none":
        told = {"enable_thinking": False, "thinking": False}
    return told | body.chat_template_kwargs.model_dump(exclude_none=True)


def messages_of(messages: Sequence[Message], tokenizer: Tokenizer | None = None) -> list[dict[str, Any]]:
    """As they were sent; a message without content, as one of calls only, has an empty text. What the developer says is
    the system's message where the chat template knows no developer, as most do not."""
    told = [_message(message) for message in messages]
    template = tokenizer.template_text() if tokenizer is not None else None
    if template is not None and "developer" not in template:
        told = [each | {"role": "system"} if each["role"] == "developer" else each for each in told]
    return told


def _message(message: Message) -> dict[str, Any]:
    told = {"content": "", **message.model_dump(exclude_none=True)}
    if "reasoning" in told:
        told.setdefault("reasoning_content", told.pop("reasoning"))
    if isinstance(message.content, list):
        told["content"] = [
            {"type": "text", "text": part.refusal} if isinstance(part, RefusalPart) else part.model_dump()
            for part in message.content
        ]
    return told


async def whole_chat(http: HttpRequest, service: Service, body: ChatRequest, job: Job) -> dict[str, Any]:
    outputs = await finished(http, service, job)
    readers = readers_of(service, body, job)
    return {
        **_head(service, job, "chat.completion"),
        "choices": [_choice(service, body, output, readers[output.index]) for output in outputs],
        "usage": chat_usage(job, sum(len(output.token_ids) for output in outputs), readers),
        "metrics": metrics_of(speculations_of(outputs)),
        **prompt_logprobs_of(body, outputs[0]),
    }


def chat_usage(job: Job, num_generated: int, readers: Sequence[MessageReader]) -> dict[str, Any]:
    counted = usage(job, num_generated)
    if any(reader.reasons for reader in readers):
        num_reasoning = sum(reader.num_reasoning_tokens for reader in readers)
        counted["completion_tokens_details"] = {"reasoning_tokens": num_reasoning}
    return counted


def readers_of(service: Service, body: ChatRequest, job: Job) -> list[MessageReader]:
    reading = reading_of(service.tokenizer, service.parsers, body)
    readers = [MessageReader(service.tokenizer, reading, job.prompt_of(index)) for index in range(job.num_sequences)]
    for index, known in job.known.items():
        readers[index].read(known, None)
    return readers


def _choice(service: Service, body: ChatRequest, output: Piece, reader: MessageReader) -> dict[str, Any]:
    assert output.ending is not None
    deltas, reason = reader.read(output, output.ending.finish_reason)
    return {
        "index": output.index,
        "message": message_of(deltas),
        "logprobs": chat_logprobs(service.tokenizer, body, output.token_ids, output.logprobs or []),
        "finish_reason": reason,
        "stop_reason": output.ending.stop_reason,
        **extras(service, body, output),
    }


async def chat_chunks(
    http: HttpRequest, service: Service, body: ChatRequest, job: Job
) -> AsyncGenerator[dict[str, Any], None]:
    """Deltas; all of them joined are the message of the whole answer."""
    head = _head(service, job, "chat.completion.chunk")
    options = body.stream_options
    num_generated, speculations = 0, []
    readers = readers_of(service, body, job)
    first = {"delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    async with aborting(http, service, job), aclosing(job.pieces()) as pieces:
        for index in (each for each in range(job.num_sequences) if not (job.begun and job.begun[each])):
            yield {**head, "choices": [{"index": index, **first}]}
        caught_up: set[int] = set()
        async for piece in pieces:
            if piece.index in job.known and piece.index not in caught_up:  # what was said before is not said again
                readers[piece.index].read(job.known[piece.index], None)
                caught_up.add(piece.index)
            num_generated += len(piece.token_ids)
            if piece.ending is not None:
                speculations.append(piece.ending.speculation)
            choices = _deltas(service, body, piece, readers[piece.index])
            for number, choice in enumerate(choices, start=1):
                chunk = {**head, "choices": [choice]}
                if options is not None and options.continuous_usage_stats:
                    chunk["usage"] = chat_usage(job, num_generated, readers)
                if len(speculations) == job.num_sequences and number == len(choices):
                    chunk["metrics"] = metrics_of(speculations)
                yield chunk
    if options is not None and options.include_usage:
        totals = {"usage": chat_usage(job, num_generated, readers), "metrics": metrics_of(speculations)}
        yield {**head, "choices": [], **totals}


def _deltas(service: Service, body: ChatRequest, piece: Piece, reader: MessageReader) -> list[dict[str, Any]]:
    """Often one; none while nothing is settled: part of a character, or of what may be a stop string or a call."""
    ending = piece.ending
    deltas, reason = reader.read(piece, ending.finish_reason if ending is not None else None)
    if not deltas and (ending is not None or body.logprobs or body.return_token_ids):
        deltas = [{}]
    choices: list[dict[str, Any]] = [
        {"index": piece.index, "delta": delta, "logprobs": None, "finish_reason": None} for delta in deltas
    ]
    if choices:
        choices[0]["logprobs"] = chat_logprobs(service.tokenizer, body, piece.token_ids, piece.logprobs or [])
        choices[0] |= extras(service, body, piece)
        if len(choices) > 1 and body.return_token_ids:
            choices[0]["num_chunks"] = len(choices)
    if ending is not None:
        choices[-1] |= {"finish_reason": reason, "stop_reason": ending.stop_reason}
    return choices


def chat_logprobs(
    tokenizer: Tokenizer | None, body: ChatRequest, token_ids: Sequence[int], rows: Sequence[dict[int, Logprob]]
) -> dict[str, Any] | None:
    if not body.logprobs:
        return None
    content = []
    for token, row in zip(token_ids, rows, strict=True):
        likeliest = sorted(row.items(), key=lambda item: item[1].rank)[: body.top_logprobs or 0]
        top = [_logprob(tokenizer, other, found) for other, found in likeliest]
        content.append({**_logprob(tokenizer, token, row[token]), "top_logprobs": top})
    return {"content": content, "refusal": None}


def _logprob(tokenizer: Tokenizer | None, token: int, found: Logprob) -> dict[str, Any]:
    spelt = list(tokenizer.token_bytes(token)) if tokenizer is not None else None
    return {"token": found.decoded_token, "logprob": max(found.logprob, MIN_LOGPROB), "bytes": spelt}


def _head(service: Service, job: Job, kind: str) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{job.job_id}",
        "object": kind,
        "created": int(time.time()),
        "model": service.model_name,
        "system_fingerprint": service.fingerprint,
    }
