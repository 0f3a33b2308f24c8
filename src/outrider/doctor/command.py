"""`outrider doctor`: how a drafter was read, and whether it agrees. Exit status 0 healthy, 1 not, 3 cannot tell."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated

import typer

from outrider.console import open_consoles, progress_bar
from outrider.options import AsJson, ChatTemplate, DrafterArgument, EngineOptions, ModelArgument, PromptFile
from outrider.startup import importing

MaxTokens = Annotated[int | None, typer.Option("--max-tokens", "-n", help="Tokens in each answer.", metavar="N")]


def doctor_command(
    options: EngineOptions,
    target: ModelArgument = None,
    drafter: DrafterArgument = None,
    prompts: PromptFile = None,
    chat_template: ChatTemplate = None,
    max_tokens: MaxTokens = None,
    as_json: AsJson = False,
) -> None:
    """Find out why a drafter does not agree with its target.

    Shows how every setting of the drafter was read and from where, measures its drafts on text that the target writes,
    and tries other readings of the same weights: the one that they were trained with drafts best.

    Exit status 0: healthy. 1: dead, faulty, or read wrongly. 3: too little text to tell.

    \b
    Examples:
      outrider doctor
      outrider doctor MODEL DRAFTER
      outrider doctor MODEL DRAFTER --prompts PROMPTS.jsonl --json
      outrider doctor --model MODEL \\
        --speculative-config '{"model": "DRAFTER", "taps": [2, 16, 29]}'
    """
    options = options.named(target, drafter)
    with importing():
        from outrider.bench.prompts import PromptChoice, read_prompts
        from outrider.doctor.examination import FULL, examine_config
        from outrider.doctor.report import show_diagnosis
    config = options.config()
    if config.num_ranks > 1:
        raise ValueError("a drafter is examined by one process: leave out --tensor-parallel-size")
    if config.speculative is None:
        raise ValueError("give a drafter too: outrider doctor MODEL DRAFTER")
    effort = FULL if max_tokens is None else replace(FULL, max_tokens=max_tokens)
    choice = PromptChoice(read_prompts(prompts) if prompts is not None else None, chat_template)
    consoles = open_consoles()
    with progress_bar(consoles.about) as progress:
        diagnosis = examine_config(config, choice, effort, progress)
    if as_json:
        typer.echo(json.dumps(diagnosis.to_dict()))
    else:
        show_diagnosis(consoles.out, diagnosis)
    raise typer.Exit(diagnosis.exit_status)
