"""Chat templates come with models, so they are foreign code: they run in a sandbox, in a process of their own that is
killed when it takes too long and that cannot fill the memory. This file is both ends; the worker needs jinja2 alone."""

import contextlib
import json
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import IO, Any, NoReturn

import jinja2
import markupsafe
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SECONDS = 5.0  # for one rendering; they take about a millisecond
START_SECONDS = 60.0  # for the process to come up, on a machine that is busy
MAX_MEMORY = 2 * 2**30  # address space of the process

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
        places = {str(Path(module.__file__ or "").parent.parent) for module in (jinja2, markupsafe)}
        worker = subprocess.Popen(
            [sys.executable, "-I", "-B", "-c", _LAUNCH, __file__, *sorted(places)],
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


# the worker


def work(questions: IO[bytes], answers: IO[bytes]) -> None:
    """Sources first, then one rendering after the other until the other end is closed."""
    sources, max_len = json.loads(questions.readline())
    environment = template_environment()
    try:
        templates = {name: environment.from_string(source) for name, source in sources.items()}
    except Exception as error:
        return _answer(answers, f"{type(error).__name__}: {error}")
    _answer(answers, None)
    for question in questions:
        try:
            name, variables = json.loads(question)
            text = _written(templates[name], variables, max_len)
        except Exception as error:  # whatever a template raises is its own affair
            _answer(answers, [None, f"{type(error).__name__}: {error}"[:1000]])
        else:
            _answer(answers, [text, None])
    return None


def _answer(answers: IO[bytes], content: Any) -> None:
    answers.write(json.dumps(content).encode() + b"\n")
    answers.flush()


def _written(template: jinja2.Template, variables: dict[str, Any], max_len: int) -> str:
    pieces: list[str] = []
    length = 0
    for piece in template.generate(variables):
        pieces.append(piece)
        length += len(piece)
        if length > max_len:
            raise ValueError(f"it wrote more than {max_len} characters")
    return "".join(pieces)


def _confine() -> None:
    """Should a template get out of the sandbox as well, it can write no file, start no process (but as root), and fill
    no memory."""
    try:
        import resource
    except ImportError:  # not on Windows
        return
    limits = {"AS": MAX_MEMORY, "FSIZE": 0, "NPROC": 0, "CORE": 0, "NOFILE": 16}
    for name, value in limits.items():
        limit = getattr(resource, f"RLIMIT_{name}")
        _, hard = resource.getrlimit(limit)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        try:
            resource.setrlimit(limit, (value, value))
        except (OSError, ValueError):  # a system that does not know this one; time is limited all the same
            continue


class _GenerationBlock(Extension):
    """{% generation %} marks the assistant's words for training; for a prompt it is only a scope."""

    tags = {"generation"}  # noqa: RUF012 (declared so by jinja2)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


def template_environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML, which models were not trained on.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


if __name__ == "__main__":
    _confine()
    work(sys.stdin.buffer, sys.stdout.buffer)
