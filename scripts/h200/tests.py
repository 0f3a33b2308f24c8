"""The tests that need a GPU, many at a time: most of what they take is compiling, for which each process has a core.

    PYTHONPATH=src python scripts/h200/tests.py [--seconds 540] [--beside 14] [--at-a-time 2] [WORD...]

Tests whose names hold one of the words (none: all that are marked `gpu`), some to a process; then files of kernels'
tests that hold one (`kernels`: all of them), which run on a GPU where there is one. A line for each process as it ends,
those that failed with their last lines; what is not over in time is named, and has failed too. On an H200 with an empty
cache of kernels a test of recorded rounds takes more than a minute and a half, all of it compiling; kernels stay in
Triton's cache, so a second call on the same machine goes on where the first one was."""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common import say

HERE = Path(__file__).resolve().parents[2]
PYTEST = [sys.executable, "-m", "pytest", "-q", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:xdist"]
# what takes longest begins first
FIRST = ("test_gpu_rounds", "test_gpu_fuzz", "test_gpu_server", "test_gpu_training", "test_gpu_reuse")


@dataclass
class Run:
    names: Sequence[str]
    log: Path = field(default_factory=lambda: Path(tempfile.mkstemp()[1]))
    begin: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        with self.log.open("w") as log:
            command = [*PYTEST, *(["-m", "gpu"] if "::" in self.names[0] else []), *self.names]
            self.process = subprocess.Popen(command, cwd=HERE, stdout=log, stderr=subprocess.STDOUT)

    def tell(self, *, in_time: bool = True) -> dict[str, int]:
        """How many tests ended how."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        counts = {
            word: int(count)
            for count, word in re.findall(r"(\d+) (passed|failed|skipped|error)", lines[-1] if lines else "")
        }
        dots = (
            ""
            if in_time
            else f"; {''.join(line.split(' ')[0] for line in lines if set(line) <= set('.sFEx [%]0123456789'))}"
        )
        said = ", ".join(f"{count} {word}" for word, count in counts.items()) or (
            "not over" if not in_time else "ended"
        )
        say(f"{said}{dots} after {time.monotonic() - self.begin:.0f} s: {' '.join(self.names)[:200]}")
        if self.process.returncode not in (0, 5) and in_time:
            for line in [line for line in lines if line.startswith(("E  ", "FAILED", "ERROR"))][:6] or lines[-3:]:
                say(f"    {line[:180]}")
        return counts


def collected(words: Sequence[str]) -> list[str]:
    done = subprocess.run([*PYTEST, "-m", "gpu", "--collect-only", "tests"], cwd=HERE, capture_output=True, text=True)
    names = [line for line in done.stdout.splitlines() if "::" in line]
    if not names:
        say(f"nothing was collected: {done.stdout[-300:]} {done.stderr[-300:]}")
    found = [name for name in names if not words or any(word in name for word in words)]
    return sorted(found, key=lambda name: next((n for n, word in enumerate(FIRST) if word in name), len(FIRST)))


def kernels(words: Sequence[str]) -> list[str]:
    files = sorted(str(path.relative_to(HERE)) for path in (HERE / "tests" / "kernels").glob("test_*.py"))
    return [file for file in files if any(word in file for word in words)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--seconds", type=float, default=540)
    parser.add_argument("--beside", type=int, default=min(14, os.cpu_count() or 1), help="processes at a time")
    parser.add_argument("--at-a-time", type=int, default=2, help="tests of a process")
    given = parser.parse_args()
    end = time.monotonic() + given.seconds
    tests = collected(given.words)
    waiting = [tests[n : n + given.at_a_time] for n in range(0, len(tests), given.at_a_time)]
    waiting += [[file] for file in kernels(given.words)]
    say(f"{len(tests)} tests marked gpu and {len(waiting) - -(-len(tests) // given.at_a_time)} files of kernels")
    running: list[Run] = []
    total: dict[str, int] = {}
    while (waiting or running) and time.monotonic() < end:
        while waiting and len(running) < given.beside:
            running.append(Run(waiting.pop(0)))
        time.sleep(0.2)
        for run in [run for run in running if run.process.poll() is not None]:
            running.remove(run)
            for word, count in run.tell().items():
                total[word] = total.get(word, 0) + count
    for run in running:
        run.process.kill()
        run.process.wait()
        run.tell(in_time=False)
    left = sum(map(len, [*waiting, *(run.names for run in running)]))
    say(", ".join(f"{count} {word}" for word, count in total.items()) + (f"; {left} not over in time" if left else ""))
    sys.exit(bool(left or total.get("failed") or total.get("error") or not total))


if __name__ == "__main__":
    main()
