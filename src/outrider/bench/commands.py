"""`outrider bench`: what its commands take. Each ends with a card, and with one JSON line where that is wanted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from outrider.bench.depth_command import depth
from outrider.bench.load.server_commands import overhead, serve, soak
from outrider.bench.load.siege_command import siege
from outrider.bench.load.traffic_command import traffic
from outrider.bench.shapes import SHAPES
from outrider.bench.startup_command import startup
from outrider.certify.fuzz_command import fuzz
from outrider.commands import Group, add
from outrider.console import open_consoles, print_json, progress_bar
from outrider.options import (
    AsJson,
    ChatTemplate,
    Device,
    Dtype,
    Eager,
    EngineOptions,
    Exact,
    KvCacheDtype,
    ModelArgument,
    PromptFile,
    Quantization,
    Threads,
)
from outrider.startup import importing

if TYPE_CHECKING:
    from outrider.bench.prompts import PromptText, PromptVocabulary
    from outrider.bench.race import RacePlan

bench_app = typer.Typer(
    cls=Group,
    help="Measure speed: plain, speculative and other engines.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

NUM_PROMPTS = 3  # of our own that a latency run asks

_AGAINST_HELP = (
    "Another engine on the same weights: transformers, transformers-compiled, transformers-continuous, "
    "transformers-lookup, llama.cpp or llama-cpp-python. May be given again."
)
Against = Annotated[list[str] | None, typer.Option("--against", metavar="NAME", help=_AGAINST_HELP)]
Prompt = Annotated[
    str | None, typer.Option("--prompt", metavar="TEXT", help="One prompt, instead of the built-in ones.")
]
Workload = Annotated[str, typer.Option("--workload", metavar="NAME", help="Built-in prompts: chat or repetition.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", metavar="N", help="Tokens in each answer.", min=2)]
NumRuns = Annotated[int, typer.Option("--num-runs", metavar="N", help="Timed runs of every side.", min=1)]
NumPrompts = Annotated[
    int | None,
    typer.Option("--num-prompts", metavar="N", help="Prompts in a run. By default 3, or all of a file.", min=1),
]
BatchSize = Annotated[int, typer.Option("--batch-size", "-b", metavar="N", help="Prompts at a time.", min=1)]


def latency(
    options: EngineOptions,
    target: ModelArgument = None,
    against: Against = None,
    prompt: Prompt = None,
    prompts: PromptFile = None,
    workload_name: Workload = "chat",
    chat_template: ChatTemplate = None,
    num_prompts: NumPrompts = None,
    max_tokens: MaxTokens = 128,
    num_runs: NumRuns = 5,
    as_json: AsJson = False,
) -> None:
    """One request at a time: how long a user waits.

    \b
    Examples:
      outrider bench latency
      outrider bench latency MODEL.gguf --draft ngram --workload repetition \\
        --against transformers
    """
    with importing():
        from outrider.bench.prompts import PromptVocabulary
        from outrider.bench.race import RacePlan
    config = options.named(target).config()
    texts = _prompts(prompt, prompts, workload_name, PromptVocabulary.of(config.model))
    plan = RacePlan(
        command="latency",
        config=config,
        against=against or (),
        prompts=texts,
        chat=chat_template,
        batch_size=1,
        num_prompts=num_prompts or (len(texts) if prompts is not None else min(len(texts), NUM_PROMPTS)),
        max_tokens=max_tokens,
        num_runs=num_runs,
    )
    _run_and_report(plan, as_json)


def throughput(
    options: EngineOptions,
    target: ModelArgument = None,
    against: Against = None,
    prompt: Prompt = None,
    prompts: PromptFile = None,
    workload_name: Workload = "chat",
    chat_template: ChatTemplate = None,
    batch_size: BatchSize = 8,
    max_tokens: MaxTokens = 128,
    num_runs: NumRuns = 5,
    as_json: AsJson = False,
) -> None:
    """Many requests at once: how much a machine can do.

    \b
    Examples:
      outrider bench throughput --batch-size 16
      outrider bench throughput DIRECTORY --draft DIRECTORY \\
        --against transformers --json
    """
    with importing():
        from outrider.bench.prompts import PromptVocabulary
        from outrider.bench.race import RacePlan
    config = options.named(target).config()
    texts = _prompts(prompt, prompts, workload_name, PromptVocabulary.of(config.model))
    plan = RacePlan(
        command="throughput",
        config=config,
        against=against or (),
        prompts=texts,
        chat=chat_template,
        batch_size=batch_size,
        num_prompts=max(batch_size, len(texts)) if prompts is not None else batch_size,
        max_tokens=max_tokens,
        num_runs=num_runs,
    )
    _run_and_report(plan, as_json)


def _prompts(text: str | None, file: Path | None, name: str, vocabulary: PromptVocabulary) -> list[PromptText]:
    from outrider.bench.prompts import PromptText, read_prompts, workload

    if text is not None and file is not None:
        raise ValueError("--prompt and --prompts both give prompts: give one of them")
    if text is not None:
        return [PromptText(text)]
    return read_prompts(file) if file is not None else workload(name, vocabulary)


def _run_and_report(plan: RacePlan, as_json: bool) -> None:
    from outrider.bench.race import run
    from outrider.bench.report import show_card, to_dict

    consoles = open_consoles()
    with progress_bar(consoles.about) as progress:
        setting, records, notes = run(plan, progress)
    if not as_json:
        show_card(consoles.out, setting, records, notes)
    print_json(consoles.out, to_dict(setting, records, notes), asked=as_json)


# what a round costs

Shape = Annotated[
    str, typer.Option("--shape", metavar="NAME", help=f"Whose shape: {', '.join(SHAPES)}, or a config.json.")
]
Methods = Annotated[
    list[str] | None,
    typer.Option("--method", metavar="NAME", help="Drafter: eagle3, p_eagle, dflash, mtp or ngram. Again for more."),
]
Depth = Annotated[
    int,
    typer.Option("--num-speculative-tokens", "-k", metavar="K", help="Tokens to draft in a round.", min=1, max=64),
]
AcceptLength = Annotated[
    float,
    typer.Option(
        "--accept-length", metavar="X", help="Made up: so many tokens come of a round. Not real text.", min=1.0
    ),
]
Requests = Annotated[int, typer.Option("--batch-size", "-b", metavar="N", help="Requests at a time.", min=1)]
Context = Annotated[int, typer.Option("--context", metavar="N", help="Tokens of each prompt.", min=1)]
NumRounds = Annotated[int, typer.Option("--num-rounds", metavar="N", help="Rounds timed together, seven times.", min=1)]
RoundPeers = Annotated[
    list[str] | None,
    typer.Option(
        "--against",
        metavar="NAME",
        help="Another engine: transformers, transformers-compiled or transformers-continuous. May be given again.",
    ),
]
NumTokens = Annotated[
    int, typer.Option("--num-tokens", metavar="N", help="Tokens of each answer, for --against.", min=2)
]
Temperature = Annotated[float, typer.Option("--temperature", "-t", metavar="T", help="0 is greedy.", min=0.0)]


def bench_round(
    shape: Shape = "llama-3.1-8b",
    method: Methods = None,
    num_speculative_tokens: Depth = 5,
    accept_length: AcceptLength = 3.0,
    batch_size: Requests = 1,
    context: Context = 512,
    num_rounds: NumRounds = 50,
    temperature: Temperature = 0.0,
    dtype: Dtype = "auto",
    device: Device = "auto",
    threads: Threads = None,
    quantization: Quantization = None,
    kv_cache_dtype: KvCacheDtype = "auto",
    exact: Exact = False,
    enforce_eager: Eager = False,
    against: RoundPeers = None,
    num_tokens: NumTokens = 128,
    as_json: AsJson = False,
) -> None:
    """What a round costs, with random weights.

    Plain first, then with each drafter, whose acceptance is made up. Says nothing about text.

    \b
    Examples:
      outrider bench round --method eagle3 -k 5 --accept-length 4
      outrider bench round --shape smollm2-135m --method eagle3 --method dflash
      outrider bench round --quantization int4 --method eagle3
      outrider bench round --batch-size 32 --context 1024 \\
        --against transformers-continuous
    """
    with importing():
        from outrider.bench.round import RoundPlan, measure_all, show
        from outrider.config import EngineConfig
    config = EngineConfig(
        model=shape,
        dtype=dtype,
        device=device,
        max_num_seqs=batch_size,
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
        enforce_eager=enforce_eager,
        quantization=quantization,
        kv_cache_dtype=kv_cache_dtype,
        exact=exact,
        threads=threads,
    )
    plan = RoundPlan(shape, batch_size, context, num_rounds, temperature, config, num_speculative_tokens, accept_length)
    found = measure_all(plan, method or (), against or (), num_tokens)
    consoles = open_consoles()
    if not as_json:
        show(consoles.about, found)
    print_json(consoles.out, found, asked=as_json)


COMMANDS: dict[str, Callable[..., None]] = {
    "latency": latency,
    "throughput": throughput,
    "round": bench_round,
    "traffic": traffic,
    "depth": depth,
    "startup": startup,
    "serve": serve,
    "overhead": overhead,
    "soak": soak,
    "fuzz": fuzz,
    "siege": siege,
}
for _name, _command in COMMANDS.items():
    add(bench_app, _name, _command)
