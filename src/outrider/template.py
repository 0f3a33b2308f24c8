"""Chat templates come with models, so they are foreign code: they run in a sandbox (template_worker.py, which alone
needs jinja2), in a process of their own that is killed when it takes too long and that cannot fill the memory."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

WORKER = Path(__file__).with_name("template_worker.py")
MAX_SECONDS = 5.0  # for one rendering; they take about a millisecond
START_SECONDS = 60.0  # for the process to come up, on a machine that is busy

# Only what Python itself may need and what decides the time of day: no key, no path, no setting of the parent's.
_INHERITED = ("TZ", "LANG", "LC_ALL", "LD_LIBRARY_PATH", "SYSTEMROOT")
_LAUNCH = "import runpy, sys; sys.path += sys.argv[2:]; runpy.run_path(sys.argv[1], run_name='__main__')"


class TemplateError(ValueError):
    """A template does not parse (`is_source`), failed on what it was given, or was not tried at all (`is_busy`)."""

    def __init__(self, reason: str, is_source: bool = False, is_busy: bool = False) -> None:
        super().__init__(reason)
        self.is_source, self.is_busy = is_source, is_busy


class Templates:
    """Renders the templates of one model, one after the other. The process starts with the first, and again after it
    had to be killed."""

    def __init__(self, sources: Mapping[str, str], max_len: int, seconds: float = MAX_SECONDS) -> None:
        self._sources, self._max_len, self._seconds = dict(sources), max_len, seconds
        self._lock = threading.Lock()
        self._worker: subprocess.Popen[bytes] | None = None
        self._end_worker: Callable[[], object] = lambda: None  # at the latest when this object goes

    def render(self, name: str, variables: Mapping[str, Any]) -> str:
        """Variables are data: what JSON can hold."""
        question = json.dumps([name, variables], default=_plain).encode()
        if not self._lock.acquire(timeout=self._seconds):
            raise TemplateError("other conversations take too long in the chat template", is_busy=True)
        try:
            return _text_of(self._ask(question))
        finally:
            self._lock.release()

    def _ask(self, question: bytes) -> Any:
        if self._worker is None:
            self._worker = self._start()
        try:
            return _exchange(self._worker, question, self._seconds)
        except (OSError, ValueError):  # a broken pipe, or half an answer
            self._end_worker()
            self._worker = None
            raise TemplateError(f"it took more than {self._seconds:g} seconds, or too much memory") from None

    def _start(self) -> subprocess.Popen[bytes]:
        origins = [spec.origin for spec in map(find_spec, ("jinja2", "markupsafe")) if spec is not None]
        places = {str(Path(origin).parent.parent) for origin in origins if origin is not None}
        worker = subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", _LAUNCH, str(WORKER), *sorted(places)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={name: os.environ[name] for name in _INHERITED if name in os.environ},
        )
        self._end_worker = weakref.finalize(self, _end, worker)
        try:
            ready = _exchange(worker, json.dumps([self._sources, self._max_len]).encode(), START_SECONDS)
        except (OSError, ValueError):
            self._end_worker()
            raise TemplateError("the process for chat templates did not come up", is_busy=True) from None
        if ready is not None:
            self._end_worker()
            raise TemplateError(ready, is_source=True)
        return worker


def _text_of(answer: Any) -> str:
    text, reason = answer
    if text is None:
        raise TemplateError(reason)
    return text


def _exchange(worker: subprocess.Popen[bytes], question: bytes, seconds: float) -> Any:
    """One line to the worker, one line back. Killing it ends both the writing and the reading."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    guard = threading.Timer(seconds, worker.kill)
    guard.start()
    try:
        worker.stdin.write(question + b"\n")
        worker.stdin.flush()
        return json.loads(worker.stdout.readline())
    finally:
        guard.cancel()


def _end(worker: subprocess.Popen[bytes]) -> None:
    worker.kill()
    worker.wait()
    for pipe in (worker.stdin, worker.stdout):
        assert pipe is not None
        with contextlib.suppress(OSError):  # what was not sent will not be
            pipe.close()


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"a chat template cannot be given a {type(value).__name__}: only what JSON can hold")
