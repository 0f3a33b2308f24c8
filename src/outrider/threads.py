"""How many threads compute on a CPU: all processors, less those that other programs keep busy.

Threads of one operation wait for each other at its end. Where another program takes a processor, one of them is late
every time, and two threads are several times slower than one. So the number follows what the machine has to spare. It
is torch's number, which its own operations and the native kernels both obey; results do not depend on it."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

INTERVAL = 0.5  # seconds between two looks at the machine
TOLERATED = 0.25  # processors that others may take before a thread is given up
PROC_STAT, PROC_LOAD, CPU_MAX = Path("/proc/stat"), Path("/proc/loadavg"), Path("/sys/fs/cgroup/cpu.max")
_IDLE_COLUMNS = (3, 4)  # of /proc/stat: idle, and waiting for a disk
_GUEST_COLUMN = 8  # this and the next are counted in the first ones already


@dataclass(frozen=True)
class Usage:
    """Seconds of processor time up to a moment: of all programs on our processors, and of this one."""

    moment: float
    everybody: float
    own: float

    def others_since(self, before: Usage) -> float:
        """How many processors other programs kept busy, on average."""
        used = (self.everybody - before.everybody) - (self.own - before.own)
        return max(used / max(self.moment - before.moment, 1e-9), 0.0)


def current_usage() -> Usage | None:
    """How busy the machine is; None where the system does not say what others use."""
    if sys.platform != "linux":
        return None
    try:
        table = PROC_STAT.read_text()
    except OSError:
        return None
    return Usage(time.monotonic(), busy_seconds(table, os.sched_getaffinity(0)), time.process_time())


def busy_seconds(table: str, processors: set[int]) -> float:
    """Processor time in /proc/stat that was not idle, of these processors."""
    ticks = 0
    for line in table.splitlines():
        name, *columns = line.split() or [""]
        if name.startswith("cpu") and name[3:].isdigit() and int(name[3:]) in processors:
            counts = [int(column) for column in columns[:_GUEST_COLUMN]]
            ticks += sum(count for column, count in enumerate(counts) if column not in _IDLE_COLUMNS)
    return ticks / os.sysconf("SC_CLK_TCK")


def allowed_processors() -> int | None:
    """How many a container may use at a time, or None where nothing limits it."""
    try:
        quota, period = CPU_MAX.read_text().split()
        return None if quota == "max" else max(int(quota) // int(period), 1)
    except (OSError, ValueError):
        return None


def current_load() -> float:
    """How many processors others seem to use, before there was time to measure it: threads that would run now, if the
    last minute says so too."""
    try:
        minute, _, _, running, *_ = PROC_LOAD.read_text().replace("/", " ").split()
        return max(min(float(minute), float(running) - 1), 0.0)  # one is this
    except (OSError, ValueError):
        return 0.0


def spare_threads(most: int, others: float) -> int:
    """How many of `most` threads find a processor of their own while others use so many."""
    return max(1, min(most, int(most - others + TOLERATED)))


class Threads:
    """The number of threads of this process. It follows the machine until somebody sets it."""

    def __init__(self) -> None:
        self._most: int | None = None  # None: not looked yet
        self._chosen: int | None = None  # by us; None: somebody has said how many
        self._usage: Usage | None = None

    def adapt(self) -> None:
        """From now on as many as there are to spare, at most what torch was going to use."""
        if self._most is not None:
            return
        limit = allowed_processors()
        now = torch.get_num_threads()
        self._most = now if limit is None else min(now, limit)
        self._chosen = spare_threads(self._most, current_load())
        self._usage = current_usage()
        if self._chosen != now:
            torch.set_num_threads(self._chosen)

    def fix(self, count: int) -> None:
        """Fixes the number of threads, whatever the machine does."""
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ValueError(f"threads must be a whole number of at least 1, not {count!r}")
        torch.set_num_threads(count)
        self._most, self._chosen = count, None

    @property
    def is_fixed(self) -> bool:
        """Whether somebody has said how many."""
        return self._most is not None and self._chosen is None

    def adjust(self) -> None:
        """Called before every pass: looks at the machine now and then. What somebody else has set, stays."""
        before = self._usage
        if self._chosen is None or before is None or time.monotonic() - before.moment < INTERVAL:
            return
        now = current_usage()
        if now is None or torch.get_num_threads() != self._chosen:
            return
        assert self._most is not None
        self._usage = now
        wanted = spare_threads(self._most, now.others_since(before))
        if wanted != self._chosen:
            torch.set_num_threads(wanted)
            self._chosen = wanted


threads = Threads()  # one, as torch's number is the process's
