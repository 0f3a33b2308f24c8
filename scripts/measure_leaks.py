"""Starts and stops engines of several processes, and counts what is left: processes, threads, file handles, sockets,
files in /dev/shm and the temporary folder, memory. Every tenth is ended by killing a rank. Status 1 if anything grows.

    python scripts/measure_leaks.py --starts 200
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import tempfile
import time
from pathlib import Path

import psutil

from outrider import LLM, SamplingParams
from outrider.engine.team import RankLostError

SHARED = Path("/dev/shm")
MARKS = ("outrider", "torch", "gloo", "sem.", "psm_", "pymp")  # of files there that we, or what we use, might leave
WARM = 5  # starts after which everything that is kept for good should be there
MIB_A_START = 0.1  # memory that may come with each: allocators keep some


def files() -> set[str]:
    """The temporary folder is ours alone; of what all programs share, what may be ours."""
    own = list(Path(tempfile.gettempdir()).iterdir())
    return {str(path) for path in own + [path for path in SHARED.glob("*") if path.name.startswith(MARKS)]}


def counts(known: set[str]) -> dict[str, float]:
    own = psutil.Process()
    return {
        "processes": len(own.children(recursive=True)),
        "threads": own.num_threads(),
        "handles": own.num_fds(),
        "sockets": len(own.net_connections(kind="all")),
        "files": len(files() - known),
        "mib": round(own.memory_info().rss / 2**20, 1),
    }


def start_and_stop(number: int, sizes: dict[str, int]) -> None:
    llm = LLM(max_model_len=256, max_num_seqs=2, threads=1, **sizes)
    answer = llm.generate("Once upon a time", SamplingParams(max_tokens=8, temperature=0))
    assert len(answer[0].outputs[0].token_ids) == 8
    if number % 10 == 9:
        (first, *_) = psutil.Process().children()
        os.kill(first.pid, signal.SIGKILL)
        try:
            while True:
                llm.generate("Once upon a time", SamplingParams(max_tokens=64, temperature=0))
        except RankLostError:
            pass
    llm.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--starts", type=int, default=200)
    parser.add_argument("--tensor-parallel-size", type=int, default=2)
    parser.add_argument("--pipeline-parallel-size", type=int, default=1)
    given = parser.parse_args()
    sizes = {
        "tensor_parallel_size": given.tensor_parallel_size,
        "pipeline_parallel_size": given.pipeline_parallel_size,
    }
    tempfile.tempdir = os.environ["TMPDIR"] = tempfile.mkdtemp(prefix="measure-leaks-")
    known, begin = files(), time.monotonic()
    warm: dict[str, float] = {}
    for number in range(given.starts):
        start_and_stop(number, sizes)
        found = counts(known)
        warm = warm or (found if number + 1 == WARM else {})
        if (number + 1) % 10 == 0 or number + 1 in (1, WARM):
            print(json.dumps({"starts": number + 1, "seconds": round(time.monotonic() - begin), **found}), flush=True)
    grown = {name: round(found[name] - warm[name], 1) for name in warm}
    print(json.dumps({"grown since start": WARM, **grown}))
    shutil.rmtree(tempfile.gettempdir())
    allowed = {"mib": MIB_A_START * given.starts}
    raise SystemExit(int(any(value > allowed.get(name, 0) for name, value in grown.items())))


if __name__ == "__main__":
    main()
