"""`outrider bench depth`: what the command takes."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from typing import Annotated, Any

from outrider.bench.load.traffic_command import Shape, TrafficOptions, numbers_of
from outrider.commands import option
from outrider.console import open_consoles, print_json, progress_bar, show_note
from outrider.options import AsJson, EngineOptions, ModelArgument
from outrider.startup import importing

_RATES_HELP = "Made up: how often a draft token is right, of one request after the other."
Rates = Annotated[str, option("Acceptance", "--rates", metavar="X,X", help=_RATES_HELP)]


def depth(
    options: EngineOptions,
    traffic_options: TrafficOptions,
    target: ModelArgument = None,
    shape: Shape = None,
    rates: Rates = "0.9,0.1",
    as_json: AsJson = False,
) -> None:
    """How much to draft: plain, every K, and adaptive.

    Output tokens a second by number of clients; all sides take turns. Acceptance is made up, and may differ from one
    request to another: adaptive must be slower neither than plain, nor than the best K.

    \b
    Examples:
      outrider bench depth
      outrider bench depth --rates 0 --concurrency 1,8,32
      outrider bench depth --shape llama-3.1-8b --draft eagle3 --rates 0.9,0.1
    """
    options = options.named(target, needs_model=shape is None)
    with importing():
        from outrider.bench.depth import open_sides, show_card, to_dict
        from outrider.bench.load.traffic import measure_levels
        from outrider.bench.load.traffic_prompts import traffic_prompts
        from outrider.bench.prompts import PromptVocabulary
        from outrider.bench.random_pair import random_config, shape_of
    plan = traffic_options.plan(is_small=options.model is None and shape is None)
    settings: dict[str, Any] = {
        "max_num_seqs": max(level.clients or 1 for level in plan.levels),
        "max_model_len": max(plan.prompt_len + plan.answer_len, options.max_model_len or 0),
        "enable_prefix_caching": False,
        "watchdog": None,  # it would leave out requests whose drafts are never right, whatever the depth
    }
    if shape is not None:
        config = random_config(options, shape, None, settings)
        vocabulary = PromptVocabulary(None, shape_of(shape)["vocab_size"])
    else:
        config = options.config(default_method="ngram", **settings)
        vocabulary = PromptVocabulary.of(config.model)
    if config.speculative is not None:
        chances = tuple(numbers_of(rates, "--rates", least=0.0))
        made_up = replace(config.speculative, synthetic_acceptance_rates=chances, adaptive=True, force=False)
        config = replace(config, speculative=made_up)
    prompts = traffic_prompts(vocabulary, plan.most_requests, plan.prompt_len, plan.seed)
    consoles = open_consoles()

    def note(line: str) -> None:
        show_note(consoles.about, line)

    with ExitStack() as opened, progress_bar(consoles.about) as progress:
        sides = open_sides(config, shape, plan.asking(), opened, note)
        found = measure_levels(sides, prompts, plan, note, progress)
    report = to_dict(config, plan, sides, found)
    if not as_json:
        show_card(consoles.out, report)
    print_json(consoles.out, report, asked=as_json)
