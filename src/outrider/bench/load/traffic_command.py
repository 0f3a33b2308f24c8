"""`outrider bench traffic`: what the command takes."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.bench.shapes import SHAPES
from outrider.commands import option
from outrider.console import Consoles, checkpoint_name, open_consoles, print_json, progress_bar, show_note
from outrider.options import AsJson, EngineOptions, ModelArgument
from outrider.startup import importing

if TYPE_CHECKING:
    from outrider.bench.load.traffic import TrafficPlan
    from outrider.bench.load.traffic_report import TrafficSetting
    from outrider.bench.load.traffic_sides import TrafficSide
    from outrider.bench.prompts import PromptText
    from outrider.config import EngineConfig, SpeculativeConfig

LOAD, RANDOM = "Load", "Random weights"
LEVELS = "1,4,8,16,32,64,128"
PROMPT_LEN, ANSWER_LEN = 512, 128
SMALL_PROMPT_LEN, SMALL_ANSWER_LEN = 64, 32  # of the embedded model
DEFAULT_PLOT = Path("traffic.png")

_PLOT_HELP = "The picture. By default traffic.png, where Pillow is installed."
_PROMPTS_HELP = "Requests at a level. By default 3 for each client, 16 at least; 64 at a rate."
_SHAPE_HELP = f"Instead of a checkpoint: {', '.join(SHAPES)}, or a config.json."
Concurrency = Annotated[str, option(LOAD, "--concurrency", metavar="N,N", help="Clients at each level.")]
Rates = Annotated[
    str | None, option(LOAD, "--rate", metavar="X,X", help="Instead of clients: requests a second, at random times.")
]
Think = Annotated[
    float, option(LOAD, "--think", metavar="X", help="Seconds between a client's requests, on average.", min=0)
]
PromptLen = Annotated[
    int | None,
    option(
        LOAD, "--prompt-len", metavar="N", help="Tokens of a prompt. By default 512; 64 with the embedded model.", min=1
    ),
]
AnswerLen = Annotated[
    int | None,
    option(
        LOAD,
        "--answer-len",
        metavar="N",
        help="Tokens of an answer. By default 128; 32 with the embedded model.",
        min=2,
    ),
]
NumTurns = Annotated[
    int,
    option(
        LOAD,
        "--turns",
        metavar="N",
        help="Of chats: each request repeats all that was said before, and goes on.",
        min=1,
    ),
]
NumPrompts = Annotated[int | None, option(LOAD, "--num-prompts", metavar="N", help=_PROMPTS_HELP, min=1)]
NumRuns = Annotated[int, option(LOAD, "--num-runs", metavar="N", help="Runs of each side at each level.", min=1)]
Temperature = Annotated[float, option(LOAD, "--temperature", "-t", metavar="T", help="0 is greedy.", min=0.0)]
TopP = Annotated[
    float, option(LOAD, "--top-p", metavar="P", help="Of the likeliest tokens, so much.", min=1e-6, max=1.0)
]
Seed = Annotated[int, option(LOAD, "--seed", metavar="S", help="Of arrivals and prompts.")]
Http = Annotated[bool, option(LOAD, "--http", help="Through two servers of our own. Needs the serve extra.")]
Shape = Annotated[str | None, option(RANDOM, "--shape", metavar="NAME", help=_SHAPE_HELP)]
AcceptLength = Annotated[
    float, option(RANDOM, "--accept-length", metavar="X", help="Made up: so many tokens come of a round.", min=1.0)
]
Plot = Annotated[Path | None, typer.Option("--plot", metavar="FILE", help=_PLOT_HELP, dir_okay=False)]


@dataclass(frozen=True)
class TrafficOptions:
    """How requests come, and how long they are."""

    concurrency: Concurrency = LEVELS
    rate: Rates = None
    think: Think = 0.02
    prompt_len: PromptLen = None
    answer_len: AnswerLen = None
    turns: NumTurns = 1
    num_prompts: NumPrompts = None
    num_runs: NumRuns = 3
    temperature: Temperature = 0.0
    top_p: TopP = 1.0
    seed: Seed = 0

    def plan(self, *, is_small: bool) -> TrafficPlan:
        from outrider.bench.load.traffic import Level, TrafficPlan

        if self.rate is not None:
            levels = [Level(None, rate) for rate in numbers_of(self.rate, "--rate")]
        else:
            levels = [Level(round(clients)) for clients in numbers_of(self.concurrency, "--concurrency", whole=True)]
        return TrafficPlan(
            levels=levels,
            prompt_len=self.prompt_len or (SMALL_PROMPT_LEN if is_small else PROMPT_LEN),
            answer_len=self.answer_len or (SMALL_ANSWER_LEN if is_small else ANSWER_LEN),
            think_seconds=self.think,
            num_runs=self.num_runs,
            num_prompts=self.num_prompts,
            temperature=self.temperature,
            top_p=self.top_p,
            seed=self.seed,
            num_turns=self.turns,
        )


def numbers_of(text: str, name: str, *, whole: bool = False, least: float | None = None) -> list[float]:
    """Numbers with commas between: above 0, or at least `least`."""
    try:
        found = [float(part) for part in text.split(",")]
    except ValueError:
        found = []
    low = found and (min(found) <= 0 if least is None else min(found) < least)
    if not found or low or (whole and any(value != int(value) for value in found)):
        bound = "above 0" if least is None else f"of at least {least:g}"
        raise ValueError(f"{name} takes {'whole ' if whole else ''}numbers {bound} with commas between, not {text!r}")
    return found


def traffic(
    options: EngineOptions,
    traffic_options: TrafficOptions,
    target: ModelArgument = None,
    shape: Shape = None,
    accept_length: AcceptLength = 3.0,
    http: Http = False,
    plot: Plot = None,
    as_json: AsJson = False,
) -> None:
    """Plain and speculative under growing traffic, as a picture.

    Output tokens a second, time to first token (TTFT) and time per output token (TPOT), by number of clients or by
    request rate. Both sides take turns at each level. Speculative must never be under plain: levels where it is are
    marked. With --shape, --draft is eagle3, p_eagle, dflash, mtp or ngram.

    \b
    Examples:
      outrider bench traffic
      outrider bench traffic MODEL --draft DRAFTER --concurrency 1,8,32
      outrider bench traffic MODEL --draft ngram --rate 2,4,8 --http
      outrider bench traffic --turns 4 --concurrency 1,8
      outrider bench traffic --shape llama-3.1-8b --draft eagle3 --accept-length 3
    """
    options = options.named(target, needs_model=shape is None)
    with importing():
        from outrider.bench.load.traffic import measure_levels
        from outrider.bench.load.traffic_plot import check_plot, draw
        from outrider.bench.load.traffic_report import show_card, to_dict
    if plot is not None:
        check_plot()
    if http and shape is not None:
        raise ValueError("--http serves a checkpoint, and --shape has none: leave one of them out")
    plan = traffic_options.plan(is_small=options.model is None and shape is None)
    consoles = open_consoles()
    with ExitStack() as opened, progress_bar(consoles.about) as progress:
        setting, sides, prompts = _open(SidesToOpen(options, shape, accept_length, http), plan, opened, consoles)
        found = measure_levels(sides, prompts, plan, lambda line: show_note(consoles.about, line), progress)
    report = to_dict(setting, plan, found)
    if not as_json:
        show_card(consoles.out, report)
    try:
        check_plot()
        draw(report, plot or DEFAULT_PLOT)
        show_note(consoles.about, f"picture: {plot or DEFAULT_PLOT}")
    except ValueError as error:
        show_note(consoles.about, f"no picture: {error}")
    print_json(consoles.out, report, asked=as_json)


@dataclass(frozen=True)
class SidesToOpen:
    """Which engines or servers are to be opened."""

    options: EngineOptions
    shape: str | None
    accept_length: float
    http: bool


def _open(
    opening: SidesToOpen, plan: TrafficPlan, opened: ExitStack, consoles: Consoles
) -> tuple[TrafficSetting, list[TrafficSide], list[PromptText]]:
    from outrider.bench.load.traffic_opening import engine_sides, random_sides, server_sides
    from outrider.bench.load.traffic_prompts import traffic_prompts
    from outrider.bench.prompts import PromptVocabulary
    from outrider.bench.random_pair import shape_of

    config, shape = _config(opening, plan), opening.shape
    vocabulary = (
        PromptVocabulary(None, shape_of(shape)["vocab_size"])
        if shape is not None
        else PromptVocabulary.of(config.model)
    )
    prompts = traffic_prompts(vocabulary, plan.most_requests, plan.prompt_len, plan.seed)

    def note(line: str) -> None:
        show_note(consoles.about, line)

    if shape is not None:
        sides = random_sides(config, shape, plan.asking(), opened, note)
    elif opening.http:
        sides = server_sides(opening.options, config, plan.asking(), opened, note)
    else:
        sides = engine_sides(config, plan.asking(), opened, note)
    return _setting(opening, config), sides, prompts


def _config(opening: SidesToOpen, plan: TrafficPlan) -> EngineConfig:
    """With room for all clients at once, and for prompts and answers as long as they will be."""
    from outrider.bench.random_pair import random_config
    from outrider.config import batch_limits

    options, limits = opening.options, batch_limits(opening.options.device)
    settings: dict[str, Any] = {
        "max_num_seqs": max((level.clients or limits.max_num_seqs) for level in plan.levels),
        "max_model_len": max(plan.longest, options.max_model_len or 0),
        "enable_prefix_caching": plan.num_turns > 1,
    }
    if opening.shape is None:
        return options.config(default_method="ngram", **settings)
    return random_config(options, opening.shape, opening.accept_length, settings)


def _setting(opening: SidesToOpen, config: EngineConfig) -> TrafficSetting:
    import torch

    from outrider.bench.load.traffic_report import TrafficSetting
    from outrider.pair import dtype_of, shown_name

    is_random, device = opening.shape is not None, config.torch_device
    dtype = config.torch_dtype("bfloat16") if is_random else dtype_of(config)
    drafter = config.speculative
    return TrafficSetting(
        model=checkpoint_name(shown_name(config.model)),
        drafter=drafter_name(drafter),
        weights="random" if is_random else "real",
        accept_length=opening.accept_length if is_random and drafter is not None else None,
        way="http" if opening.http else "engine",
        dtype=str(dtype).removeprefix("torch."),
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        threads=opening.options.threads or torch.get_num_threads(),
    )


def drafter_name(settings: SpeculativeConfig | None) -> str | None:
    """What reports call a drafter."""
    from outrider.pair import DEFAULT_DIRECTORY

    if settings is None or settings.method is not None or settings.model is None:
        return None if settings is None else settings.method
    is_own = Path(settings.model).parent == DEFAULT_DIRECTORY
    return "embedded" if is_own else checkpoint_name(settings.model)
