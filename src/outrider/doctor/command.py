"""`outrider doctor`: how a drafter was read, and whether it agrees. Exit status 0 healthy, 1 not, 3 cannot tell."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Annotated

import typer

from outrider.bench.options import (
    AsJson,
    Device,
    Dtype,
    MaxModelLen,
    NumSpeculativeTokens,
    PromptFile,
    SpeculativeJson,
    Threads,
    speculative_from,
)
from outrider.bench.prompts import read_prompts
from outrider.certify.command import progress_bar
from outrider.console import open_consoles
from outrider.doctor.examination import FULL, examine
from outrider.doctor.report import show_diagnosis

_TARGET_HELP = "Target: a directory, a .gguf file or a hub id. Default: the embedded model."
_DRAFTER_HELP = "Drafter: a directory, a hub id, or a method's name."
TargetName = Annotated[str | None, typer.Argument(metavar="TARGET", help=_TARGET_HELP)]
DrafterName = Annotated[str | None, typer.Argument(metavar="DRAFTER", help=_DRAFTER_HELP)]
MaxTokens = Annotated[int, typer.Option("--max-tokens", "-n", help="Tokens in each answer.", metavar="N")]


def doctor_command(
    target: TargetName = None,
    drafter: DrafterName = None,
    prompts: PromptFile = None,
    speculative_config: SpeculativeJson = None,
    num_speculative_tokens: NumSpeculativeTokens = None,
    max_tokens: MaxTokens = FULL.max_tokens,
    dtype: Dtype = "auto",
    device: Device = "auto",
    max_model_len: MaxModelLen = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Find out why a drafter does not agree with its target, or that it does.

    Shows how every setting of the drafter was read and from where, measures its drafts on text that the target writes,
    and tries other readings of the same weights: the one that they were trained with drafts best.

    Exit status 0: healthy. 1: dead, or read wrongly. 3: too little text to tell.

    \b
    Examples:
      outrider doctor
      outrider doctor TARGET DRAFTER
      outrider doctor TARGET DRAFTER --prompts PROMPTS.jsonl --json
      outrider doctor TARGET --speculative-config '{"model": "DRAFTER", "taps": [2, 16, 29]}'
    """
    if target is not None and drafter is None and speculative_config is None:
        raise ValueError("give a drafter too: outrider doctor TARGET DRAFTER")
    speculative = speculative_from(target, drafter, speculative_config, num_speculative_tokens)
    consoles = open_consoles()
    with progress_bar(consoles.about) as progress:
        diagnosis = examine(
            target,
            speculative,
            prompts=read_prompts(prompts) if prompts is not None else None,
            effort=replace(FULL, max_tokens=max_tokens),
            dtype=dtype,
            device=device,
            max_model_len=max_model_len,
            progress=progress,
        )
    if as_json:
        typer.echo(json.dumps(diagnosis.to_dict()))
    else:
        show_diagnosis(consoles.out, diagnosis)
    raise typer.Exit(diagnosis.exit_status)
