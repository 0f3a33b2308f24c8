"""The routes."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from fastapi import FastAPI
from fastapi import Request as HttpRequest
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from outrider import __version__
from outrider.chat_template import ChatOptions
from outrider.prompts import Prompts
from outrider.server import health
from outrider.server.answers import (
    ERRORS,
    HEALTH,
    TEXT,
    ChatAnswer,
    CompletionAnswer,
    DetokenizeAnswer,
    ModelCard,
    ModelList,
    ResponseAnswer,
    TokenizeAnswer,
    add_security,
    described,
    generated,
)
from outrider.server.chat import chat_chunks, messages_of, start_chat, whole_chat
from outrider.server.completions import completion_chunks, start_completion, whole_completion
from outrider.server.defaults import ServerDefaults
from outrider.server.engine_client import EngineClient
from outrider.server.errors import ApiError, bad_request, internal_error
from outrider.server.events import event_stream
from outrider.server.extra_routes import add_extra_routes
from outrider.server.generation import Service
from outrider.server.invalid import invalid_request
from outrider.server.parsers import ParserNames
from outrider.server.playground import add_playground
from outrider.server.request_id import RequestIds
from outrider.server.responses import response_events, start_response, whole_response
from outrider.server.responses_schema import ResponseRequest
from outrider.server.schema import ChatRequest, CompletionRequest, DetokenizeRequest, Generation, TokenizeRequest
from outrider.server.security import OPEN_PATHS, Access, Guard
from outrider.server.tally import CONTENT_TYPE
from outrider.tokenizer import Tokenizer

SPARE_REQUESTS = 64  # beyond one for each sequence that may wait or run: those are turned away one by one


class Application:
    """The service and the ASGI app in front of it."""

    def __init__(
        self,
        engine: EngineClient,
        tokenizer: Tokenizer | None,
        model_name: str,
        access: Access,
        parsers: ParserNames | None = None,
        *,
        other_names: Sequence[str] = (),
        defaults: ServerDefaults | None = None,
        root_path: str = "",
    ) -> None:
        """`other_names` of the model, beside the one that answers call it by. `root_path`: where a proxy has put it."""
        self.engine, model = engine, engine.model
        prompts = Prompts(tokenizer, model.vocab_size, model.max_model_len, model.origin)
        names, defaults = (model_name, *other_names), defaults or ServerDefaults()
        self.service = Service(
            prompts, engine, names, int(time.time()), parsers or ParserNames(), defaults, defaults.seeds()
        )
        # no pages of FastAPI's: they would load scripts from elsewhere
        app = FastAPI(version=__version__, docs_url=None, redoc_url=None, lifespan=self._life, responses=ERRORS)
        app.title, app.root_path = "Outrider", root_path
        _add_errors(app)
        _add_generation(app, self.service, access.pace)
        _add_tokens(app, self.service)
        _add_status(app, self.service)
        add_extra_routes(app, self.service)
        add_playground(app)
        if access.api_keys:
            add_security(app.openapi(), OPEN_PATHS)
        guarded: ASGIApp = Guard(app, replace(access, root_path=root_path), engine.capacity + SPARE_REQUESTS)
        if access.origins:  # outside of the guard: a preflight request carries no key
            origins = sorted(access.origins)
            guarded = CORSMiddleware(
                guarded, origins, allow_methods=["*"], allow_headers=["*"], expose_headers=["X-Request-Id"]
            )
        self.asgi: ASGIApp = RequestIds(guarded)

    @asynccontextmanager
    async def _life(self, app: FastAPI) -> AsyncIterator[None]:
        self.engine.start()
        yield
        self.engine.stop()
        self.service.preparation.close()


def _name(http: HttpRequest, body: Generation) -> None:
    """A request is called as its body says, or as its header does."""
    body.request_id = body.request_id or http.scope.get("request_id")


def _tenant(http: HttpRequest, body: Generation) -> str | None:
    """Whose pages and drafts may be shared: same key, same salt."""
    _name(http, body)
    parts = [part for part in (http.scope.get("tenant"), body.cache_salt) if part is not None]
    return json.dumps(parts) if parts else None


def _add_generation(app: FastAPI, service: Service, pace: float) -> None:
    @app.post("/v1/chat/completions", responses=generated(ChatAnswer))
    async def chat_completions(body: ChatRequest, http: HttpRequest) -> Response:
        job = await start_chat(service, body, _tenant(http, body))
        if body.stream:
            return event_stream(chat_chunks(http, service, body, job), pace, lambda: service.engine.abort(job))
        return JSONResponse(await whole_chat(http, service, body, job))

    @app.post("/v1/completions", responses=generated(CompletionAnswer))
    async def completions(body: CompletionRequest, http: HttpRequest) -> Response:
        job = await start_completion(service, body, _tenant(http, body))
        if body.stream:
            return event_stream(completion_chunks(http, service, body, job), pace, lambda: service.engine.abort(job))
        return JSONResponse(await whole_completion(http, service, body, job))

    @app.post("/v1/responses", responses=generated(ResponseAnswer))
    async def responses(body: ResponseRequest, http: HttpRequest) -> Response:
        made = await start_response(service, body, _tenant(http, body))
        if body.stream:
            events = response_events(http, service, made)
            return event_stream(events, pace, lambda: service.engine.abort(made.job), named=True)
        return JSONResponse(await whole_response(http, service, made))


def _add_tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize", responses=described(TokenizeAnswer))
    async def tokenize(body: TokenizeRequest) -> dict[str, Any]:
        service.check_model(body.model)
        tokenizer = service.tokenizer
        if tokenizer is None:
            raise bad_request("this model has no tokenizer")

        def encode() -> list[int]:
            if body.messages is None:
                return tokenizer.encode(body.prompt or "", add_special_tokens=body.add_special_tokens)
            options = ChatOptions(
                add_generation_prompt=body.add_generation_prompt, continue_final_message=body.continue_final_message
            )
            text = tokenizer.chat(messages_of(body.messages, tokenizer), options)
            return tokenizer.encode(text, add_special_tokens=False)

        tokens = await service.prepare(encode, body)
        found = {"count": len(tokens), "max_model_len": service.prompts.max_model_len, "tokens": tokens}
        return found | ({"token_strs": [tokenizer.token(token) for token in tokens]} if body.return_token_strs else {})

    @app.post("/detokenize", responses=described(DetokenizeAnswer))
    async def detokenize(body: DetokenizeRequest) -> dict[str, Any]:
        service.check_model(body.model)
        tokenizer = service.tokenizer
        if tokenizer is None:
            raise bad_request("this model has no tokenizer")
        skip = body.skip_special_tokens
        text = await service.prepare(lambda: tokenizer.decode(body.tokens, skip_special_tokens=skip), body)
        return {"prompt": text}


def _add_status(app: FastAPI, service: Service) -> None:
    def card(name: str) -> dict[str, Any]:
        return {
            "id": name,
            "object": "model",
            "created": service.created,
            "owned_by": "outrider",
            "max_model_len": service.prompts.max_model_len,
            "num_speculative_tokens": service.engine.model.num_speculative_tokens,
        }

    @app.get("/v1/models", responses=described(ModelList))
    async def models() -> dict[str, Any]:
        return {"object": "list", "data": [card(name) for name in service.names]}

    @app.get("/v1/models/{name:path}", responses=described(ModelCard))
    async def model(name: str) -> dict[str, Any]:
        service.check_model(name)
        return card(name if name in service.names else service.model_name)

    @app.get("/metrics", responses=TEXT, response_class=PlainTextResponse)
    async def show_metrics() -> Response:
        return Response(await service.engine.metrics(), media_type=CONTENT_TYPE)

    def health_route(path: str, check: Callable[[EngineClient], health.Verdict]) -> None:
        @app.get(path, name=check.__name__, responses=HEALTH)
        async def answer() -> Response:
            status, body = check(service.engine)
            return JSONResponse(body, status)

    health_route("/health", health.ready)
    health_route("/health/live", health.live)
    health_route("/health/ready", health.ready)
    health_route("/health/decode", health.decode)


def _add_errors(app: FastAPI) -> None:
    def answer(error: ApiError) -> Response:
        return JSONResponse(error.body, error.status, error.headers)

    async def on_api_error(http: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, ApiError)
        return answer(error)

    async def on_invalid(http: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, RequestValidationError)
        return answer(invalid_request(error.errors(), error.body))

    async def on_http(http: HttpRequest, error: Exception) -> Response:
        assert isinstance(error, HTTPException)
        told = ApiError(error.status_code, str(error.detail))
        return JSONResponse(told.body, told.status, told.headers | dict(error.headers or {}))

    app.add_exception_handler(ApiError, on_api_error)
    app.add_exception_handler(RequestValidationError, on_invalid)
    app.add_exception_handler(HTTPException, on_http)
    app.add_exception_handler(Exception, lambda http, error: answer(internal_error(error)))
