"""Log lines that a machine can read: one JSON object each, without anything that a user wrote."""

from __future__ import annotations

import json
import logging
import sys
import time
import traceback
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("outrider.server")

MAX_LIKE_LINES = 20  # warnings and faults that say the same, in so many seconds:
LIKE_SECONDS = 10.0
MAX_KINDS = 256  # of lines that are counted
MAX_FOREIGN = 2000  # characters of a line that a library wrote


def log(event: str, level: int = logging.INFO, **fields: Any) -> None:
    if logger.isEnabledFor(level):
        line = json.dumps({"time": round(time.time(), 3), "event": event, **fields})
        logger.log(level, line, extra={"kind": f"{event} {fields.get('error', '')}"})


def log_fault(reference: str, error: BaseException) -> None:
    trace = "".join(traceback.format_exception(error))
    log("fault", logging.ERROR, reference=reference, error=repr(error)[:500], traceback=trace[-8000:])


def log_to_stderr(*others: str) -> None:
    """For the command; as a library, the server leaves logging as it finds it. `others`: names of libraries whose
    loggers write there whatever their level lets through; of all libraries, warnings."""
    handler = LineHandler()
    for name in (logger.name, *others):
        each = logging.getLogger(name)
        each.handlers, each.propagate = [handler], False
    logger.setLevel(logging.INFO)
    logging.getLogger().handlers = [handler]  # of the libraries, warnings: uvicorn's among them
    logging.captureWarnings(True)


@dataclass
class _Kind:
    """Lines that say the same."""

    since: float
    count: int = 0


class LineHandler(logging.StreamHandler[Any]):
    """Writes to standard error. A line that cannot be written, as where the disk is full, is no reason to end; and what
    happens again and again is said so many times only, and then how often it was."""

    def __init__(self) -> None:
        super().__init__(sys.stderr)
        self._kinds: dict[str, _Kind] = {}

    def format(self, record: logging.LogRecord) -> str:
        if record.name == logger.name:
            return record.getMessage()
        said: dict[str, Any] = {"time": round(record.created, 3), "event": "library", "logger": record.name}
        said |= {"level": record.levelname.lower(), "message": record.getMessage()[:MAX_FOREIGN]}
        if record.exc_info:
            said["traceback"] = "".join(traceback.format_exception(*record.exc_info))[-8000:]
        return json.dumps(said)

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.WARNING and not self._is_new(record):
            return
        super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 (logging's name)
        pass

    def _is_new(self, record: logging.LogRecord) -> bool:
        name = getattr(record, "kind", None) or f"{record.name} {record.msg}"[:500]
        kind = self._kinds.get(name)
        if kind is None or time.monotonic() - kind.since > LIKE_SECONDS:
            if kind is not None and kind.count > MAX_LIKE_LINES:
                log("repeated", what=name[:200], times=kind.count - MAX_LIKE_LINES)
            if len(self._kinds) >= MAX_KINDS:
                self._kinds.clear()
            kind = self._kinds[name] = _Kind(time.monotonic())
        kind.count += 1
        return kind.count <= MAX_LIKE_LINES
