"""From a client's request to a job for the engine, and what chats and completions answer alike."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

from fastapi import Request as HttpRequest
from pydantic import BaseModel

from outrider import __version__
from outrider.outputs import Logprob
from outrider.prompts import ContextOverflowError, Prompt, Prompts
from outrider.sampling_params import Guided, SamplingParams, Speculation
from outrider.server.continuation import checked
from outrider.server.defaults import ServerDefaults
from outrider.server.engine_client import EngineClient, ReadyPrompt
from outrider.server.errors import ApiError, bad_request, clean
from outrider.server.job import Job
from outrider.server.parsers import ParserNames
from outrider.server.preparation import Preparation, size_of
from outrider.server.protocol import Piece
from outrider.server.schema import Generation, StructuredOutputs
from outrider.tokenizer import Tokenizer

MIN_LOGPROB = -9999.0  # JSON has no infinity
MAX_PROMPT_LOGPROBS = 2**18  # figures in one answer
_CONVERTED = {"prediction", "structured_outputs"}  # the same name, another form
_SHARED = {each.name for each in fields(SamplingParams)} & set(Generation.model_fields) - _CONVERTED


@dataclass(frozen=True)
class Service:
    """What the routes work with. A model goes by any of its names, and is called by the first."""

    prompts: Prompts
    engine: EngineClient
    names: Sequence[str]
    created: int
    parsers: ParserNames
    defaults: ServerDefaults = field(default_factory=ServerDefaults)
    next_seed: Callable[[], int | None] = lambda: None  # of a request that has none; None: a fresh one
    preparation: Preparation = field(default_factory=Preparation)

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.prompts.tokenizer

    @property
    def model_name(self) -> str:
        return self.names[0]

    @cached_property
    def fingerprint(self) -> str:
        """Changes with whatever might change an answer to the same request with the same seed."""
        model = self.engine.model
        parts = [__version__, model.origin, str(model.vocab_size), *map(str, vars(self.defaults).values())]
        return "fp_" + hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]

    def check_model(self, name: str | None) -> None:
        """A model may also be asked for by what the server was started with, as a path."""
        if name is not None and name not in self.names and name != self.engine.model.origin:
            known = ", ".join(self.names)
            raise ApiError(404, f"there is no model {clean(name)!r} here, only {known}", "model_not_found", "model")

    async def prepare(self, work: Callable[[], Any], given: BaseModel) -> Any:
        """What comes of a template and a tokenizer, for what a client has given."""

        def explain(error: ValueError) -> ApiError:
            told = clean(str(error), {self.engine.model.origin: self.model_name})
            if isinstance(error, ContextOverflowError):
                holder = "prompt" if "prompt" in given.model_fields_set else "messages"
                return ApiError(400, told, "context_length_exceeded", holder)
            return bad_request(told)

        return await self.preparation.run(work, size_of(given), explain)

    async def submit(self, body: Generation, prompts: Sequence[Callable[[], Prompt]], params: SamplingParams) -> Job:
        """The job, accepted by the engine. Prompts are made here, after it is known that there is room for them."""
        self.engine.check_room(len(prompts) * params.n)

        if params.seed is None:
            params = replace(params, seed=self.next_seed())

        def make() -> tuple[list[ReadyPrompt], list[list[int]]]:
            named = ((prompt(), f"prompt {number}") for number, prompt in enumerate(prompts))
            made = [self._asked(prompt, params, name, body.truncate_prompt_tokens) for prompt, name in named]
            check_prompt_logprobs(sum(len(each.ids) for each in made), params)
            begun = checked(body, len(prompts) * params.n, params.temperature)
            for tokens in filter(None, begun):
                self.prompts.check_ids(tokens, "continuation")
            return made, begun

        begin = time.monotonic()
        seconds = min(body.timeout or self.engine.limits.deadline, self.engine.limits.deadline)
        asked, begun = await self.prepare(make, body)
        name, until = body.request_id, begin + seconds
        job = self.engine.submit(asked, until, begin, streams=body.stream, job_id=name, begun=begun)
        try:
            await job.accepted()
        except BaseException:  # perhaps the engine has said nothing at all
            self.engine.abort(job)
            raise
        return job

    def _asked(self, prompt: Prompt, params: SamplingParams, name: str, most: int | None) -> ReadyPrompt:
        """`most`: the prompt's last tokens that are read; -1: as many as leave room for an answer."""
        ids = self.prompts.ids(prompt, name)
        pictured = prompt if isinstance(prompt, Mapping) and prompt.get("multi_modal_data") else None
        if most is not None:
            if pictured is not None:
                raise ValueError("truncate_prompt_tokens cannot cut a prompt with images: leave it out")
            ids = ids[max(len(ids) - (most if most >= 0 else self.prompts.max_model_len - 1), 0) :]
        self.prompts.check(ids, name)
        if pictured is not None:  # the engine knows what an image takes
            return ReadyPrompt(ids, pictured, params)
        return ReadyPrompt(ids, ids, self.prompts.settled(params, ids))


def check_prompt_logprobs(num_tokens: int, params: SamplingParams) -> None:
    """Refuses more log-probabilities of prompts than may be kept until the answer is sent."""
    most = params.prompt_logprobs
    if most is not None and num_tokens * params.n * (most + 1) > MAX_PROMPT_LOGPROBS:
        raise ValueError(f"log-probabilities of prompts are limited to {MAX_PROMPT_LOGPROBS} figures: ask for fewer")


def sampling_params(
    service: Service, body: Generation, *, max_tokens: int | None, logprobs: int | None, tenant: str | None
) -> SamplingParams:
    """Fields of the same name mean the same; one that was not given keeps the server's default, or the engine's."""
    given = body.model_dump(include=_SHARED - {"max_tokens", "logprobs"}, exclude_none=True)
    speculative = body.speculative.num_tokens if body.speculative is not None else None
    try:
        return SamplingParams(
            **(service.defaults.sampling() | given),
            guided=guided_of(body),
            max_tokens=max_tokens,
            logprobs=logprobs,
            num_speculative_tokens=speculative,
            prediction=body.prediction.text if body.prediction is not None else None,
            tenant=tenant,
            learn=body.allow_learning,
            trace=body.return_drafts,
        )
    except ValueError as error:
        raise bad_request(str(error)) from error


def guided_of(body: Generation) -> Guided | None:
    """What the answer must look like, whichever way it was said."""
    form, found = body.response_format, []
    if form is not None and form.type == "json_object":
        found.append(Guided(json_object=True))
    if form is not None and form.json_schema is not None:
        found.append(Guided(json_schema=form.json_schema.schema_))
    if body.guided_json is not None:
        found.append(Guided(json_schema=_schema(body.guided_json)))
    if body.guided_regex is not None:
        found.append(Guided(regex=body.guided_regex))
    if body.guided_choice is not None:
        found.append(Guided(choice=body.guided_choice))
    if body.guided_grammar is not None:
        found.append(Guided(grammar=body.guided_grammar))
    if body.structured_outputs is not None:
        found += _structured(body.structured_outputs)
    if len(found) > 1:
        raise ValueError("response_format, structured_outputs and guided_... contradict each other: give one of them")
    if found:
        return replace(found[0], max_whitespace=body.guided_max_whitespace, close=body.guided_close)
    idle = sorted(body.model_fields_set & {"guided_max_whitespace", "guided_close"})
    if idle:
        raise ValueError(f"{idle[0]} says how JSON is written, and none is asked for: leave it out")
    return None


def _structured(given: StructuredOutputs) -> list[Guided]:
    found = []
    if given.json_ is not None:
        found.append(Guided(json_schema=_schema(given.json_)))
    if given.json_object:
        found.append(Guided(json_object=True))
    found += [
        Guided(**{name: value})
        for name in ("regex", "choice", "grammar")
        if (value := getattr(given, name)) is not None
    ]
    if not found:
        raise ValueError("structured_outputs says nothing: give json, regex, choice, grammar or json_object")
    return found


def _schema(given: dict[str, Any] | str) -> dict[str, Any]:
    """A schema may come as text."""
    if not isinstance(given, str):
        return given
    try:
        found = json.loads(given)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the schema is not valid JSON ({error})") from None
    if not isinstance(found, dict):
        raise ValueError("the schema must be a JSON object")
    return found


@asynccontextmanager
async def aborting(http: HttpRequest, service: Service, job: Job) -> AsyncIterator[None]:
    """When the client goes away, or the answer ends for any other reason, the job ends too."""

    async def watch() -> None:
        while (await http.receive())["type"] != "http.disconnect":
            pass
        service.engine.abort(job)

    watcher = asyncio.create_task(watch())
    try:
        yield
    finally:
        watcher.cancel()
        service.engine.abort(job)


async def finished(http: HttpRequest, service: Service, job: Job) -> list[Piece]:
    """All of it, in order. A job that does not stream has one piece for each sequence."""
    outputs: dict[int, Piece] = {}
    async with aborting(http, service, job), aclosing(job.pieces()) as pieces:
        async for piece in pieces:
            outputs[piece.index] = piece
    return [outputs[index] for index in sorted(outputs)]


def speculations_of(pieces: Sequence[Piece]) -> list[Speculation]:
    """How drafting went for the sequences that have ended with these messages."""
    return [piece.ending.speculation for piece in pieces if piece.ending is not None]


def usage(job: Job, num_generated: int) -> dict[str, Any]:
    prompts, num_generated = job.num_prompt_tokens, job.num_begun + num_generated
    accepted = sum(count.num_predicted_accepted for count in job.counts.values())
    rejected = sum(count.num_predicted for count in job.counts.values()) - accepted
    return {
        "prompt_tokens": prompts,
        "completion_tokens": num_generated,
        "total_tokens": prompts + num_generated,
        "prompt_tokens_details": {"cached_tokens": job.num_cached},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": rejected,
        },
    }


def metrics_of(speculations: Sequence[Speculation]) -> dict[str, Any] | None:
    """vLLM's shape, and as there for a single sequence only. The acceptance length is over all rounds of the request,
    as in the log and in `Speculation`; the histogram is of those that had a draft."""
    if len(speculations) != 1 or not speculations[0].drafted:
        return None
    made = speculations[0]
    num_steps = made.drafted_at[0]  # a round may have had no draft
    reached = [num_steps, *made.accepted_at, 0]  # rounds that accepted at least so many
    histogram = [more - fewer for more, fewer in pairwise(reached)]
    return {
        "speculative_decoding": {
            "mean_acceptance_length": made.accept_length,
            "draft_acceptance_rate": made.accepted / made.drafted,
            "acceptance_histogram": histogram,
            "num_spec_steps": num_steps,
            "num_rounds": made.rounds,
            "num_accepted_draft_tokens": made.accepted,
            "num_draft_tokens": made.drafted,
        }
    }


def prompt_logprobs_of(body: Generation, made: Piece) -> dict[str, Any]:
    """Log-probabilities of a prompt in vLLM's shape, for those who asked; the first token has none."""
    if body.prompt_logprobs is None:
        return {}
    return {"prompt_logprobs": [None, *map(_described, made.prompt_rows())]}


def _described(row: Mapping[int, Logprob]) -> dict[str, dict[str, Any]]:
    return {
        str(token): {
            "logprob": max(found.logprob, MIN_LOGPROB),
            "rank": found.rank,
            "decoded_token": found.decoded_token,
        }
        for token, found in row.items()
    }


def extras(service: Service, body: Generation, made: Piece) -> dict[str, Any]:
    if not body.return_token_ids:
        return {}
    begin = made.text_ends[-1] - len(made.text) if made.text_ends else 0
    found: dict[str, Any] = {
        "token_ids": list(made.token_ids),
        "token_texts": [made.text[a - begin : b - begin] for a, b in pairwise([begin, *made.text_ends])],
        "draft_positions": list(made.draft_positions),
    }
    if body.stream and made.draft is not None:
        accepted = sum(position > 0 for position in made.draft_positions)
        found["draft"] = {"token_ids": made.draft, "token_texts": _spelt(service, made.draft), "accepted": accepted}
    return found


def _spelt(service: Service, tokens: Sequence[int]) -> list[str]:
    tokenizer = service.tokenizer
    return [tokenizer.token(token) if tokenizer is not None else "" for token in tokens]
