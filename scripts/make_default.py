"""Makes Outrider's embedded default, a tiny target and its EAGLE-3 drafter, stage by stage.

Stages: text (a teacher writes), clean, tokenizer, target, drafter, measure. scripts/README.md gives the commands.
"""

import argparse
from pathlib import Path

import torch
from default_model.corpus import TextOptions, clean_text, make_text
from default_model.drafter import DrafterOptions, make_drafter
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
    _add_drafter(stages.add_parser("drafter", help="let the target write, then train the drafter on that"))
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


def _add_drafter(stage: argparse.ArgumentParser) -> None:
    _add_training(stage, steps=6500, rate=2e-3, decay=0.02)
    stage.set_defaults(tokens_per_batch=32768)
    stage.add_argument("--sequences", type=int, default=300_000, help="continuations the target writes")
    stage.add_argument("--generation-limit-s", type=float, default=60)
    stage.add_argument("--slots", type=int, default=8192)
    stage.add_argument("--draft-vocabulary", type=int, default=4096)
    stage.add_argument("--feed-forward", type=int, default=768)
    stage.add_argument("--norm-output", action="store_true", help="feed back the normed state")
    stage.add_argument("--resume", action="store_true", help="train the saved drafter further")


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


def _drafter(arguments: argparse.Namespace) -> None:
    make_drafter(
        DrafterOptions(
            data=arguments.data,
            target=arguments.target,
            out=arguments.drafter,
            train=_training(arguments),
            num_sequences=arguments.sequences,
            generation_limit_s=arguments.generation_limit_s,
            num_slots=arguments.slots,
            draft_vocab_size=arguments.draft_vocabulary,
            feed_forward_size=arguments.feed_forward,
            norm_output=arguments.norm_output,
            resume=arguments.resume,
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
    elif arguments.stage == "drafter":
        _drafter(arguments)
    else:
        measure(arguments.target, arguments.drafter, arguments.drafts, arguments.max_new, arguments.check)


if __name__ == "__main__":
    main()
