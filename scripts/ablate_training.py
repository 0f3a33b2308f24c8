"""What of a training recipe matters: several runs of `outrider train` side by side on one device, from the same texts.

python scripts/ablate_training.py OUT --target TARGET --data CHATS.jsonl --minutes 3 [--only base,ce] [-- MORE OPTIONS]
One table on standard output. Options after -- go to every run. A row differs from `base` (regenerated answers, warm
start, a mixed loss, one layer) in what it is named for. `own answers` needs data that holds answers.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

VARIANTS: dict[str, list[str]] = {
    "base": [],
    "own answers": [],  # of the data, instead of the target's
    "no warm start": ["--no-warm-start"],
    "ce": ["--loss", "ce"],
    "kl": ["--loss", "kl"],
    "lk": ["--loss", "lk"],
    "two layers": ["--layers", "2"],
    "post-norm": ["--post-norm"],
}
HELD_OUT = 40


def split(paths: list[Path], out: Path) -> tuple[Path, Path]:
    """All prompts but the last few of each file, and those."""
    learnt, held = [], []
    for path in paths:
        lines = [line for line in path.read_text().splitlines() if line.strip()]
        count = min(HELD_OUT // len(paths), len(lines) // 5)
        learnt += lines[: len(lines) - count]
        held += lines[len(lines) - count :]
    files = out / "learnt.jsonl", out / "held-out.jsonl"
    for file, lines in zip(files, (learnt, held), strict=True):
        file.write_text("\n".join(lines) + "\n")
    return files


def train(method: str, *arguments: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "outrider", "train", method, *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def finished(process: subprocess.Popen[str]) -> dict[str, Any] | None:
    """What it has reported; None where it failed."""
    said = process.communicate()[0]
    return json.loads(said) if process.returncode == 0 else None


def texts_of(arguments: argparse.Namespace, learnt: Path, names: list[str]) -> dict[str, Path]:
    """By whose answers they hold."""
    sources = {"yes": any(name != "own answers" for name in names), "no": "own answers" in names}
    running = {}
    for regenerate, wanted in sources.items():
        if wanted:
            where = arguments.out / f"texts-{regenerate}"
            given = ["--target", arguments.target, "--data", learnt, "--out", where, "--regenerate", regenerate]
            limit = ["--generate-minutes", arguments.generate_minutes, "--held-out", 1, "--json"]
            running[regenerate] = train(arguments.method, "--texts-only", *given, *limit, *arguments.more)
    reports = {regenerate: finished(process) for regenerate, process in running.items()}
    return {regenerate: Path(report["texts"]) for regenerate, report in reports.items() if report is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--target", required=True)
    parser.add_argument("--data", type=Path, action="append", required=True)
    parser.add_argument("--minutes", type=float, required=True)
    parser.add_argument("--generate-minutes", type=float, default=2.0)
    parser.add_argument("--method", default="eagle3")
    parser.add_argument("--only", default=",".join(VARIANTS))
    given = sys.argv[1:]
    end = given.index("--") if "--" in given else len(given)
    arguments = parser.parse_args(given[:end])
    arguments.more = given[end + 1 :]
    arguments.out.mkdir(parents=True, exist_ok=True)
    names = [name for name in VARIANTS if name in arguments.only.split(",")]
    learnt, held_out = split(arguments.data, arguments.out)
    texts, running = texts_of(arguments, learnt, names), {}
    for name in names:
        source = texts.get("no" if name == "own answers" else "yes")
        if source is None:
            print(f"{name}: no texts", file=sys.stderr)
            continue
        where = ["--out", arguments.out / name.replace(" ", "-"), "--texts", source, "--json"]
        given = ["--target", arguments.target, "--data", held_out, "--held-out", HELD_OUT, "--patience", 0]
        length = ["--minutes", arguments.minutes, "--validations", 3]
        running[name] = train(arguments.method, *given, *where, *length, *VARIANTS[name], *arguments.more)
    print("| run | accept length, T = 0 | T = 0.8 | before | steps | tokens/s |\n|---|---|---|---|---|---|")
    for name, process in running.items():
        report = finished(process)
        if report is None:
            print(f"| {name} | failed | | | | |", flush=True)
            continue
        at = report["after"]["by_temperature"]
        lengths = [f"{at[temperature]['accept_length']:.2f}" for temperature in ("0", "0.8")]
        before, rate = f"{report['accept_length_before']:.2f}", f"{report['tokens_per_second']:,.0f}"
        print(f"| {name} | {' | '.join(lengths)} | {before} | {report['steps']} | {rate} |", flush=True)


if __name__ == "__main__":
    main()
