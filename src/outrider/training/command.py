"""`outrider train`: the command line of a run. Exit status 130 after Ctrl-C, with everything written down."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from outrider.commands import option
from outrider.console import open_consoles
from outrider.options import ENGINE, OUTPUT, AsJson, Device, Dtype
from outrider.startup import importing

DATA, LENGTH, DRAFTER, LEARNING = "Data", "Length", "Drafter", "Learning"
EXIT_INTERRUPTED = 130

_METHOD_HELP = "eagle3, p_eagle, dflash, dspark or mtp."
_TARGET_HELP = "The target: a directory, a .gguf file or a hub id. Without it, the embedded model."
_DATA_HELP = "Prompts: chat JSONL, ShareGPT's JSON, or plain text in a .txt file. Again for more."
_OUT_HELP = "Where the drafter goes, with its card, its picture and its README."
_REGENERATE_HELP = "yes: the target answers the prompts itself. no: the answers in the data are its own already."
_TEXTS_HELP = "Learn from the texts.safetensors of an earlier run: nothing is generated. Again for more."
_TEXTS_ONLY_HELP = "Write the target's texts into --out, for --texts of other runs, and stop."
_DRAFT_HELP = "A drafter that helps the target answer: the same texts, in fewer rounds."
_MATRIX_RATE_HELP = "Muon's learning rate: the share of a matrix that a step changes. By default, the drafter's own."
_INIT_HELP = "Go on from this drafter instead of a new one."
_INTERMEDIATE_HELP = "Width of its layers' MLPs. By default, as the target's."
_WARM_HELP = "Begin as a copy of the target's last layer, where shapes agree."
_VOCABULARY_HELP = "Tokens that it can say: as many as the target says most often. By default, all."
_DIALECT_HELP = "How config.json is written: original (as the method's authors do), or speculators."
_RANKS_HELP = "Processes that share a target too large for one device; the drafter learns on the first."
_PATIENCE_HELP = "Stop after so many validations without a better accept length; 0: never."


def train_command(
    method: Annotated[str, typer.Argument(metavar="METHOD", help=_METHOD_HELP)],
    data: Annotated[list[Path], option(DATA, "--data", metavar="FILE", help=_DATA_HELP, exists=True, dir_okay=False)],
    out: Annotated[Path, option(OUTPUT, "--out", metavar="DIR", help=_OUT_HELP, file_okay=False)],
    target: Annotated[str | None, option(DATA, "--target", "-m", metavar="M", help=_TARGET_HELP)] = None,
    minutes: Annotated[float | None, option(LENGTH, "--minutes", metavar="N", help="Train for so long.")] = None,
    max_steps: Annotated[int | None, option(LENGTH, "--max-steps", metavar="N", help="Train so many steps.")] = None,
    resume: Annotated[bool, option(LENGTH, "--resume", help="Go on with the run in --out.")] = False,
    patience: Annotated[int, option(LENGTH, "--patience", metavar="N", help=_PATIENCE_HELP)] = 5,
    validations: Annotated[int, option(LENGTH, "--validations", metavar="N", help="Validations in the run.")] = 8,
    regenerate: Annotated[str, option(DATA, "--regenerate", metavar="yes|no", help=_REGENERATE_HELP)] = "yes",
    texts: Annotated[
        list[Path] | None, option(DATA, "--texts", metavar="FILE", help=_TEXTS_HELP, exists=True, dir_okay=False)
    ] = None,
    texts_only: Annotated[bool, option(DATA, "--texts-only", help=_TEXTS_ONLY_HELP)] = False,
    draft: Annotated[str | None, option(DATA, "--draft", "-d", metavar="D", help=_DRAFT_HELP)] = None,
    samples: Annotated[int, option(DATA, "--samples", metavar="N", help="Answers to each prompt.")] = 1,
    temperatures: Annotated[str, option(DATA, "--temperatures", metavar="LIST", help="Of the answers.")] = "0,0,0.7,1",
    answer_tokens: Annotated[int, option(DATA, "--answer-tokens", metavar="N", help="Longest answer.")] = 256,
    turns: Annotated[int, option(DATA, "--turns", metavar="N", help="Turns of a conversation, at most.")] = 3,
    generate_minutes: Annotated[
        float | None, option(DATA, "--generate-minutes", metavar="N", help="Generate no longer than this.")
    ] = None,
    limit: Annotated[
        int | None, option(DATA, "--limit", metavar="N", help="Read so many prompts of each file.")
    ] = None,
    held_out: Annotated[int, option(DATA, "--held-out", metavar="N", help="Prompts kept for validation.")] = 40,
    validation_tokens: Annotated[int, option(LENGTH, "--validation-tokens", metavar="N", help="Of each answer.")] = 96,
    chat: Annotated[bool, option(DATA, "--chat/--no-chat", help="Prompts go through the chat template.")] = True,
    depth: Annotated[int, option(DRAFTER, "--depth", "-k", metavar="K", help="Tokens to draft.")] = 5,
    layers: Annotated[int | None, option(DRAFTER, "--layers", metavar="N", help="Layers of the drafter.")] = None,
    intermediate_size: Annotated[
        int | None, option(DRAFTER, "--intermediate-size", metavar="N", help=_INTERMEDIATE_HELP)
    ] = None,
    taps: Annotated[str | None, option(DRAFTER, "--taps", metavar="LIST", help="The target's states it reads.")] = None,
    post_norm: Annotated[bool, option(DRAFTER, "--post-norm", help="eagle3: feed the normed state back.")] = False,
    window: Annotated[
        int, option(DRAFTER, "--window", metavar="N", help="eagle3, p_eagle: look back so far only.")
    ] = 0,
    draft_vocabulary: Annotated[
        int | None, option(DRAFTER, "--draft-vocabulary", metavar="N", help=_VOCABULARY_HELP)
    ] = None,
    train_vocabulary: Annotated[
        bool, option(DRAFTER, "--train-vocabulary", help="Train its own head too, not only its layers.")
    ] = False,
    warm_start: Annotated[bool, option(DRAFTER, "--warm-start/--no-warm-start", help=_WARM_HELP)] = True,
    init: Annotated[Path | None, option(DRAFTER, "--init", metavar="DIR", help=_INIT_HELP, file_okay=False)] = None,
    dialect: Annotated[str, option(DRAFTER, "--dialect", metavar="NAME", help=_DIALECT_HELP)] = "original",
    loss: Annotated[str, option(LEARNING, "--loss", metavar="NAME", help="kl, ce, mixed or lk.")] = "mixed",
    row_len: Annotated[int | None, option(LEARNING, "--row-len", metavar="N", help="Tokens of a packed row.")] = None,
    tokens_per_step: Annotated[
        int | None, option(LEARNING, "--tokens-per-step", metavar="N", help="Of all processes together.")
    ] = None,
    matrix_rate: Annotated[float | None, option(LEARNING, "--matrix-rate", metavar="X", help=_MATRIX_RATE_HELP)] = None,
    rate: Annotated[float, option(LEARNING, "--rate", metavar="X", help="AdamW's, for all that is no matrix.")] = 1e-3,
    seed: Annotated[int, option(LEARNING, "--seed", metavar="S", help="Of data, order and first weights.")] = 0,
    device: Device = "auto",
    dtype: Dtype = "auto",
    tensor_parallel_size: Annotated[
        int, option(ENGINE, "--tensor-parallel-size", "-tp", metavar="N", help=_RANKS_HELP, min=1)
    ] = 1,
    threads: Annotated[int | None, option(ENGINE, "--threads", metavar="N", help="Threads of the CPU.", min=1)] = None,
    as_json: AsJson = False,
) -> None:
    """Train a drafter for a target, in the process that serves it.

    The target answers the prompts itself; the drafter learns to foresee what it says. Now and then the engine serves
    held-out prompts with it: the accept length it has there decides what is kept, and when to stop.

    \b
    Examples:
      outrider train eagle3 --data prompts.jsonl --out drafter --minutes 5
      outrider train dflash --target org/name --data chats.jsonl \\
        --out drafter --minutes 20 -k 7
      outrider train eagle3 --data prompts.jsonl --out drafter \\
        --minutes 10 --resume
      torchrun --nproc-per-node 8 -m outrider train eagle3 --target org/name \\
        --data chats.jsonl --out drafter --max-steps 4000
    """
    consoles = open_consoles()
    with importing():
        from outrider.pair import target_of
        from outrider.training.optimizer import Rates
        from outrider.training.options import TrainOptions
        from outrider.training.regenerate import Regeneration
        from outrider.training.report import shown, write_report
        from outrider.training.run import train, write_texts
        from outrider.training.world import joined
    options = TrainOptions(
        method=method,
        target=target_of(target),
        data=tuple(data),
        out=out,
        minutes=minutes,
        max_steps=max_steps,
        depth=depth,
        num_layers=layers,
        intermediate_size=intermediate_size,
        taps=tuple(_whole(taps, "--taps")) if taps is not None else None,
        post_norm=post_norm,
        warm=warm_start,
        init=init,
        window=window,
        draft_vocabulary=draft_vocabulary,
        train_vocabulary=train_vocabulary,
        loss=loss,
        row_len=row_len,
        tokens_per_step=tokens_per_step,
        rates=Rates(matrices=matrix_rate, others=rate),
        regenerate=_yes(regenerate),
        texts=tuple(texts or ()),
        texts_only=texts_only,
        draft=draft,
        samples=samples,
        generate_minutes=generate_minutes,
        answers=Regeneration(
            max_tokens=answer_tokens,
            max_len=0,
            temperatures=tuple(_numbers(temperatures, "--temperatures")),
            max_turns=turns,
            chat=chat,
        ),
        num_held_out=held_out,
        num_validations=validations,
        validation_tokens=validation_tokens,
        patience=patience,
        dialect=dialect,
        resume=resume,
        seed=seed,
        device=device,
        dtype=dtype,
        limit=limit,
        threads=threads,
        num_ranks=tensor_parallel_size,
    )
    if texts_only:
        with shown(consoles.about) as on_progress:
            path, count = write_texts(options, on_progress)
        typer.echo(json.dumps({"texts": str(path), "count": count}) if as_json else f"{count} texts in {path}")
        return
    with joined(options) as (options, world), shown(consoles.about) as on_progress:
        result = train(options, world, on_progress)
    if world.rank == 0:
        command = " ".join(_command_line())
        card = write_report(result, command)
        if as_json:
            typer.echo(json.dumps(result.report()))
        else:
            consoles.out.print(card, highlight=False, markup=False)
    if result.interrupted:
        raise typer.Exit(EXIT_INTERRUPTED)


def _command_line() -> list[str]:
    return ["outrider", *(shlex.quote(argument) for argument in sys.argv[1:])]


def _yes(text: str) -> bool:
    if text not in ("yes", "no"):
        raise ValueError(f"--regenerate must be yes or no, not {text!r}")
    return text == "yes"


def _numbers(text: str, name: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise ValueError(f"{name} must be numbers with commas between them, not {text!r}") from None


def _whole(text: str, name: str) -> list[int]:
    found = _numbers(text, name)
    if any(number != int(number) for number in found):
        raise ValueError(f"{name} must be whole numbers, not {text!r}")
    return [int(number) for number in found]
