"""/v1/responses: a chat by another name, whose answer is a list of items and whose stream is a list of events."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from fastapi import Request as HttpRequest
from pydantic import ValidationError

from outrider.server.chat import chat_logprobs, chat_usage, readers_of, start_chat
from outrider.server.errors import ApiError, internal_error
from outrider.server.generation import Service, aborting, finished
from outrider.server.invalid import invalid_request
from outrider.server.job import Job
from outrider.server.messages import MessageReader
from outrider.server.protocol import Piece
from outrider.server.response_output import Event, ResponseOutput
from outrider.server.responses_schema import ResponseRequest
from outrider.server.schema import ChatRequest


@dataclass
class Response:
    """A request of the Responses API that is being answered."""

    body: ResponseRequest
    chat: ChatRequest
    job: Job
    created: float = field(default_factory=time.time)
    output: ResponseOutput = field(default_factory=ResponseOutput)
    num_generated: int = 0
    finish_reason: str | None = None


async def start_response(service: Service, body: ResponseRequest, tenant: str | None) -> Response:
    try:
        chat = body.chat()
    except ValidationError as error:
        errors = [{**each, "loc": ("body", *each["loc"])} for each in error.errors()]
        raise invalid_request(errors, body.model_dump()) from error
    return Response(body, chat, await start_chat(service, chat, tenant))


async def whole_response(http: HttpRequest, service: Service, response: Response) -> dict[str, Any]:
    readers = readers_of(service, response.chat, response.job)
    for piece in await finished(http, service, response.job):
        _read(service, response, piece, readers[0])
    return _described(service, response, readers)


async def response_events(
    http: HttpRequest, service: Service, response: Response
) -> AsyncGenerator[dict[str, Any], None]:
    """The numbered events of a response. What goes wrong after the first is an event, too."""
    number = 0
    async with aclosing(_events(http, service, response)) as events:
        try:
            async for event in events:
                yield {**event, "sequence_number": number}
                number += 1
        except ApiError as error:
            yield {**_failure(error), "sequence_number": number}
        except Exception as error:
            yield {**_failure(internal_error(error)), "sequence_number": number}


async def _events(http: HttpRequest, service: Service, response: Response) -> AsyncGenerator[Event, None]:
    readers = readers_of(service, response.chat, response.job)
    begun = _described(service, response, readers)
    for kind in ("created", "in_progress"):
        yield {"type": f"response.{kind}", "response": begun}
    async with aborting(http, service, response.job), aclosing(response.job.pieces()) as pieces:
        async for piece in pieces:
            for event in _read(service, response, piece, readers[0]):
                yield event
    ended = _described(service, response, readers)
    yield {"type": f"response.{ended['status']}", "response": ended}


def _read(service: Service, response: Response, piece: Piece, reader: MessageReader) -> list[Event]:
    ending = piece.ending
    deltas, reason = reader.read(piece, ending.finish_reason if ending is not None else None)
    found = chat_logprobs(service.tokenizer, response.chat, piece.token_ids, piece.logprobs or [])
    response.num_generated += len(piece.token_ids)
    events = response.output.read(deltas, found["content"] if found is not None else ())
    if ending is not None:
        response.finish_reason = reason
        events += response.output.finish(complete=reason in ("stop", "tool_calls"))
    return events


def _failure(error: ApiError) -> Event:
    told = error.body["error"]
    return {"type": "error", "code": told["code"], "message": told["message"], "param": told["param"]}


def _described(service: Service, response: Response, readers: Sequence[MessageReader]) -> dict[str, Any]:
    body, chat, reason = response.body, response.chat, response.finish_reason
    status = {None: "in_progress", "stop": "completed", "tool_calls": "completed"}.get(reason, "incomplete")
    asked = body.text.model_dump(exclude_none=True, by_alias=True) if body.text is not None else {}
    tools = [{"description": None, "parameters": None, "strict": False, **_given(tool)} for tool in body.tools or ()]
    return {
        "id": f"resp_{response.job.job_id}",
        "object": "response",
        "created_at": int(response.created),
        "completed_at": None if reason is None else int(time.time()),
        "status": status,
        "background": False,
        "error": None,
        "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
        "instructions": body.instructions,
        "max_output_tokens": chat.max_tokens,
        "max_tool_calls": None,
        "model": service.model_name,
        "output": response.output.items,
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "previous_response_id": None,
        "reasoning": {"effort": chat.reasoning_effort, "summary": None},
        "store": False,
        "temperature": chat.temperature,
        "top_p": chat.top_p,
        "text": {"format": {"type": "text"}} | asked,
        "tool_choice": _given(body.tool_choice) if body.tool_choice is not None else "auto",
        "tools": tools,
        "top_logprobs": body.top_logprobs,
        "truncation": "disabled",
        "metadata": body.metadata or {},
        "usage": None if reason is None else _usage(chat_usage(response.job, response.num_generated, readers)),
    }


def _given(value: Any) -> Any:
    return value if isinstance(value, str) else value.model_dump(exclude_none=True)


def _usage(counted: dict[str, Any]) -> dict[str, Any]:
    num_reasoning = counted["completion_tokens_details"].get("reasoning_tokens", 0)
    return {
        "input_tokens": counted["prompt_tokens"],
        "input_tokens_details": {**counted["prompt_tokens_details"], "cache_write_tokens": 0},  # is a price
        "output_tokens": counted["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": num_reasoning},
        "total_tokens": counted["total_tokens"],
    }
