"""The server's part of docs/compatibility.md, made from the schemas, routes and rules that the server goes by."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pydantic import BaseModel

from outrider.compatibility import fields, flags
from outrider.compatibility.rules import Rules
from outrider.compatibility.table import HEAD, REFUSED, WORKS, table
from outrider.server.extra_routes import REFUSED as REFUSED_ROUTES
from outrider.server.responses_schema import ResponseRequest
from outrider.server.schema import ChatRequest, CompletionRequest, Generation
from outrider.server.schema_base import own_names

ROUTES = {
    "POST /v1/chat/completions": "",
    "POST /v1/completions": "",
    "POST /v1/responses": "text, tools, schemas, events; nothing is stored",
    "GET /v1/models": "",
    "POST /tokenize": "",
    "POST /detokenize": "",
    "GET /version": "",
    "GET /ping": "also by POST; as /health",
    "GET /health": "",
    "GET /metrics": "vLLM's names where vLLM has the figure",
    "GET /tokenizer_info": "vocabulary, special tokens, chat template",
}
NOTES = {
    "n": "at most 64",
    "seed": "the same tokens again, drafted or not, alone or among others",
    "logit_bias": "at most 1024 tokens",
    "stop": "at most 64",
    "structured_outputs": "json, regex, choice, grammar or json_object",
    "guided_json": "and the other guided_... of older versions",
    "response_format": "text, json_object, json_schema",
    "truncate_prompt_tokens": "the prompt's last tokens; -1: as many as leave room for an answer",
    "prompt_logprobs": "in whole answers",
    "request_id": "part of the answer's id; X-Request-Id is another way to say it",
    "prediction": "is drafted from",
    "speculative": "Outrider's own: how much is drafted",
    "chat_template_kwargs": "variables of the template's own; not messages, tools or special tokens",
    "reasoning_effort": "for the template; none switches reasoning off where the template can",
    "tool_choice": "none, auto, required, or a function",
    "messages": "what other servers and clients add to a message is left out; images as data: URLs",
    "echo": "with logprobs those of the prompt too; with max_tokens: 0 nothing else",
    "input": "text, or items: messages, calls, their results, reasoning",
    "tools": "functions",
    "metadata": "given back",
    "store": "taken; nothing is stored",
    "text": "format: text, json_object or json_schema",
    "reasoning": "effort",
}


def server() -> str:
    """Routes, flags, and the fields of every route that generates."""
    routes = [(f"`{name}`", WORKS, note) for name, note in ROUTES.items()]
    routes += [(f"`{path}`", REFUSED, why) for path, why in REFUSED_ROUTES.items()]
    parts = [
        ("Routes", HEAD + "".join(f"| {names} | {here} | {note} |\n" for names, here, note in routes)),
        ("Flags of `serve`", table(flags.SERVE, flags.OWN)),
        ("Fields of every request", table(fields.EVERY, _own(Generation))),
        ("Fields of chats", table(_beyond(fields.CHAT), _own(ChatRequest))),
        ("Fields of completions", table(_beyond(fields.COMPLETION), _own(CompletionRequest))),
        ("Fields of responses", table(_beyond(fields.RESPONSE), _own(ResponseRequest))),
    ]
    return "\n".join(f"### {title}\n\n{text}" for title, text in parts)


def _own(model: type[BaseModel]) -> dict[str, str]:
    """A schema's own fields, those without a note together; without those that every request has."""
    every = own_names(Generation) if model is not Generation else set()
    names = sorted(own_names(model) - every)
    plain = "`, `".join(name for name in names if name not in NOTES)
    return _noted(names) | ({plain: ""} if plain else {})


def _noted(names: Iterable[str]) -> dict[str, str]:
    return {name: NOTES[name] for name in names if name in NOTES}


def _beyond(rules: Rules) -> Rules:
    """What is not said of every request."""
    every = [*fields.EVERY.no_effect, *fields.EVERY.refused]
    return Rules(
        rules.works,
        [group for group in rules.no_effect if not any(group is each for each in every)],
        [group for group in rules.refused if not any(group is each for each in every)],
    )


PARTS: dict[str, Callable[[], str]] = {"server": server}  # what is written between which marks
