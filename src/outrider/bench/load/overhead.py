"""`outrider bench overhead`: how much of the engine's speed the server delivers. The same chats through the engine
alone, through the server as streams and through the server as whole answers, in turn; the answers must be the same."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from outrider.bench.interleave import Progress, Spread
from outrider.bench.load.server_process import ServerProcess, server_process
from outrider.bench.load.streaming import Streamed, post_all
from outrider.console import checkpoint_name
from outrider.llm import LLM
from outrider.options import EngineOptions
from outrider.pair import shown_name
from outrider.sampling_params import SamplingParams

OFFLINE, STREAMED, WHOLE = "engine alone", "server, streamed", "server, whole"
WANTED = 0.9


@dataclass(frozen=True)
class OverheadRun:
    """One run of the overhead benchmark: all prompts, answered once."""

    seconds: float
    texts: list[str]
    num_tokens: int
    cpu: float  # seconds of the process that computed it
    client_cpu: float = 0.0

    @property
    def tokens_per_second(self) -> float:
        return self.num_tokens / self.seconds

    @property
    def tokens_per_cpu_second(self) -> float:
        """What a crowded machine does not change much."""
        return self.num_tokens / self.cpu


@dataclass(frozen=True)
class OverheadTask:
    prompts: Sequence[str]
    max_tokens: int
    concurrency: int

    def messages(self) -> list[list[dict[str, str]]]:
        return [[{"role": "user", "content": text}] for text in self.prompts]


def measure(options: EngineOptions, task: OverheadTask, num_runs: int, progress: Progress | None) -> dict[str, Any]:
    """Opens an engine and a server of the same choices, and lets them answer the same chats in turn."""
    threads = options.threads or 1
    options = replace(options, threads=threads)
    config = options.config(max_num_seqs=task.concurrency, enable_prefix_caching=False)
    with ExitStack() as opened:
        llm = opened.enter_context(LLM.from_config(config))
        log = Path(opened.enter_context(tempfile.TemporaryDirectory())) / "server.log"
        own = ["--max-num-seqs", str(task.concurrency), "--no-enable-prefix-caching"]
        server = opened.enter_context(server_process([*options.arguments(), *own], log))
        passes = run_in_turn(llm, server, task, num_runs, progress)
    return to_dict(passes, task, threads) | {"model": checkpoint_name(shown_name(config.model))}


def run_in_turn(
    llm: LLM, server: ServerProcess, task: OverheadTask, num_runs: int, progress: Progress | None = None
) -> dict[str, list[OverheadRun]]:
    """Every side once to warm up, then `num_runs` times, never in the same order twice in a row."""
    sides: dict[str, Callable[[], OverheadRun]] = {
        OFFLINE: lambda: alone(llm, task),
        STREAMED: lambda: served(server, task, stream=True),
        WHOLE: lambda: served(server, task, stream=False),
    }
    names, passes = list(sides), {name: list[OverheadRun]() for name in sides}
    total = len(names) * (num_runs + 1)
    for number in range(total):
        turn, place = divmod(number, len(names))
        name = names[(turn + place) % len(names)]
        if progress is not None:
            progress(name, number, total)
        made = sides[name]()
        if turn > 0:
            passes[name].append(made)
    return passes


def alone(llm: LLM, task: OverheadTask) -> OverheadRun:
    """As a server must: the chat template and the tokenizer are part of it."""
    params = SamplingParams(temperature=0, max_tokens=task.max_tokens, ignore_eos=True)
    cpu, begin = time.process_time(), time.perf_counter()
    outputs = llm.chat(task.messages(), params)
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    texts = [output.outputs[0].text for output in outputs]
    return OverheadRun(seconds, texts, sum(len(output.outputs[0].token_ids) for output in outputs), cpu)


def served(server: ServerProcess, task: OverheadTask, *, stream: bool) -> OverheadRun:
    options: dict[str, Any] = {"temperature": 0, "max_tokens": task.max_tokens, "ignore_eos": True}
    if stream:
        options |= {"stream": True, "stream_options": {"include_usage": True}}
    bodies = [{"messages": messages, **options} for messages in task.messages()]
    cpu, client, begin = server.cpu_seconds, time.process_time(), time.perf_counter()
    answers = post_all(server.url, "/v1/chat/completions", bodies, task.concurrency)
    seconds = time.perf_counter() - begin
    client, cpu = time.process_time() - client, server.cpu_seconds - cpu
    read = [_read(answer) for answer in answers]
    return OverheadRun(seconds, [text for text, _ in read], sum(count for _, count in read), cpu, client)


def _read(answer: Streamed) -> tuple[str, int]:
    if answer.status != 200:
        raise ValueError(f"the server answered {answer.status}: {answer.body[:300]!r}")
    chunks = answer.chunks
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    said = [choice["delta"] if "delta" in choice else choice["message"] for choice in choices]
    text = "".join(part.get("content") or "" for part in said)
    return text, int(chunks[-1]["usage"]["completion_tokens"])


def to_dict(passes: dict[str, list[OverheadRun]], task: OverheadTask, threads: int) -> dict[str, Any]:
    plain = passes[OFFLINE]
    report: dict[str, Any] = {
        "benchmark": "bench overhead",
        "concurrency": task.concurrency,
        "num_prompts": len(task.prompts),
        "max_tokens": task.max_tokens,
        "num_runs": len(plain),
        "threads": threads,
        "sides": {},
        "identical": all(made.texts == plain[0].texts for side in passes.values() for made in side),
    }
    for name, side in passes.items():
        pairs = list(zip(side, plain, strict=True))
        figures = {
            "tokens_per_second": [made.tokens_per_second for made in side],
            "of_the_engine": [own.tokens_per_second / ref.tokens_per_second for own, ref in pairs],
            "of_the_engine_by_cpu_time": [own.tokens_per_cpu_second / ref.tokens_per_cpu_second for own, ref in pairs],
            "cores": [made.cpu / made.seconds for made in side],
            "client_cores": [made.client_cpu / made.seconds for made in side],
        }
        report["sides"][name] = {what: Spread(tuple(values)).to_dict() for what, values in figures.items()}
    ratios = [report["sides"][name]["of_the_engine"]["median"] for name in (STREAMED, WHOLE)]
    return report | {"wanted": WANTED, "reached": min(ratios) >= WANTED}


def show(console: Console, report: dict[str, Any]) -> None:
    asked = (
        f"{report['num_prompts']} chats, {report['concurrency']} at once, {report['max_tokens']} tokens each, greedy"
    )
    head = f"{report['model']}: {asked}; medians of {report['num_runs']} passes in turn"
    console.print(head, highlight=False, soft_wrap=True)
    table = Table(box=None, padding=(0, 1, 0, 0))
    for title in ("side", "tokens/s", "of engine", "range", "by CPU time", "cores", "client"):
        table.add_column(title, no_wrap=True, justify="left" if title == "side" else "right")
    for name, figures in report["sides"].items():
        share = figures["of_the_engine"]
        cells = [f"{figures['tokens_per_second']['median']:.0f}", f"{share['median']:.1%}"]
        cells += [f"{share['min']:.2f}-{share['max']:.2f}", f"{figures['of_the_engine_by_cpu_time']['median']:.1%}"]
        table.add_row(name, *cells, *(f"{figures[which]['median']:.2f}" for which in ("cores", "client_cores")))
    console.print(table)
    console.print(f"identical answers: {'yes' if report['identical'] else 'NO'}", highlight=False)
