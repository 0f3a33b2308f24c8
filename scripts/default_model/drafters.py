"""The drafters stage: `outrider train` makes the drafters of the embedded default.

Prompts are written from the word lists; several processes let the target answer them, because the host is what a target
this small waits for; then the drafters learn from the same texts, side by side on one device: first from short rows,
which cost less, then from rows as long as the target's context, so that they do not fade with it.
"""

import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from default_model.free_prompts import free_opening, free_request
from default_model.measure import CHAT_PROMPTS
from default_model.prompts import requests
from default_model.small_talk import small_talk
from outrider.training.checkpoint import STATE

FOLDERS = {"eagle3": "drafter"}  # the others are called as their method
# after as many steps, drafts of the post-norm form stand a little longer (docs/diary.md); as wide as the shipped head
FORMS = {"eagle3": ("--post-norm", "--intermediate-size", 768)}
WINDOWED = ("eagle3", "p_eagle")  # methods that can look back so far only
WINDOW = 128  # how far they look back: what is further off helps a draft little, and is what they fade with
LONG = 12  # turns of a conversation that fills the target's context
MORE = (
    "Tell me more.", "Go on.", "What happened then?", "Why?", "Can you say that again?", "Thank you!",
    "Tell me another story.", "And what did they do next?", "Who are you?", "Make it shorter.", "Give me an example.",
)  # fmt: skip


@dataclass(frozen=True)
class DraftersOptions:
    """What the drafters stage is asked for."""

    data: Path
    target: Path
    out: Path
    device: str
    seed: int
    processes: int = 10
    prompts: int = 12_000  # of each process, more than it can answer
    generate_minutes: float = 0.7
    minutes: tuple[float, float] = (0.95, 0.6)  # of short rows, then of long ones
    max_steps: int | None = None  # instead of minutes
    row_lens: tuple[int, int] = (512, 2048)
    tokens_per_step: int = 16384
    methods: tuple[str, ...] = ("eagle3", "p_eagle")
    texts_only: bool = False
    init: Path | None = None  # drafters that an earlier run has made, to go on from


def prompts(seed: int) -> Iterator[dict[str, Any]]:
    """Beginnings of texts, whole or broken off anywhere, single requests, small talk, and conversations that go on for
    long: few of them, which are a quarter of all tokens as it is, and repeat themselves. Half are of the shapes that
    the target was made with, half of many others. What it is measured with is not among them."""
    pick, source = random.Random(seed), requests(seed)
    greetings = [item.prompt for item in small_talk(num_copies=1)]

    def asked() -> str:
        text = next(source).text if pick.random() < 0.5 else free_request(pick)
        return text if text not in CHAT_PROMPTS else asked()

    while True:
        kind = pick.random()
        if kind < 0.46:
            opening = next(source).opening if pick.random() < 0.5 else free_opening(pick)
            words = opening.split(" ")
            if opening:
                yield {"text": " ".join(words[: pick.randint(1, len(words))] if pick.random() < 0.5 else words)}
        elif kind < 0.93:
            yield {"turns": [asked()]}
        elif kind < 0.97:
            yield {"turns": [pick.choice(greetings), asked()]}
        else:
            yield {"turns": [asked(), *(asked() if pick.random() < 0.6 else pick.choice(MORE) for _ in range(LONG))]}


def write_prompts(path: Path, count: int, seed: int, but: Sequence[str] = ()) -> list[str]:
    """`but`: lines that are not to be among them."""
    lines: list[str] = []
    for entry in prompts(seed):
        line = json.dumps(entry)
        if line not in but:
            lines.append(line)
        if len(lines) == count:
            break
    path.write_text("\n".join(lines) + "\n")
    return lines


def _train(method: str, options: DraftersOptions, *flags: Any, **settings: Any) -> subprocess.Popen[bytes]:
    """Begins `outrider train`; settings are its options, with their values."""
    settings |= {"target": options.target, "device": options.device}
    named = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", value)]
    command = [sys.executable, "-m", "outrider", "train", method, *flags, *named]
    print("$", " ".join(map(str, command[2:])), flush=True)
    return subprocess.Popen([str(part) for part in command])


def _wait(running: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in running:
        if process.wait():
            raise SystemExit(f"{' '.join(map(str, process.args))} failed")


def write_texts(options: DraftersOptions) -> list[Path]:
    """The target answers, in several processes; and prompts that it is not asked here. What is there already, is not
    written again."""
    held_out = write_prompts(options.data / "held-out.jsonl", 60, options.seed + 999)
    folders, running = [options.data / f"texts-{number}" for number in range(options.processes)], []
    texts = [folder / "training" / "texts.safetensors" for folder in folders]
    for number, folder in enumerate(folders):
        if texts[number].exists():
            continue
        data = options.data / f"prompts-{number}.jsonl"
        write_prompts(data, options.prompts, options.seed + number, held_out)
        settings = {"data": data, "out": folder, "turns": LONG + 1, "row_len": max(options.row_lens), "held_out": 1}
        settings |= {"seed": options.seed + number, "generate_minutes": options.generate_minutes, "answer_tokens": 400}
        running.append(_train("eagle3", options, "--texts-only", **settings))
    _wait(running)
    return texts


def make_drafters(options: DraftersOptions) -> None:
    """The target writes, the drafters learn, the best of each is kept. All else stays in the data folder, and a run
    that was broken off there goes on."""
    begin = time.monotonic()
    options.data.mkdir(parents=True, exist_ok=True)
    texts = [part for path in write_texts(options) for part in ("--texts", path)]
    print(f"texts after {time.monotonic() - begin:.0f} s", flush=True)
    if options.texts_only:
        return
    for number, (row_len, minutes) in enumerate(zip(options.row_lens, options.minutes, strict=True)):
        length = {"minutes": minutes} if options.max_steps is None else {"max_steps": options.max_steps}
        rates = {"matrix_rate": 1.5e-2, "rate": 5e-4} if number else {"matrix_rate": 6e-2, "rate": 1e-3}
        judging = {"data": options.data / "held-out.jsonl", "held_out": 60, "validations": 3, "patience": 0}
        size = {"depth": 5, "row_len": row_len, "tokens_per_step": options.tokens_per_step}
        running = []
        for method in options.methods:
            settings = {**judging, **size, **length, **rates, "seed": options.seed + number}
            settings["out"] = options.data / f"{method}-{number}"
            if method in WINDOWED:
                settings["window"] = WINDOW
            if number:
                settings["init"] = options.data / f"{method}-{number - 1}"
            elif options.init is not None:
                settings["init"] = options.init / FOLDERS.get(method, method)
            flags = ["--train-vocabulary", *FORMS.get(method, ())]
            flags += ["--resume"] if (settings["out"] / "training" / STATE).exists() else []
            running.append(_train(method, options, *flags, *texts, **settings))
        _wait(running)
        print(f"rows of {row_len} after {time.monotonic() - begin:.0f} s", flush=True)
    for method in options.methods:
        folder = options.out / FOLDERS.get(method, method)
        folder.mkdir(parents=True, exist_ok=True)
        for name in ("config.json", "model.safetensors"):
            (folder / name).write_bytes((options.data / f"{method}-1" / name).read_bytes())
