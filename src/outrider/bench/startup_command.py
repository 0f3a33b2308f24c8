"""`outrider bench startup`: what the command takes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from outrider.bench.load.traffic_command import Shape, drafter_name
from outrider.console import checkpoint_name, open_consoles, print_json, show_note
from outrider.options import AsJson, EngineOptions, ModelArgument
from outrider.startup import importing

NumRuns = Annotated[int, typer.Option("--num-runs", metavar="N", help="Cold starts, each with a warm one.", min=1)]
MaxNumSeqs = Annotated[
    int | None,
    typer.Option("--max-num-seqs", metavar="N", help="Sequences at once: so many rounds are recorded.", min=1),
]


def startup(
    options: EngineOptions,
    target: ModelArgument = None,
    shape: Shape = None,
    max_num_seqs: MaxNumSeqs = None,
    num_runs: NumRuns = 1,
    as_json: AsJson = False,
) -> None:
    """From starting a process to its first token.

    Where the seconds go: imports, weights, cache, check-up of the drafter, warm-up (kernels and recordings). Cold,
    with nothing compiled yet, and warm. With --shape, --draft is eagle3, p_eagle, dflash, mtp or ngram.

    \b
    Examples:
      outrider bench startup
      outrider bench startup MODEL --draft DRAFTER --num-runs 3
      outrider bench startup --shape llama-3.1-8b --draft eagle3
    """
    options = options.named(target, needs_model=shape is None)
    with importing():
        import torch

        from outrider.bench.random_pair import random_config
        from outrider.bench.startup import measure, show_card, to_dict
        from outrider.pair import shown_name
    settings: dict[str, Any] = {} if max_num_seqs is None else {"max_num_seqs": max_num_seqs}
    if shape is None:
        config = options.config(**settings)
    else:
        config = random_config(options, shape, None, settings)
        shape = str(Path(shape).resolve()) if Path(shape).exists() else shape
    consoles, device = open_consoles(), config.torch_device
    setting = {
        "model": checkpoint_name(shown_name(config.model)),
        "drafter": drafter_name(config.speculative),
        "weights": "real" if shape is None else "random",
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else str(device),
        "max_num_seqs": config.max_num_seqs,
    }
    found = measure(config, shape, num_runs, lambda line: show_note(consoles.about, line))
    report = to_dict(setting, found)
    if not as_json:
        show_card(consoles.out, report)
    print_json(consoles.out, report, asked=as_json)
