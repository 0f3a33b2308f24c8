"""Command-line options that bench and certify share, and how they become a drafter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.config import SpeculativeConfig
from outrider.drafters.base import drafters
from outrider.pair import DEFAULT_DIRECTORY
from outrider.threads import threads

Model = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Target: a directory, a .gguf file or a hub id. Default: the embedded model."),
]
Draft = Annotated[str | None, typer.Option("--draft", "-d", help="Drafter: a directory, a hub id, or a method's name.")]
SpeculativeJson = Annotated[
    str | None, typer.Option("--speculative-config", help="Drafter and its settings, as in vLLM.", metavar="JSON")
]
NumSpeculativeTokens = Annotated[
    int | None, typer.Option("--num-speculative-tokens", "-k", help="Tokens to draft in a round, at most.", metavar="K")
]
PromptFile = Annotated[
    Path | None,
    typer.Option("--prompts", help='JSONL: "prompt", "turns" or "prompt_token_ids" on each line.', exists=True),
]
Dtype = Annotated[str, typer.Option("--dtype", help="float32, bfloat16, float16 or auto.")]
Device = Annotated[str, typer.Option("--device", help="cpu, cuda, cuda:N or auto.")]
MaxModelLen = Annotated[int | None, typer.Option("--max-model-len", help="Longest context.", metavar="N")]
Exact = Annotated[bool, typer.Option("--exact", help="On a GPU: bits of a token do not depend on its company.")]
Eager = Annotated[bool, typer.Option("--enforce-eager", help="On a GPU: no CUDA graphs.")]


def _use_threads(count: int | None) -> int | None:
    """Takes effect when it is read: the number of threads is the whole process's."""
    if count is not None:
        threads.fix(count)
    return count


Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        help="Threads of the CPU. Default: one for every processor that others leave.",
        min=1,
        metavar="N",
        callback=_use_threads,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]


def speculative_from(
    model: str | None, draft: str | None, config_json: str | None, num_tokens: int | None
) -> SpeculativeConfig | None:
    """The drafter that was asked for; with the embedded target its own, with another one none."""
    if draft is not None and config_json is not None:
        raise ValueError("--draft and --speculative-config both name a drafter: give one of them")
    if config_json is not None:
        values = _parse(config_json)
        if model is None and not {"method", "model"} & values.keys():
            values["model"] = str(DEFAULT_DIRECTORY / "drafter")
    elif draft is not None:
        values = {"method": draft} if draft in drafters else {"model": draft}
    elif model is None:
        values = {"model": str(DEFAULT_DIRECTORY / "drafter")}
    elif num_tokens is not None:
        values = {"method": "ngram"}
    else:
        return None
    if num_tokens is not None:
        values["num_speculative_tokens"] = num_tokens
    return SpeculativeConfig.from_dict(values)


def _parse(text: str) -> dict[str, Any]:
    example = """'{"method": "ngram", "num_speculative_tokens": 5}'"""
    try:
        values = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--speculative-config is not valid JSON ({error}); write it like {example}") from error
    if not isinstance(values, dict):
        raise ValueError(f"--speculative-config must be a JSON object, not {text}; write it like {example}")
    return values
