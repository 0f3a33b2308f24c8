"""The processes of a server, which come and go while one looks at them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence

import psutil


def family(pid: int) -> list[psutil.Process]:
    """All that it has started, and they have."""
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).children(recursive=True)
    return []


def named(processes: Sequence[psutil.Process], word: str) -> list[psutil.Process]:
    """Those alive whose command line has `word` in it."""
    return [each for each in processes if word in _command(each)]


def have_ended(processes: Sequence[psutil.Process], seconds: float) -> bool:
    """Whether all are gone soon; one that its parent has not buried is."""
    _, left = psutil.wait_procs(processes, timeout=seconds)
    return not any(_command(each) for each in left)


def _command(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.NoSuchProcess):  # or a zombie, which is one
        return " ".join(process.cmdline())
    return ""
