"""What `outrider generate Hi` takes, from its start to the first text on standard output, and at most of memory.

    PYTHONPATH=src python scripts/measure_start.py [MODEL ...] [--runs 3]

Without a model, the embedded one. Memory is the process's peak; what it says of its weights at the start is taken off.
How busy the machine was stands beside it (processes that run or wait to, on average)."""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import time
from typing import Any

UNITS = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
COMMAND = [sys.executable, "-m", "outrider", "generate", "Hi", "--max-tokens", "16"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*")
    parser.add_argument("--runs", type=int, default=3)
    given = parser.parse_args()
    for model in given.models or [None]:
        runs = [run(model) for _ in range(given.runs)]
        best = min(runs, key=lambda found: found["first_token_s"])
        best |= {"peak_mb": max(found["peak_mb"] for found in runs)}
        best |= {"beyond_weights_mb": round(best["peak_mb"] - best["weights_mb"], 1), "model": model or "default"}
        print(json.dumps(best))


def run(model: str | None) -> dict[str, Any]:
    """One start, in megabytes (10^6) and seconds."""
    command, begin = [*COMMAND, *(["--model", model] if model else [])], time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stderr is not None
    process.stdout.read(1)
    first = time.perf_counter() - begin
    process.stdout.read()
    said = process.stderr.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    seconds, weights = time.perf_counter() - begin, re.search(r"weights ([\d.]+) (\wiB)", said)
    if status or weights is None:
        raise SystemExit(f"{' '.join(command)} failed: {said}")
    return {
        "first_token_s": round(first, 2),
        "seconds": round(seconds, 2),
        "peak_mb": round(usage.ru_maxrss * 1024 / 1e6, 1),
        "weights_mb": round(float(weights[1]) * UNITS[weights[2]] / 1e6, 1),
        "busy": round(os.getloadavg()[0], 1),
    }


if __name__ == "__main__":
    main()
