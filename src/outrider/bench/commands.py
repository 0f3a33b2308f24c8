"""`outrider bench latency` and `outrider bench throughput`: all sides in one run, a card, and one JSON line last."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from outrider.bench import peer_llama_cpp, peer_transformers  # noqa: F401  (they register themselves)
from outrider.bench.interleave import Progress, Record, interleave, memory_bandwidth
from outrider.bench.options import (
    AsJson,
    Device,
    Draft,
    Dtype,
    Eager,
    Exact,
    Model,
    NumSpeculativeTokens,
    PromptFile,
    SpeculativeJson,
    Threads,
    speculative_from,
)
from outrider.bench.peers import PeerOptions, open_peers, peers
from outrider.bench.prompts import PromptText, Vocabulary, read_prompts, workload
from outrider.bench.report import PLAIN, SPECULATIVE, Setting, show_card, to_dict
from outrider.bench.round import bench_round
from outrider.bench.sides import OutriderSide, Prompts, Side
from outrider.config import SpeculativeConfig
from outrider.console import checkpoint_name, open_consoles
from outrider.llm import LLM
from outrider.measure import method_of
from outrider.pair import target_of
from outrider.threads import threads as cpu_threads

bench_app = typer.Typer(help="Measure speed: plain, speculative and other engines, side by side.", no_args_is_help=True)

NUM_PROMPTS = 3  # of our own that a latency run asks

Against = Annotated[
    list[str] | None, typer.Option("--against", help=f"Another engine: {', '.join(peers)}. May be given again.")
]
Prompt = Annotated[str | None, typer.Option("--prompt", help="One prompt, instead of the built-in ones.")]
Workload = Annotated[str, typer.Option("--workload", help="Built-in prompts: chat or repetition.")]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Tokens in each answer.", min=2)]
NumRuns = Annotated[int, typer.Option("--num-runs", help="Timed runs of every side.", min=1)]
NumPrompts = Annotated[
    int | None, typer.Option("--num-prompts", help="Prompts, one after the other. Default: 3, or all of a file.", min=1)
]
BatchSize = Annotated[int, typer.Option("--batch-size", "-b", help="Prompts at a time.", min=1)]


@dataclass(frozen=True)
class Plan:
    """Everything that was chosen on the command line."""

    command: str
    model: str | None
    speculative: SpeculativeConfig | None
    against: Sequence[str]
    prompts: Sequence[PromptText]
    vocabulary: Vocabulary
    batch_size: int
    num_prompts: int
    max_tokens: int
    num_runs: int
    threads: int | None
    dtype: str
    device: str
    exact: bool = False
    enforce_eager: bool = False

    @property
    def place(self) -> str | Path:
        return target_of(self.model)

    def batches(self) -> list[Prompts]:
        """The prompts as ids, in batches; where there are too few, they come again."""
        ids = self.vocabulary.encode_all(self.prompts)
        asked = [ids[number % len(ids)] for number in range(self.num_prompts)]
        return [asked[start : start + self.batch_size] for start in range(0, len(asked), self.batch_size)]


bench_app.command("round")(bench_round)


@bench_app.command()
def latency(
    model: Model = None,
    draft: Draft = None,
    speculative_config: SpeculativeJson = None,
    num_speculative_tokens: NumSpeculativeTokens = None,
    against: Against = None,
    prompt: Prompt = None,
    prompts: PromptFile = None,
    workload_name: Workload = "chat",
    num_prompts: NumPrompts = None,
    max_tokens: MaxTokens = 128,
    num_runs: NumRuns = 5,
    threads: Threads = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    exact: Exact = False,
    enforce_eager: Eager = False,
    as_json: AsJson = False,
) -> None:
    """One request at a time: how long a user waits.

    \b
    Examples:
      outrider bench latency
      outrider bench latency --model MODEL.gguf --draft ngram --workload repetition --against transformers
    """
    vocabulary = Vocabulary.of(target_of(model))
    texts = _prompts(prompt, prompts, workload_name, vocabulary)
    plan = Plan(
        command="latency",
        model=model,
        speculative=speculative_from(model, draft, speculative_config, num_speculative_tokens),
        against=against or (),
        prompts=texts,
        vocabulary=vocabulary,
        batch_size=1,
        num_prompts=num_prompts or (len(texts) if prompts is not None else min(len(texts), NUM_PROMPTS)),
        max_tokens=max_tokens,
        num_runs=num_runs,
        threads=threads,
        dtype=dtype,
        device=device,
        exact=exact,
        enforce_eager=enforce_eager,
    )
    _run_and_report(plan, as_json)


@bench_app.command()
def throughput(
    model: Model = None,
    draft: Draft = None,
    speculative_config: SpeculativeJson = None,
    num_speculative_tokens: NumSpeculativeTokens = None,
    against: Against = None,
    prompt: Prompt = None,
    prompts: PromptFile = None,
    workload_name: Workload = "chat",
    batch_size: BatchSize = 8,
    max_tokens: MaxTokens = 128,
    num_runs: NumRuns = 5,
    threads: Threads = None,
    dtype: Dtype = "auto",
    device: Device = "auto",
    exact: Exact = False,
    enforce_eager: Eager = False,
    as_json: AsJson = False,
) -> None:
    """Many requests at once: how much a machine can do.

    \b
    Examples:
      outrider bench throughput --batch-size 16
      outrider bench throughput --model DIRECTORY --draft DIRECTORY --against transformers --json
    """
    vocabulary = Vocabulary.of(target_of(model))
    texts = _prompts(prompt, prompts, workload_name, vocabulary)
    plan = Plan(
        command="throughput",
        model=model,
        speculative=speculative_from(model, draft, speculative_config, num_speculative_tokens),
        against=against or (),
        prompts=texts,
        vocabulary=vocabulary,
        batch_size=batch_size,
        num_prompts=max(batch_size, len(texts)) if prompts is not None else batch_size,
        max_tokens=max_tokens,
        num_runs=num_runs,
        threads=threads,
        dtype=dtype,
        device=device,
        exact=exact,
        enforce_eager=enforce_eager,
    )
    _run_and_report(plan, as_json)


def _prompts(text: str | None, file: Path | None, name: str, vocabulary: Vocabulary) -> list[PromptText]:
    if text is not None and file is not None:
        raise ValueError("--prompt and --prompts both give prompts: give one of them")
    if text is not None:
        return [PromptText(text, is_chat=True)]
    return read_prompts(file) if file is not None else workload(name, vocabulary)


def _run_and_report(plan: Plan, as_json: bool) -> None:
    consoles = open_consoles()
    with progress_bar(consoles.about) as progress:
        setting, records, notes = run(plan, progress)
    if not as_json:
        show_card(consoles.out, setting, records, notes)
    typer.echo(json.dumps(to_dict(setting, records, notes)))


def run(plan: Plan, progress: Progress | None = None) -> tuple[Setting, list[Record], list[str]]:
    """Opens all sides, lets them run in turn, and closes them again."""
    unknown = [name for name in plan.against if name not in peers]
    if unknown:
        raise ValueError(f"unknown peer {unknown[0]!r}; known: {', '.join(peers)}")
    cpu_threads.fix(plan.threads or torch.get_num_threads())  # the same for all sides, to the end
    batches = plan.batches()
    with ExitStack() as opened:
        sides, setting, notes = _open(plan, batches, opened)
        records = interleave(sides, batches, plan.max_tokens, plan.num_runs, progress)
    bandwidth = max(setting.bandwidth, memory_bandwidth(torch.device(setting.device)))
    return replace(setting, bandwidth=bandwidth), records, notes


def _open(plan: Plan, batches: Sequence[Prompts], opened: ExitStack) -> tuple[list[Side], Setting, list[str]]:
    longest = max(len(ids) for batch in batches for ids in batch) + plan.max_tokens

    def ours(speculative: SpeculativeConfig | None) -> LLM:
        llm = LLM(
            plan.model,
            speculative,
            dtype=plan.dtype,
            device=plan.device,
            max_model_len=longest,
            max_num_seqs=plan.batch_size,
            enable_prefix_caching=False,
            exact=plan.exact,
            enforce_eager=plan.enforce_eager,
        )
        opened.callback(llm.close)
        return llm

    plain = ours(None)
    sides: list[Side] = [OutriderSide(PLAIN, plain)]
    drafter = None
    if plan.speculative is not None:
        speculative = ours(plan.speculative)
        sides.append(OutriderSide(SPECULATIVE, speculative))
        drafter = method_of(speculative)
    device, dtype = plain.config.torch_device, plain.target.embed.weight.dtype
    threads = torch.get_num_threads()
    others, notes = open_peers(plan.against, PeerOptions(plan.place, dtype, device, longest, threads))
    for other in others:
        opened.callback(other.close)
    setting = Setting(
        command=f"bench {plan.command}",
        model=checkpoint_name(plan.model) if plan.model is not None else "embedded default",
        drafter=drafter,
        dtype=str(dtype).removeprefix("torch."),
        device=str(device),
        threads=threads,
        num_prompts=plan.num_prompts,
        batch_size=plan.batch_size,
        max_tokens=plan.max_tokens,
        num_runs=plan.num_runs,
        bandwidth=memory_bandwidth(device),
    )
    return sides + others, setting, notes


@contextmanager
def progress_bar(console: Console) -> Iterator[Progress | None]:
    """A bar on standard error where somebody watches."""
    if not console.is_terminal:
        yield None
        return
    columns = (TextColumn("{task.description:<28}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Bar(*columns, console=console, transient=True) as bar:
        task = bar.add_task("loading", total=None)
        yield lambda what, done, total: bar.update(task, description=what, completed=done, total=total)
