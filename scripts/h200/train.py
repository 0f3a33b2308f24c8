"""Drafters for one target, from nothing to figures, on one GPU: see train.sh, which says why the numbers are what they
are.

    PYTHONPATH=src python scripts/h200/train.py PART...

texts      the target answers prompts, in several processes side by side
train      `outrider train` for every method, side by side, until TRAIN_SECONDS are over; the next call goes on with it
accept     accept length by prompt file and temperature, every drafter in a process of its own; beside it the proof:
proof      `outrider certify --exact` on every pair
speed      tokens a second, adaptive, all drafters and plain by turns
peers      the same against transformers, compiled and with prompt lookup
ablate     what of the recipe matters (scripts/ablate_training.py)
pack       drafters, cards and pictures to $OUT, in pieces, and every figure in one JSON file

CHAT=no: a target without a chat template is given the prompts as they are.
Where it works, $STATE, everything is kept from call to call. $HEADS: a folder with drafters that an earlier call has
packed, to go on from where $STATE is gone."""

from __future__ import annotations

import functools
import io
import json
import lzma
import os
import random
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

from common import SMOKE, attempt, say

SCRIPTS = Path(__file__).parents[1]
sys.path.insert(0, str(SCRIPTS))
STATE = Path(os.environ.get("STATE") or Path(tempfile.gettempdir()) / "outrider-train")
OUT = Path(os.environ.get("OUT") or tempfile.mkdtemp())
TARGET = os.environ.get("TARGET", "")  # none: the embedded one
PROMPTS = [Path(name) for name in os.environ.get("PROMPTS", "").split()]
TESTS = [Path(name) for name in os.environ.get("TESTS", "").split()]
METHODS = (os.environ.get("METHODS") or ("eagle3,mtp" if SMOKE else "eagle3,p_eagle,dflash,mtp")).split(",")
K = int(os.environ.get("K") or (3 if SMOKE else 7))
MINUTES = float(os.environ.get("MINUTES") or (0.4 if SMOKE else 9))  # of training, of all calls together
TRAIN_SECONDS = float(os.environ.get("TRAIN_SECONDS") or (90 if SMOKE else 420))  # of this call, loading included
WRITE_MINUTES = float(os.environ.get("WRITE_MINUTES") or (0.1 if SMOKE else 1.3))
ABLATE_MINUTES = float(os.environ.get("ABLATE_MINUTES") or (0.1 if SMOKE else 2))
NUM_WRITERS, NUM_OWN, NUM_HELD_OUT = (2, 200, 8) if SMOKE else (10, 20_000, 48)
PIECE = 16_000_000  # bytes of a file that comes back, at most
# more layers for those that draft in one pass, where they cost one pass; MTP: three modules. EAGLE-3: what `ablate` has
# found best
OPTIONS: dict[str, list[str]] = {
    "eagle3": os.environ.get("EAGLE3", "--post-norm --loss kl").split(),
    "p_eagle": os.environ.get("P_EAGLE", "--layers 3").split(),
    "dflash": os.environ.get("DFLASH", "--layers 3").split(),
    "mtp": os.environ.get("MTP", "--layers 3").split(),
}
SIZES = (
    ["--row-len", "128", "--tokens-per-step", "512"] if SMOKE else ["--row-len", "1024", "--tokens-per-step", "16384"]
)
NAMED = [*(["--target", TARGET] if TARGET else []), *(["--no-chat"] if os.environ.get("CHAT") == "no" else [])]


def outrider(*arguments: Any) -> list[str]:
    return [sys.executable, "-m", "outrider", *map(str, arguments)]


def script(name: str, *arguments: Any) -> list[str]:
    return [sys.executable, str(SCRIPTS / name), *map(str, arguments)]


@functools.cache
def shared_gpu() -> dict[str, str]:
    """The environment of processes that share the GPU: NVIDIA's MPS lets their kernels run side by side where it is
    installed (four trainings: 300,000 tokens/s together, and 145,000 taking turns). What is timed is left out of it."""
    folder = STATE / "mps"
    named = {"CUDA_MPS_PIPE_DIRECTORY": str(folder / "pipe"), "CUDA_MPS_LOG_DIRECTORY": str(folder / "log")}
    if shutil.which("nvidia-cuda-mps-control") is None or SMOKE:
        return {}
    for each in named.values():
        Path(each).mkdir(parents=True, exist_ok=True)
    subprocess.run(["nvidia-cuda-mps-control", "-d"], env={**os.environ, **named}, stderr=subprocess.DEVNULL)
    return named


def _listen_to_interrupts() -> None:
    """Also where a shell has started us in the background, which makes everybody deaf to them."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Side:
    """A command that runs beside others; what it says is kept in a file."""

    def __init__(self, name: str, command: Sequence[str], *, alone: bool) -> None:
        logs = STATE / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self.name, self.out, self.errors = name, logs / f"{name}.out", logs / f"{name}.err"
        with self.out.open("w") as stdout, self.errors.open("w") as stderr:
            self.process = subprocess.Popen(
                command,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
                preexec_fn=_listen_to_interrupts,
                env={**os.environ, **({} if alone else shared_gpu())},
            )

    def wait(self, end: float, *, then: int = signal.SIGKILL) -> str:
        """What it has said on standard output. Whatever runs for longer is sent `then`."""
        try:
            self.process.wait(max(end - time.monotonic(), 0.1))
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, then)
            try:
                self.process.wait(40)
            except subprocess.TimeoutExpired:
                os.killpg(self.process.pid, signal.SIGKILL)
                self.process.wait()
        if self.process.returncode not in (0, 130):
            lines = [line for line in self.errors.read_text(errors="replace").splitlines() if line.strip()]
            say(f"FAILED {self.name} (status {self.process.returncode}): {' | '.join(lines[-2:])[:240]}")
        return self.out.read_text(errors="replace")


def run_all(
    commands: dict[str, list[str]], seconds: float, *, then: int = signal.SIGKILL, alone: bool = False
) -> dict[str, str]:
    """All at once; what each of them has said. `alone`: whatever is timed."""
    sides = [Side(name, command, alone=alone) for name, command in commands.items()]
    end = time.monotonic() + seconds
    try:
        return {side.name: side.wait(end, then=then) for side in sides}
    finally:
        for side in sides:
            if side.process.poll() is None:
                os.killpg(side.process.pid, signal.SIGINT)  # it writes down what it has


# texts


def write_prompts() -> None:
    """A file of prompts for every writer, and others that nobody learns from: of every source its share."""
    from default_model.prompts import requests
    from make_prompts import MORE

    pick, source = random.Random(0), requests(0)
    lines = [line for path in PROMPTS for line in path.read_text().splitlines() if line.strip()]
    for _ in range(NUM_OWN):
        turns = [next(source).text, *(pick.sample(MORE, 2) if pick.random() < 1 / 3 else [])]
        lines.append(json.dumps({"turns": turns}))
    pick.shuffle(lines)
    held_out, learnt = lines[:NUM_HELD_OUT], lines[NUM_HELD_OUT:]
    (STATE / "held-out.jsonl").write_text("\n".join(held_out) + "\n")
    for number in range(NUM_WRITERS):
        (STATE / f"prompts-{number}.jsonl").write_text("\n".join(learnt[number::NUM_WRITERS]) + "\n")
    say(f"{len(learnt):,} prompts for {NUM_WRITERS} writers, {len(held_out)} held out")


def texts_of() -> list[Path]:
    return sorted(STATE.glob("texts-*/training/texts.safetensors"))


def texts() -> None:
    if texts_of():
        say(f"texts are there already, of {len(texts_of())} writers")
        return
    STATE.mkdir(parents=True, exist_ok=True)
    write_prompts()
    commands = {}
    for number in range(NUM_WRITERS):
        files = ["--data", STATE / f"prompts-{number}.jsonl", "--out", STATE / f"texts-{number}"]
        length = ["--generate-minutes", WRITE_MINUTES, "--samples", 4, "--turns", 3, *SIZES[:2]]
        answers = ["--answer-tokens", 32 if SMOKE else 256, "--temperatures", "0,0,0.7,1", "--seed", number]
        commands[f"writer-{number}"] = outrider(
            "train", "eagle3", "--texts-only", *NAMED, *files, *length, *answers, "--held-out", 1
        )
    begin = time.monotonic()
    run_all(commands, 60 * WRITE_MINUTES + 120)
    seconds = time.monotonic() - begin
    sizes = [_size(path) for path in texts_of()]
    tokens, own = (sum(each[place] for each in sizes) for place in (1, 2))
    say(f"texts: {sum(each[0] for each in sizes):,} of {len(sizes)} writers, {tokens:,} tokens, {own:,} the target's "
        f"own, in {seconds:.0f} s: {own / seconds:,.0f} tokens/s")  # fmt: skip


def _size(path: Path) -> tuple[int, int, int]:
    from outrider.training.texts import read_texts

    found = read_texts(path)
    return len(found), sum(len(text.tokens) for text in found), int(sum(text.learnt.sum() for text in found))


# training


def train() -> None:
    unpack()
    sources = [part for path in texts_of() for part in ("--texts", path)]
    commands = {}
    for method in METHODS:
        folder = STATE / method
        how = [*OPTIONS[method], *SIZES, "-k", K, "--minutes", MINUTES, "--patience", 0, "--validations", 6]
        how += ["--data", STATE / "held-out.jsonl", "--held-out", NUM_HELD_OUT, "--json"]
        if (folder / "training" / "state.safetensors").exists():
            how.append("--resume")
        elif (STATE / "heads" / method).is_dir():  # of another machine: its momenta are lost, so it goes on more gently
            how += ["--init", STATE / "heads" / method, "--matrix-rate", 0.01, "--rate", 0.0005]
        commands[method] = outrider("train", method, *NAMED, "--out", folder, *sources, *how)
    for method, said in run_all(commands, TRAIN_SECONDS, then=signal.SIGINT).items():
        attempt(method, lambda method=method, said=said: tell_training(method, said))


def tell_training(method: str, said: str) -> None:
    report = json.loads(said.strip().splitlines()[-1])
    (STATE / method / "report.json").write_text(json.dumps(report))
    curve = " ".join(f"{each['seconds']:.0f}s {each['accept_length']:.2f}" for each in report["curve"])
    after = report["after"]["by_temperature"]
    lengths = " / ".join(f"{each['accept_length']:.2f}" for each in after.values())
    places = " ".join(f"{share:.2f}" for share in after["0"]["acceptance_per_position"])
    seconds = ", ".join(f"{name} {value:.0f}" for name, value in report["seconds"].items())
    say(f"{method}: accept length {report['accept_length_before']:.2f} -> {report['accept_length_after']:.2f} (T = 0 / "
        f"0.8: {lengths}), {report['steps']} steps, {report['tokens_per_second']:,.0f} tokens/s, of "
        f"{report['tokens']:,} tokens")  # fmt: skip
    say(f"  by place {places}; curve {curve}; {seconds}{'; to be resumed' if report['interrupted'] else ''}")


# figures


def drafters() -> dict[str, Path]:
    folders = {method: STATE / method for method in METHODS}
    return {method: folder for method, folder in folders.items() if (folder / "model.safetensors").exists()}


def measuring(name: str, named: dict[str, Path], *more: Any) -> list[str]:
    """A call of scripts/measure_drafters.py."""
    chosen = [part for method, folder in named.items() for part in ("--draft", f"{method}={folder}")]
    target = TARGET or str(_embedded())
    sizes = ["--limit", 4, "--max-tokens", 16, "--speed-tokens", 16, "--batches", "1,2"] if SMOKE else []
    return script(
        "measure_drafters.py", target, *tests(), *chosen, "--out", STATE / "figures" / name, "-k", K, *sizes, *more
    )


def tests() -> list[Path]:
    return TESTS or [STATE / "held-out.jsonl"]


def _embedded() -> Path:
    from outrider.pair import DEFAULT_DIRECTORY

    return DEFAULT_DIRECTORY / "target"


def judge(parts: Sequence[str]) -> None:
    """Accept lengths and proofs need no clock: all at once."""
    commands = {}
    for method, folder in drafters().items():
        for part in parts:
            quick = ["--quick"] if part == "proof" else []
            commands[f"{part}-{method}"] = measuring(f"{part}-{method}", {method: folder}, "--only", part, *quick)
    run_all(commands, 240)
    for method in drafters():
        for part in parts:
            attempt(f"{part} {method}", lambda method=method, part=part: tell_judged(method, part))


def tell_judged(method: str, part: str) -> None:
    found = figures(f"{part}-{method}")[part][method]
    if part == "proof":
        say(f"certify --exact {method}: {found['verdict']}, accepted {found['accepted']:,}, rejected "
            f"{found['rejected']:,}, {found['mismatches']} differ, {found['seconds']:.0f} s")  # fmt: skip
        return
    lengths = {name: [f"{each['accept_length']:.2f}" for each in at.values()] for name, at in found.items()}
    cells = [f"{name} {' / '.join(each)}" for name, each in lengths.items()]
    temperatures = " / ".join(next(iter(found.values())))
    say(f"accept length, K = {K}, T = {temperatures}: {method}: {'; '.join(cells)}")


def figures(name: str) -> dict[str, Any]:
    return json.loads((STATE / "figures" / name / "drafters.json").read_text())


def speed() -> None:
    short = ["--speed-batches", 1, "--runs", 1] if SMOKE else ["--speed-batches", 6, "--runs", 3, "--limit", 64]
    run_all({"speed": measuring("speed", drafters(), "--only", "speed", "--against", "", *short)}, 200, alone=True)
    for line in (STATE / "logs" / "speed.err").read_text(errors="replace").splitlines():
        if "left out" in line:
            say(line)
    tell_speed("speed")


def peers() -> None:
    """Beside one of our own drafters: it is plain decoding that they are compared with."""
    one = dict(list(drafters().items())[:1])
    short = (
        ["--speed-batches", 1, "--runs", 1]
        if SMOKE
        else ["--speed-batches", 1, "--runs", 2, "--batches", "1,8", "--limit", 8]
    )
    run_all({"peers": measuring("peers", one, "--only", "speed", *short)}, 240, alone=True)
    tell_speed("peers")


def tell_speed(name: str) -> None:
    for batch, sides in figures(name)["speed"].items():
        cells = [f"{side} {each['tokens_per_second']:,.0f} ({each['times_plain']['median']:.2f}"
                 + (f", {each['accept_length']:.2f} a round" if "accept_length" in each else "") + ")"
                 for side, each in sides.items()]  # fmt: skip
        say(f"{name}, batch {batch}, tokens/s (times plain): {'; '.join(cells)}")


def ablate() -> None:
    answered = [path for path in PROMPTS if '"answer"' in path.read_text()[:2000]] or PROMPTS[:1]
    data = answered or [STATE / "held-out.jsonl"]
    length = ["--minutes", ABLATE_MINUTES, "--generate-minutes", 0.05 if SMOKE else 0.6]
    sizes = SIZES if SMOKE else ["--row-len", 512, "--tokens-per-step", 8192]
    only = ["--only", "base,ce"] if SMOKE else []
    given = [part for path in data for part in ("--data", path)]
    target = ["--target", TARGET or _embedded()]
    folder = Path(tempfile.mkdtemp(dir=STATE))
    more = ["--", *sizes, "-k", 3]
    command = script("ablate_training.py", folder, *target, *given, *length, *only, *more)
    said = run_all({"ablate": command}, 60 * ABLATE_MINUTES + 240)["ablate"]
    (STATE / "ablations.md").write_text(said)
    for line in said.splitlines():
        say(line)


# what comes back


def packed(folder: Path) -> bytes:
    """A drafter with its card and its picture. Two bytes a number: the compressor is told so. A head that was not
    trained is left out: it is the target's, which then serves in its place."""
    from safetensors.torch import load_file, save

    buffer = io.BytesIO()
    weights = load_file(folder / "model.safetensors")
    weights.pop("lm_head.weight", None)
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        about, data = tarfile.TarInfo(f"{folder.name}/model.safetensors"), save(weights, {"format": "pt"})
        about.size = len(data)
        archive.addfile(about, io.BytesIO(data))
        for name in ("config.json", "training.json", "training.png", "README.md"):
            if (folder / name).exists():
                archive.add(folder / name, f"{folder.name}/{name}")
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 1, "lc": 0, "lp": 1, "pb": 1}]
    return lzma.compress(buffer.getvalue(), filters=filters)


def pack() -> None:
    """NAME.tar.xz, or where that is too large NAME.tar.xz.0 and so on: `cat` them together, and `tar xJ`."""
    OUT.mkdir(parents=True, exist_ok=True)
    known, sizes = drafters(), []
    with ProcessPoolExecutor(len(known) or 1) as pool:
        for method, data in zip(known, pool.map(packed, known.values()), strict=True):
            pieces = [data[begin : begin + PIECE] for begin in range(0, len(data), PIECE)]
            for number, piece in enumerate(pieces):
                (OUT / f"{method}.tar.xz{f'.{number}' if len(pieces) > 1 else ''}").write_bytes(piece)
            sizes.append(f"{method} {len(data) / 1e6:.1f} MB in {len(pieces)}")
    found: dict[str, Any] = {"training": {}, "figures": {}}
    for method in METHODS:
        path = STATE / method / "report.json"
        found["training"][method] = json.loads(path.read_text()) if path.exists() else None
    for path in sorted((STATE / "figures").glob("*/drafters.json")):
        found["figures"][path.parent.name] = json.loads(path.read_text())
    if (STATE / "ablations.md").exists():
        found["ablations"] = (STATE / "ablations.md").read_text()
    (OUT / "figures.json").write_text(json.dumps(found))
    say(f"packed: {', '.join(sizes)} pieces; figures.json {(OUT / 'figures.json').stat().st_size / 1e6:.2f} MB")


def unpack() -> None:
    """Drafters that an earlier call packed."""
    heads = os.environ.get("HEADS")
    for method in METHODS if heads else ():
        pieces = sorted(Path(heads or "").glob(f"{method}.tar.xz*"))
        if pieces and not (STATE / method).exists():
            data = lzma.decompress(b"".join(piece.read_bytes() for piece in pieces))
            with tarfile.open(fileobj=io.BytesIO(data)) as archive:
                archive.extractall(STATE / "heads", filter="data")


def main() -> None:
    chosen = sys.argv[1:] or ["texts", "train", "accept", "proof", "speed", "pack"]
    parts = {"texts": texts, "train": train, "speed": speed, "peers": peers, "ablate": ablate, "pack": pack}
    judged = [name for name in chosen if name in ("accept", "proof")]
    for name in chosen:
        if name in parts:
            attempt(name, parts[name])
        elif judged and name == judged[0]:
            attempt(" and ".join(judged), lambda: judge(judged))


if __name__ == "__main__":
    main()
