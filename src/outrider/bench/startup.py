"""`outrider bench startup`: seconds from starting a process to an engine that is ready, and to its first token, with
where they go. Cold: nothing is compiled yet. Warm: what the cold start has compiled is found."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from outrider import __version__
from outrider.bench.startup_child import FIRST_TOKEN, READY, STARTED
from outrider.config import EngineConfig

COLD, WARM = "cold", "warm"
# in the order in which they happen; what is left until the engine is ready is the rest
PARTS = ("interpreter", "imports", "models", "weights", "cache", "check-up", "warm-up")


@dataclass(frozen=True)
class Started:
    """One start of a process."""

    ready: float  # seconds from starting it until the engine is ready
    first_token: float  # and until its first token is there
    parts: dict[str, float]
    within_warm_up: dict[str, float]  # recordings of each part of a round, and compiling kernels for them
    num_recordings: int
    num_kernels: int  # compiled for a GPU until it was ready
    num_late_kernels: int  # and after that: the first request waited for them

    @property
    def rest(self) -> float:
        return self.ready - sum(self.parts.values())


@dataclass
class Starts:
    cold: list[Started] = field(default_factory=list)
    warm: list[Started] = field(default_factory=list)


def measure(config: EngineConfig, shape: str | None, num_runs: int, note: Callable[[str], None]) -> Starts:
    """Every run starts twice with an empty cache directory of its own: the first time it is cold."""
    found = Starts()
    for _ in range(num_runs):
        with tempfile.TemporaryDirectory() as cache:
            for name, starts in ((COLD, found.cold), (WARM, found.warm)):
                starts.append(start(config, shape, Path(cache)))
                made = starts[-1]
                note(f"{name}: ready after {made.ready:.1f} s, the first token after {made.first_token:.1f} s")
    return found


def start(config: EngineConfig, shape: str | None, cache: Path) -> Started:
    """Starts a process that opens this engine, with `cache` for whatever it compiles."""
    values = asdict(config) | {"model": str(config.model)}
    command = [sys.executable, "-m", "outrider.bench.startup_child", json.dumps({"config": values, "shape": shape})]
    with tempfile.TemporaryFile() as errors:
        begin, known = time.perf_counter(), _kernels(cache)
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=_environment(cache), text=True)
        try:
            events, num_kernels = _listen(process, begin, cache)
            if process.wait() != 0 or FIRST_TOKEN not in events:
                raise ValueError(f"the process did not start; it said: {_last_words(errors)}")
        finally:
            process.kill()
            process.wait()
    ready, said = events[READY]
    return Started(
        ready=ready,
        first_token=events[FIRST_TOKEN][0],
        parts={"interpreter": events[STARTED][0], **said["seconds"]},
        within_warm_up=said["within_warm_up"],
        num_recordings=said["num_recordings"],
        num_kernels=num_kernels - known,
        num_late_kernels=_kernels(cache) - num_kernels,
    )


def _listen(
    process: subprocess.Popen[str], begin: float, cache: Path
) -> tuple[dict[str, tuple[float, dict[str, Any]]], int]:
    """What the process says, with the time at which it came; and how many kernels there were when it was ready."""
    events: dict[str, tuple[float, dict[str, Any]]] = {}
    num_kernels = 0
    assert process.stdout is not None
    for line in process.stdout:
        now = time.perf_counter() - begin
        if line.startswith('{"event"'):
            said = json.loads(line)
            events[said["event"]] = (now, said)
            if said["event"] == READY:
                num_kernels = _kernels(cache)
    return events, num_kernels


def _environment(cache: Path) -> dict[str, str]:
    """Triton's cache and that of our own CPU kernels are in `cache`; checkpoints of the hub stay where they are."""
    from huggingface_hub.constants import HF_HOME

    return os.environ | {"TRITON_CACHE_DIR": str(cache / "triton"), "XDG_CACHE_HOME": str(cache), "HF_HOME": HF_HOME}


def _kernels(cache: Path) -> int:
    return len(list(cache.rglob("*.cubin")))


def _last_words(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode(errors="replace").splitlines()
    return " ".join(lines[-3:]) or "nothing"


# the report


def to_dict(setting: Mapping[str, Any], found: Starts) -> dict[str, Any]:
    return {
        "benchmark": "bench startup",
        **setting,
        "num_runs": len(found.cold),
        COLD: _medians(found.cold),
        WARM: _medians(found.warm),
        "versions": {"outrider": __version__},
    }


def _medians(starts: Sequence[Started]) -> dict[str, Any]:
    def median(values: Sequence[float]) -> float:
        return round(statistics.median(values), 3)

    last = starts[-1]
    return {
        "ready_seconds": median([each.ready for each in starts]),
        "first_token_seconds": median([each.first_token for each in starts]),
        "parts": {name: median([each.parts.get(name, 0.0) for each in starts]) for name in PARTS}
        | {"rest": median([each.rest for each in starts])},
        "within_warm_up": {
            name: median([each.within_warm_up[name] for each in starts]) for name in last.within_warm_up
        },
        "num_recordings": last.num_recordings,
        "num_kernels_compiled": last.num_kernels,
        "num_kernels_compiled_after_ready": last.num_late_kernels,
    }


def show_card(console: Console, report: Mapping[str, Any]) -> None:
    plural = "s" if report["num_runs"] != 1 else ""
    drafter = f" with drafter {report['drafter']}" if report["drafter"] is not None else ""
    head = f"bench startup: {report['model']}{drafter}, {report['device']}, {report['num_runs']} run{plural}"
    console.print(Text(head, "bold"), soft_wrap=True)
    table = Table(box=None, padding=(0, 1, 0, 0))
    for title in ("seconds", COLD, WARM):
        table.add_column(title, no_wrap=True, justify="left" if title == "seconds" else "right")
    cold, warm = report[COLD], report[WARM]
    for name in cold["parts"]:
        table.add_row(name, f"{cold['parts'][name]:.2f}", f"{warm['parts'][name]:.2f}")
        if name == "warm-up":
            for part, seconds in cold["within_warm_up"].items():
                table.add_row(f"  {part}", f"{seconds:.2f}", f"{warm['within_warm_up'][part]:.2f}", style="dim")
    for name, key in (("ready", "ready_seconds"), ("first token", "first_token_seconds")):
        table.add_row(name, f"{cold[key]:.2f}", f"{warm[key]:.2f}", style="bold")
    console.print(table)
    counted = f"{cold['num_recordings']} recordings; kernels compiled for a GPU: {cold['num_kernels_compiled']} "
    late = f"{cold['num_kernels_compiled_after_ready']} after it was ready"
    console.print(Text(f"{counted}cold, {warm['num_kernels_compiled']} warm, {late}"), soft_wrap=True)
