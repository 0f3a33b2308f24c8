"""Renders the chat templates of one model, in a process of its own: see template.py. It is run as a file, and needs
jinja2 alone."""

import json
import sys
from datetime import datetime
from typing import IO, Any, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_MEMORY = 2 * 2**30  # address space of the process


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
