"""`outrider bench serve`, `overhead` and `soak`: what the commands take that put load on a server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Annotated

import typer

from outrider.console import open_consoles, print_json, progress_bar
from outrider.options import AsJson, EngineOptions, ModelArgument, PromptFile, Threads
from outrider.startup import importing

DEFAULT_CONCURRENCY = 8

BaseUrl = Annotated[str, typer.Option("--base-url", metavar="URL", help="The server, with or without /v1.")]
ServedModel = Annotated[
    str | None, typer.Option("--model", "-m", metavar="NAME", help="The model's name there. By default, its first.")
]
ApiKey = Annotated[
    str | None, typer.Option("--api-key", metavar="KEY", envvar="OPENAI_API_KEY", help="What the server asks for.")
]
Endpoint = Annotated[str, typer.Option("--endpoint", metavar="NAME", help="chat or completions.")]
Workload = Annotated[str, typer.Option("--workload", metavar="NAME", help="Built-in prompts: chat or repetition.")]
RequestRate = Annotated[
    float | None,
    typer.Option("--request-rate", metavar="X", help="Requests a second on average, at random times.", min=1e-6),
]
Concurrency = Annotated[
    int | None,
    typer.Option(
        "--concurrency", metavar="N", help="Requests at once, at most. By default 8, or no limit with a rate.", min=1
    ),
]
NumPrompts = Annotated[int, typer.Option("--num-prompts", metavar="N", help="Requests that are measured.", min=1)]
NumWarmUps = Annotated[int, typer.Option("--num-warmups", metavar="N", help="Requests before those.", min=0)]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", metavar="N", help="Longest answer.", min=1)]
Temperature = Annotated[float, typer.Option("--temperature", "-t", metavar="T", help="0 is greedy.", min=0)]
TopP = Annotated[float, typer.Option("--top-p", metavar="P", help="Of the likeliest tokens, so much.", min=0, max=1)]
Seed = Annotated[
    int, typer.Option("--seed", metavar="S", help="Of arrivals, of the prompts' order, and of the first request.")
]
SendsSeed = Annotated[
    bool,
    typer.Option("--request-seeds/--no-request-seeds", help="Give requests seeds, or leave them to the server."),
]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Answers of full length, past their end.")]
Goodput = Annotated[
    list[str] | None,
    typer.Option("--goodput", metavar="GOAL", help="Goals in ms that a good request meets: ttft:200 tpot:50 e2el:900."),
]
MoreGoals = Annotated[
    list[str] | None, typer.Argument(hidden=True, metavar="GOAL")
]  # --goodput ttft:200 tpot:50, as in vLLM
Timeout = Annotated[
    float, typer.Option("--timeout", metavar="X", help="Seconds without a sign of the server.", min=0.1)
]
Save = Annotated[
    Path | None, typer.Option("--save", metavar="FILE", help="A file for the JSON, with every request.", dir_okay=False)
]


def serve(
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
    top_p: TopP = 1.0,
    seed: Seed = 0,
    request_seeds: SendsSeed = True,
    ignore_eos: IgnoreEos = False,
    goodput: Goodput = None,
    timeout: Timeout = 600.0,
    save: Save = None,
    as_json: AsJson = False,
) -> None:
    """Load on a running server, Outrider's or another.

    vLLM, SGLang, llama.cpp, or any other that speaks OpenAI's protocol. Times per token are by the tokens that the
    server counts, never by chunks.

    \b
    Examples:
      outrider bench serve --concurrency 16
      outrider bench serve --request-rate 4 --goodput ttft:200 tpot:50
      outrider bench serve --prompts PROMPTS.jsonl --endpoint completions \\
        --save RESULT.json
    """
    if endpoint not in ("chat", "completions"):
        raise ValueError(f"--endpoint is chat or completions, not {endpoint!r}")
    if more_goals and not goodput:
        raise ValueError(f"unexpected argument {more_goals[0]!r}: every setting has a name (--help lists them)")
    with importing():
        from outrider.bench.load.serve import LoadedServer, built_in, measure
        from outrider.bench.load.serve_client import Asking
        from outrider.bench.load.serve_load import Load, to_lines
        from outrider.bench.load.serve_report import parse_goals, show_card, summarise, to_dict
        from outrider.bench.prompts import read_prompts
    goals = parse_goals([*(goodput or ()), *(more_goals or ())])
    limit = concurrency or (DEFAULT_CONCURRENCY if request_rate is None else None)
    load = Load(num_prompts, num_warmups, limit, request_rate, seed)
    texts = read_prompts(prompts) if prompts is not None else built_in(workload)
    asking = Asking("", endpoint == "chat", max_tokens, temperature, seed, ignore_eos, top_p, request_seeds)
    consoles = open_consoles()
    with progress_bar(consoles.about) as progress:
        server = LoadedServer(base_url, model, api_key, timeout)
        outcome = asyncio.run(measure(server, asking, texts, load, progress))
    summary = summarise(outcome, goals)
    report = to_dict(summary, outcome, load, goals)
    if save is not None:
        save.write_text(json.dumps(report | {"requests": to_lines(outcome.answers)}) + "\n")
    if not as_json:
        show_card(consoles.out, summary, report)
    print_json(consoles.out, report, asked=as_json)
    if not summary.good:
        raise typer.Exit(1)


# the server and its engine

AtOnce = Annotated[int, typer.Option("--concurrency", metavar="N", help="Requests at once, and --max-num-seqs.", min=1)]
NumRequests = Annotated[int, typer.Option("--num-prompts", metavar="N", help="Requests in each pass.", min=1)]
NumTokens = Annotated[int, typer.Option("--max-tokens", "-n", metavar="N", help="Tokens in each answer.", min=2)]
NumRuns = Annotated[int, typer.Option("--num-runs", metavar="N", help="Timed runs of every side.", min=1)]


def overhead(
    options: EngineOptions,
    target: ModelArgument = None,
    concurrency: AtOnce = 16,
    num_prompts: NumRequests = 48,
    max_tokens: NumTokens = 128,
    num_runs: NumRuns = 5,
    as_json: AsJson = False,
) -> None:
    """The server against the engine that is inside it.

    Same chats, same batch, greedy, in turn, each with one thread unless --threads says otherwise. The client reads
    bytes and counts afterwards; its share of a core is shown. Needs Linux and the serve extra.

    \b
    Example:
      outrider bench overhead --concurrency 16
    """
    with importing():
        from outrider.bench.load.overhead import OverheadTask, measure, show
        from outrider.bench.prompts import CHAT, REPETITION
    texts = [*CHAT, *REPETITION]
    task = OverheadTask([texts[number % len(texts)] for number in range(num_prompts)], max_tokens, concurrency)
    consoles = open_consoles()
    with progress_bar(consoles.about) as progress:
        report = measure(options.named(target), task, num_runs, progress)
    if not as_json:
        show(consoles.out, report)
    print_json(consoles.out, report, asked=as_json)


Minutes = Annotated[float, typer.Option("--minutes", metavar="X", help="How long the crowd stays.", min=0.05)]
CrowdSeed = Annotated[int, typer.Option("--seed", metavar="S", help="Of what the clients do.")]


def soak(minutes: Minutes = 10.0, seed: CrowdSeed = 0, threads: Threads = None, as_json: AsJson = False) -> None:
    """The real server under a crowd that does everything wrong.

    The embedded model with too few pages, under chats, aborts, kills and grammars. Status 1 if anything failed, grew,
    or changed. Needs Linux and the serve extra.

    \b
    Example:
      outrider bench soak --minutes 10
    """
    with importing():
        from outrider.bench.load.soak import card, run_soak, to_dict
    consoles = open_consoles()
    with progress_bar(consoles.about) as progress:
        found = run_soak(minutes * 60, seed, threads, progress)
    if not as_json:
        for line in card(found):
            consoles.out.print(line, markup=False, highlight=False, soft_wrap=True)
    print_json(consoles.out, to_dict(found), asked=as_json)
    if found.failures:
        raise typer.Exit(1)
