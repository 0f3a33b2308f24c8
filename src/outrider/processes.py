"""Processes that other processes have started."""

from __future__ import annotations

import multiprocessing
import os
import threading


def end_with_parent() -> None:
    """However the parent ends, and whatever is under way here: there is nobody left to work for."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        assert parent is not None
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, name="outrider-parent", daemon=True).start()
