"""Routes that other servers have: those that are answered, and those that are refused with a sentence."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse, Response

from outrider import __version__
from outrider.server import health
from outrider.server.answers import HEALTH, TokenizerInfo, VersionAnswer, described
from outrider.server.errors import ApiError, bad_request
from outrider.server.generation import Service

_STORED = "nothing is stored: an answer is known only to whoever asked for it"
REFUSED = {
    "/v1/embeddings": "models answer in text here: use another server for embeddings",
    "/v1/messages": "this server speaks OpenAI's language: use /v1/chat/completions, or a proxy that translates",
    "/v1/messages/count_tokens": "this server speaks OpenAI's language: /tokenize counts tokens",
    "/v1/moderations": "nothing is judged here: use a model for it, through /v1/chat/completions",
    "/v1/images/generations": "models answer in text here: use another server for images",
    "/v1/audio/speech": "models answer in text here: use another server for speech",
    "/v1/audio/transcriptions": "models read text and images here: use another server for speech",
    "/v1/rerank": "models answer in text here: use another server for scores",
    "/v1/score": "models answer in text here: use another server for scores",
    "/v1/batches": "requests are answered while their sender waits: send them all at once",
    "/v1/files": "nothing is stored: send what is to be read with the request",
    "/v1/assistants": "nothing is stored: use /v1/responses or /v1/chat/completions",
    "/v1/threads": "nothing is stored: use /v1/responses or /v1/chat/completions",
    "/v1/conversations": _STORED,
    "/v1/responses/{id}": _STORED,
    "/v1/responses/{id}/cancel": "an answer ends when its reader closes the connection",
    "/v1/load_lora_adapter": "LoRA adapters are not supported: merge the adapter into the weights",
}


def add_extra_routes(app: FastAPI, service: Service) -> None:
    @app.get("/version", responses=described(VersionAnswer))
    async def version() -> dict[str, str]:
        return {"version": __version__}

    @app.get("/tokenizer_info", responses=described(TokenizerInfo))
    async def tokenizer_info() -> dict[str, Any]:
        tokenizer = service.tokenizer
        if tokenizer is None:
            raise bad_request("this model has no tokenizer")
        return {
            "vocab_size": tokenizer.vocab_size,
            "model_max_length": service.prompts.max_model_len,
            "special_tokens": tokenizer.special_tokens,
            "chat_template": tokenizer.template_text(),
            "fingerprint": tokenizer.fingerprint(),
        }

    def answer_ping() -> Response:
        status, body = health.ready(service.engine)
        return JSONResponse(body, status)

    @app.get("/ping", responses=HEALTH)
    async def ping() -> Response:
        return answer_ping()

    @app.post("/ping", include_in_schema=False)  # as SageMaker asks
    async def ping_by_post() -> Response:
        return answer_ping()

    for path, why in REFUSED.items():
        _refuse(app, path, why)


def _refuse(app: FastAPI, path: str, why: str) -> None:
    """404: clients try a 5xx again."""

    async def answer() -> Response:
        raise ApiError(404, f"{path}: {why}", "unsupported_endpoint")

    app.add_api_route(path, answer, methods=["GET", "POST", "DELETE"], include_in_schema=False)
