"""Makes Outrider's embedded default, a tiny target and its drafters, stage by stage.

Stages: text (a teacher writes), clean, tokenizer, target, drafters, measure. scripts/README.md gives the commands.
"""

import argparse
from pathlib import Path

import torch
from default_model.corpus import TextOptions, clean_text, make_text
from default_model.drafters import DraftersOptions, make_drafters
from default_model.measure import measure
from default_model.target import TrainOptions, make_target
from default_model.vocabulary import make_tokenizer

DEFAULT = Path(__file__).resolve().parent.parent / "src" / "outrider" / "default"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=Path, default=DEFAULT / "target", help="folder of the target checkpoint")
    parser.add_argument("--drafter", type=Path, default=DEFAULT / "drafter", help="folder of the drafter checkpoint")
    stages = parser.add_subparsers(dest="stage", required=True)
    _add_text(stages.add_parser("text", help="let the teacher answer many requests"))
    _add_data(stages.add_parser("clean", help="keep the good answers"))
    _add_data(stages.add_parser("tokenizer", help="train the byte-level BPE on the text"))
    _add_target(stages.add_parser("target", help="train the tiny target"))
    _add_drafters(stages.add_parser("drafters", help="let the target write, and `outrider train` drafters on that"))
    _add_measure(stages.add_parser("measure", help="greedy speculative decoding of simple prompts, from the files"))
    return parser


def _add_data(stage: argparse.ArgumentParser) -> None:
    stage.add_argument("--data", type=Path, required=True, help="folder of the raw-* and text-*.jsonl.xz files")


def _add_text(stage: argparse.ArgumentParser) -> None:
    _add_data(stage)
    stage.add_argument("--teacher", type=Path, required=True, help="SmolLM2-135M-Instruct as a GGUF file")
    stage.add_argument("--sequences", type=int, default=260_000)
    stage.add_argument("--limit-s", type=float, default=300, help="stop generating after this many seconds")
    stage.add_argument("--slots", type=int, default=4096, help="sequences decoded at once")


def _add_training(stage: argparse.ArgumentParser, steps: int, rate: float, decay: float) -> None:
    _add_data(stage)
    stage.add_argument("--steps", type=int, default=steps)
    stage.add_argument("--limit-s", type=float, default=240, help="take fewer steps if they would not fit this time")
    stage.add_argument("--tokens-per-batch", type=int, default=65536)
    stage.add_argument("--peak-lr", type=float, default=rate)
    stage.add_argument("--weight-decay", type=float, default=decay)
    stage.add_argument("--warmup-steps", type=int, default=200)


def _add_target(stage: argparse.ArgumentParser) -> None:
    _add_training(stage, steps=3600, rate=3e-3, decay=0.1)


def _add_drafters(stage: argparse.ArgumentParser) -> None:
    _add_data(stage)
    stage.add_argument("--processes", type=int, default=10, help="in which the target writes")
    stage.add_argument("--prompts", type=int, default=12_000, help="of each process: more than it has time for")
    stage.add_argument("--generate-minutes", type=float, default=0.7)
    stage.add_argument(
        "--minutes", type=float, nargs=2, default=(0.95, 0.6), help="of training with short and long rows"
    )
    stage.add_argument("--steps", type=int, help="train so many steps instead")
    stage.add_argument("--row-len", type=int, nargs=2, default=(512, 2048))
    stage.add_argument("--tokens-per-step", type=int, default=16384)
    stage.add_argument("--methods", default="eagle3,p_eagle")
    stage.add_argument("--texts-only", action="store_true", help="let the target write, and stop")
    stage.add_argument("--out", type=Path, default=DEFAULT, help="where the drafters go")
    stage.add_argument("--init", type=Path, help="folder of drafters that an earlier run has made, to go on from")


def _add_measure(stage: argparse.ArgumentParser) -> None:
    stage.add_argument("--drafts", type=int, default=5)
    stage.add_argument("--max-new", type=int, default=100)
    stage.add_argument("--check", action="store_true", help="also decode plainly and compare")


def _training(arguments: argparse.Namespace) -> TrainOptions:
    return TrainOptions(
        device=arguments.device,
        seed=arguments.seed,
        num_steps=arguments.steps,
        limit_s=arguments.limit_s,
        tokens_per_batch=arguments.tokens_per_batch,
        peak_lr=arguments.peak_lr,
        weight_decay=arguments.weight_decay,
        num_warmup_steps=arguments.warmup_steps,
    )


def _text(arguments: argparse.Namespace) -> None:
    make_text(
        TextOptions(
            teacher=arguments.teacher,
            data=arguments.data,
            num_sequences=arguments.sequences,
            limit_s=arguments.limit_s,
            num_slots=arguments.slots,
            device=arguments.device,
            seed=arguments.seed,
        )
    )


def _drafters(arguments: argparse.Namespace) -> None:
    make_drafters(
        DraftersOptions(
            data=arguments.data,
            target=arguments.target,
            out=arguments.out,
            device=arguments.device,
            seed=arguments.seed,
            processes=arguments.processes,
            prompts=arguments.prompts,
            generate_minutes=arguments.generate_minutes,
            minutes=tuple(arguments.minutes),
            max_steps=arguments.steps,
            row_lens=tuple(arguments.row_len),
            tokens_per_step=arguments.tokens_per_step,
            methods=tuple(arguments.methods.split(",")),
            texts_only=arguments.texts_only,
            init=arguments.init,
        )
    )


def main() -> None:
    """Run one stage."""
    arguments = _parser().parse_args()
    torch.set_float32_matmul_precision("high")
    if arguments.stage == "text":
        _text(arguments)
    elif arguments.stage == "clean":
        clean_text(arguments.data)
    elif arguments.stage == "tokenizer":
        make_tokenizer(arguments.data, arguments.target)
    elif arguments.stage == "target":
        make_target(arguments.data, arguments.target, _training(arguments))
    elif arguments.stage == "drafters":
        _drafters(arguments)
    else:
        measure(
            arguments.target, arguments.drafter, arguments.drafts, arguments.max_new, arguments.check, arguments.device
        )


if __name__ == "__main__":
    main()
