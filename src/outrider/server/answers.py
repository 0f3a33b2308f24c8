"""What the server answers, for its OpenAPI document. Tests hold the answers themselves against it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class _Answer(BaseModel):
    model_config = ConfigDict(protected_namespaces=())


class ErrorDetail(_Answer):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorAnswer(_Answer):
    error: ErrorDetail


class PromptDetails(_Answer):
    cached_tokens: int


class CompletionDetails(_Answer):
    reasoning_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0


class Usage(_Answer):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptDetails
    completion_tokens_details: CompletionDetails | None = None


class SpeculativeDecoding(_Answer):
    mean_acceptance_length: float
    draft_acceptance_rate: float
    acceptance_histogram: list[int]
    num_spec_steps: int  # rounds that had a draft
    num_rounds: int  # all of them
    num_accepted_draft_tokens: int
    num_draft_tokens: int


class AnswerMetrics(_Answer):
    speculative_decoding: SpeculativeDecoding


class _Choice(_Answer):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls", "abort"]
    stop_reason: int | str | None
    token_ids: list[int] = []
    token_texts: list[str] = []
    draft_positions: list[int] = []


class CalledFunction(_Answer):
    name: str
    arguments: str


class ToolCall(_Answer):
    id: str
    type: Literal["function"]
    function: CalledFunction


class AssistantMessage(_Answer):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str = ""
    reasoning: str = ""  # the same
    tool_calls: list[ToolCall] = []


class TokenLogprob(_Answer):
    token: str
    logprob: float
    bytes: list[int] | None


class ContentLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(_Answer):
    content: list[ContentLogprob]
    refusal: None


class ChatChoice(_Choice):
    message: AssistantMessage
    logprobs: ChatLogprobs | None


class CompletionLogprobs(_Answer):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class PromptLogprob(_Answer):
    logprob: float
    rank: int
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]


class CompletionChoice(_Choice):
    text: str
    logprobs: CompletionLogprobs | None
    prompt_logprobs: PromptLogprobs | None = None


class _Generated(_Answer):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage
    metrics: AnswerMetrics | None


class ChatAnswer(_Generated):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs | None = None


class CompletionAnswer(_Generated):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class InputDetails(_Answer):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(_Answer):
    reasoning_tokens: int


class ResponseUsage(_Answer):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class OutputItem(_Answer):
    """A message, a function_call or reasoning."""

    type: Literal["message", "function_call", "reasoning"]
    id: str
    status: Literal["completed", "incomplete"]
    role: Literal["assistant"] = "assistant"
    content: list[dict[str, Any]] = []
    call_id: str = ""
    name: str = ""
    arguments: str = ""


class ResponseAnswer(_Answer):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["completed", "incomplete"]
    model: str
    output: list[OutputItem]
    usage: ResponseUsage


class TokenizeAnswer(_Answer):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] = []


class DetokenizeAnswer(_Answer):
    prompt: str


class ModelCard(_Answer):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    max_model_len: int
    num_speculative_tokens: int


class ModelList(_Answer):
    object: Literal["list"]
    data: list[ModelCard]


class VersionAnswer(_Answer):
    version: str


class TokenizerInfo(_Answer):
    vocab_size: int
    model_max_length: int
    special_tokens: dict[str, str]
    chat_template: str | None
    fingerprint: str  # the same for tokenizers whose ids mean the same tokens


class HealthAnswer(_Answer):
    status: str
    requests: int = 0
    steps: int = 0


Responses = dict[int | str, dict[str, Any]]

_BUSY: Responses = {
    429: {"model": ErrorAnswer, "description": "Too many requests are waiting; see Retry-After"},
    503: {"model": ErrorAnswer, "description": "The server is shutting down"},
    504: {"model": ErrorAnswer, "description": "The request took longer than its deadline"},
}
ERRORS: Responses = {
    "4XX": {"model": ErrorAnswer, "description": "The request cannot be done"},
    500: {"model": ErrorAnswer, "description": "Internal error: a reference to the server's log"},
}


def generated(model: type[BaseModel]) -> Responses:
    """The OpenAPI answers of a route that generates: whole, or as a stream of events."""
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    events = {"text/event-stream": {"schema": event}}
    return {200: {"model": model, "description": "The answer, or its events", "content": events}} | _BUSY


def described(model: type[BaseModel]) -> Responses:
    return {200: {"model": model}}


HEALTH: Responses = {200: {"model": HealthAnswer}, 503: {"model": HealthAnswer, "description": "It is not"}}
_ERROR = {"application/json": {"schema": {"$ref": "#/components/schemas/ErrorAnswer"}}}
TEXT: Responses = {  # errors are JSON here as well
    200: {"content": {"text/plain": {"schema": {"type": "string"}}}, "description": "Prometheus"},
    "4XX": {"content": _ERROR, "description": ERRORS["4XX"]["description"]},
    500: {"content": _ERROR, "description": ERRORS[500]["description"]},
}


def add_security(document: dict[str, Any], open_paths: frozenset[str]) -> None:
    """Says which routes ask for the key."""
    document.setdefault("components", {})["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in document["paths"].items():
        for operation in operations.values():
            operation["security"] = [] if path in open_paths else [{"key": []}]
