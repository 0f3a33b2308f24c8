"""Log lines that a machine can read: one JSON object each, without anything that a user wrote."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from typing import Any

logger = logging.getLogger("outrider.server")


def log(event: str, level: int = logging.INFO, **fields: Any) -> None:
    if logger.isEnabledFor(level):
        logger.log(level, json.dumps({"time": round(time.time(), 3), "event": event, **fields}))


def log_fault(reference: str, error: BaseException) -> None:
    trace = "".join(traceback.format_exception(error))
    log("fault", logging.ERROR, reference=reference, error=repr(error)[:500], traceback=trace[-8000:])


def log_to_stderr(*others: str) -> None:
    """For the command; as a library, the server leaves logging as it finds it. `others`: names of libraries whose
    loggers write there as well, whatever their level lets through."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(message)s"))
    for name in (logger.name, *others):
        each = logging.getLogger(name)
        each.handlers, each.propagate = [handler], False
    logger.setLevel(logging.INFO)
