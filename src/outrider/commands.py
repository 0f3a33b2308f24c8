"""How commands are declared. Options that several commands share are dataclasses: every field becomes an option of its
own. Help is plain text in groups, which reads well at 80 columns: no name is ever cut off."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import wraps
from typing import Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

ARGUMENTS, OTHERS = "Arguments", "Options"


def option(group: str, *names: str, **settings: Any) -> Any:
    """An option that the help shows under `group`."""
    return typer.Option(*names, rich_help_panel=group, **settings)


def takes_options(function: Callable[..., None]) -> Callable[..., None]:
    """A command whose parameters may be dataclasses of options: they are taken apart for the command line, and put
    together again for the function."""
    groups: dict[str, type[Any]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        if is_dataclass(parameter.annotation):
            assert isinstance(parameter.annotation, type)
            groups[parameter.name] = parameter.annotation
            parameters += _parameters(parameter.annotation)
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @wraps(function)
    def command(**given: Any) -> None:
        built = {
            name: kind(**{each.name: given.pop(each.name) for each in fields(kind)}) for name, kind in groups.items()
        }
        function(**given, **built)

    command.__annotations__ = {each.name: each.annotation for each in parameters}
    vars(command)["__signature__"] = inspect.Signature(parameters)
    return command


def _parameters(kind: type[Any]) -> list[inspect.Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        inspect.Parameter(
            each.name, inspect.Parameter.KEYWORD_ONLY, default=_default(each), annotation=hints[each.name]
        )
        for each in fields(kind)
    ]


def _default(each: Field[Any]) -> Any:
    assert each.default is not MISSING, f"option {each.name} needs a default"
    return each.default


class Command(TyperCommand):
    """Shows its options by the groups that they were declared in."""

    def format_options(self, ctx: Any, formatter: Any) -> None:
        sections: dict[str, list[tuple[str, str]]] = {ARGUMENTS: [], OTHERS: []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            name, text = record
            if parameter.param_type_name == "argument":
                sections[ARGUMENTS].append((name.split()[0], text))
            else:
                group = vars(parameter).get("rich_help_panel") or OTHERS
                sections.setdefault(group, []).append((name, text))
        for title, rows in sections.items():
            if rows:
                with formatter.section(title):
                    formatter.write_dl(rows)


class Group(TyperGroup):
    """Sub-commands, of which each is a `Command`."""


def add(app: typer.Typer, name: str, function: Callable[..., None], kind: type[Command] = Command) -> None:
    """Adds a command to a group of commands."""
    app.command(name, cls=kind)(takes_options(function))


_SIZES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def size(text: str) -> int:
    """4096, 4k (thousands) or 4K (of 1024); m and M, g and G, t and T."""
    number, unit = (text[:-1], _SIZES[text[-1]]) if text[-1:] in _SIZES else (text, 1)
    try:
        found = float(number) * unit
        if found != int(found) or found < 1:
            raise ValueError
    except (ValueError, OverflowError):
        raise ValueError(f"{text!r} is no size: write 4096, 4k, 4K, 1.5G") from None
    return int(number) * unit if number.isdigit() else int(found)


def length(text: str) -> int | None:
    """A size, or what the model allows."""
    return None if text in ("auto", "-1") else size(text)
