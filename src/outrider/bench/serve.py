"""`outrider bench serve`: load against any OpenAI-compatible server, a card, and one JSON line last."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from outrider.bench.commands import Workload, progress_bar
from outrider.bench.interleave import Progress
from outrider.bench.options import AsJson, PromptFile
from outrider.bench.prompts import WORKLOADS, PromptText, read_prompts
from outrider.bench.serve_client import Asking
from outrider.bench.serve_load import Load, Outcome, connect, run_load, served_model, to_lines
from outrider.bench.serve_report import parse_goals, show_card, summarise, to_dict
from outrider.console import open_consoles

DEFAULT_CONCURRENCY = 8

BaseUrl = Annotated[str, typer.Option("--base-url", help="The server, with or without /v1.")]
ServedModel = Annotated[
    str | None, typer.Option("--model", "-m", help="The model's name there. Default: its first.", metavar="NAME")
]
ApiKey = Annotated[str | None, typer.Option("--api-key", envvar="OPENAI_API_KEY", help="What the server asks for.")]
Endpoint = Annotated[str, typer.Option("--endpoint", help="chat or completions.")]
RequestRate = Annotated[
    float | None, typer.Option("--request-rate", help="Requests a second on average, at random times.", min=1e-6)
]
Concurrency = Annotated[
    int | None,
    typer.Option("--concurrency", help="Requests at once at most. Default: 8, or no limit with a rate.", min=1),
]
NumPrompts = Annotated[int, typer.Option("--num-prompts", help="Requests that are measured.", min=1)]
NumWarmUps = Annotated[int, typer.Option("--num-warmups", help="Requests before those.", min=0)]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Longest answer.", min=1)]
Temperature = Annotated[float, typer.Option("--temperature", "-t", help="0 is greedy.", min=0)]
Seed = Annotated[int, typer.Option("--seed", help="Of arrivals, of the prompts' order, and of the first request.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Answers of full length, past their end.")]
Goodput = Annotated[
    list[str] | None,
    typer.Option("--goodput", help="Goals in ms that a good request meets: ttft:200 tpot:50 e2el:900."),
]
MoreGoals = Annotated[list[str] | None, typer.Argument(hidden=True)]  # --goodput ttft:200 tpot:50, as vLLM has it
Timeout = Annotated[float, typer.Option("--timeout", help="Seconds without a sign of the server.", min=0.1)]
Save = Annotated[Path | None, typer.Option("--save", help="A file for the JSON, with every request.", dir_okay=False)]


@dataclass(frozen=True)
class Server:
    base_url: str
    model: str | None
    api_key: str | None
    timeout: float


def serve_bench(
    more_goals: MoreGoals = None,
    base_url: BaseUrl = "http://127.0.0.1:8000",
    model: ServedModel = None,
    api_key: ApiKey = None,
    endpoint: Endpoint = "chat",
    prompts: PromptFile = None,
    workload: Workload = "chat",
    request_rate: RequestRate = None,
    concurrency: Concurrency = None,
    num_prompts: NumPrompts = 64,
    num_warmups: NumWarmUps = 4,
    max_tokens: MaxTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = 0,
    ignore_eos: IgnoreEos = False,
    goodput: Goodput = None,
    timeout: Timeout = 600.0,
    save: Save = None,
    as_json: AsJson = False,
) -> None:
    """Load on a running server: Outrider, vLLM, SGLang, llama.cpp, or any other that speaks OpenAI's protocol.

    Times per token are by the tokens that the server counts, never by chunks.

    \b
    Examples:
      outrider bench serve --concurrency 16
      outrider bench serve --base-url http://127.0.0.1:8000 --request-rate 4 --goodput ttft:200 tpot:50
      outrider bench serve --prompts PROMPTS.jsonl --endpoint completions --save RESULT.json
    """
    if endpoint not in ("chat", "completions"):
        raise ValueError(f"--endpoint is chat or completions, not {endpoint!r}")
    if more_goals and not goodput:
        raise ValueError(f"unexpected argument {more_goals[0]!r}: every setting has a name (--help lists them)")
    goals = parse_goals([*(goodput or ()), *(more_goals or ())])
    limit = concurrency or (DEFAULT_CONCURRENCY if request_rate is None else None)
    load = Load(num_prompts, num_warmups, limit, request_rate, seed)
    texts = read_prompts(prompts) if prompts is not None else _built_in(workload)
    asking = Asking("", endpoint == "chat", max_tokens, temperature, seed, ignore_eos)
    consoles = open_consoles()
    with progress_bar(consoles.about) as progress:
        server = Server(base_url, model, api_key, timeout)
        outcome = asyncio.run(measure(server, asking, texts, load, progress))
    summary = summarise(outcome, goals)
    report = to_dict(summary, outcome, load, goals)
    if save is not None:
        save.write_text(json.dumps(report | {"requests": to_lines(outcome.answers)}) + "\n")
    if not as_json:
        show_card(consoles.out, summary, report)
    typer.echo(json.dumps(report))
    if not summary.good:
        raise typer.Exit(1)


async def measure(
    server: Server, asking: Asking, prompts: list[PromptText], load: Load, progress: Progress | None = None
) -> Outcome:
    """Everything that touches the server. `asking.model` is filled in from what it says."""
    async with connect(server.base_url, server.api_key, server.timeout) as client:
        asking = Asking(**vars(asking) | {"model": await served_model(client, server.model)})
        return await run_load(client, asking, prompts, load, progress)


def _built_in(name: str) -> list[PromptText]:
    if name not in WORKLOADS:
        raise ValueError(f"unknown workload {name!r}; known: {', '.join(WORKLOADS)}")
    return [PromptText(text, is_chat=True) for text in WORKLOADS[name]]
