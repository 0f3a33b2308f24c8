"""The command line of `outrider serve`, as users of vLLM write it: flags from a file, names with underscores, flags
that mean nothing here. What is left of it is our own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from outrider.commands import Command
from outrider.compatibility.flags import SERVE, SHORT, SWITCHES

CONFIG, NAMES = "--config", "--served-model-name"


class ServeCommand(Command):
    """Settles what is not ours before click sees it."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        own = {
            name: not getattr(parameter, "is_flag", False)
            for parameter in self.params
            if parameter.param_type_name == "option"
            for name in (*parameter.opts, *parameter.secondary_opts)
        }
        own |= dict.fromkeys(ctx.help_option_names, False)
        return super().parse_args(ctx, settle_arguments(args, own))


def settle_arguments(arguments: Sequence[str], own: Mapping[str, bool]) -> list[str]:
    """The arguments for our own options (`own`: name -> whether it takes a value). All that is refused or unknown, also
    in a --config file, is named in one ValueError."""
    line = _Line(own)
    line.read(arguments)
    if line.config is not None:
        known = {*line.named, *(("--model",) if line.positional else ())}
        line.read(arguments_of(line.config, known, own))
    SERVE.settle(line.foreign, "outrider serve", own)
    return [*line.kept, *line.positional]


class _Line:
    def __init__(self, own: Mapping[str, bool]) -> None:
        self.kept: list[str] = []  # our options, with their values
        self.positional: list[str] = []
        self.named: set[str] = set()  # flags that were given
        self.foreign: dict[str, Any] = {}
        self.config: str | None = None
        self._own = own

    def read(self, arguments: Sequence[str]) -> None:
        left = list(arguments)
        while left:
            first = left.pop(0)
            if not first.startswith("-") or first == "-":
                self.positional.append(first)
                continue
            name, has_value, value = first.partition("=")
            name = SHORT.get(name, name)
            name = name.replace("_", "-") if name.startswith("--") else name
            self.named.add(name)
            if name == CONFIG:
                self.config = value if has_value else _next(left, name)
            elif name in self._own or not name.startswith("--"):
                self._keep(name, has_value, value, left)
            else:
                self._set_aside(name, value if has_value else None, left)

    def _keep(self, name: str, has_value: str, value: str, left: list[str]) -> None:
        if has_value:
            self.kept.append(f"{name}={value}")
        elif not self._own.get(name, False):
            self.kept.append(name)
        else:
            self.kept += [name, _next(left, name)]
            while name == NAMES and left and not left[0].startswith("-") and self._has_model:
                self.kept += [name, left.pop(0)]  # several names, as vLLM takes them

    @property
    def _has_model(self) -> bool:
        return bool(self.positional) or not {"--model", "-m"}.isdisjoint(self.named)

    def _set_aside(self, name: str, value: str | None, left: list[str]) -> None:
        positive = f"--{name.removeprefix('--no-')}" if name.startswith("--no-") else name
        if value is None and name in SWITCHES:
            self.foreign[name] = True
        elif value is None and name != positive and positive in SWITCHES:
            self.foreign[positive] = False
        elif value is None and name in SERVE.names():
            self.foreign[name] = _value(_next(left, name))
        else:
            self.foreign[name] = None if value is None else _value(value)


def _next(left: list[str], name: str) -> str:
    if not left:
        raise ValueError(f"{name} needs a value")
    return left.pop(0)


def _value(text: str) -> Any:
    """What a text on the command line means, where that is no text."""
    try:
        return json.loads(text)
    except ValueError:
        return {"true": True, "false": False, "none": None}.get(text.lower(), text)


def arguments_of(file: str, known: set[str], own: Mapping[str, bool]) -> list[str]:
    """What a YAML file of flags says, as arguments; without `known` flags, which were given already."""
    import yaml

    path = Path(file).expanduser()
    if not path.is_file():
        raise ValueError(f"--config {file}: there is no such file")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"--config {file} is not valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(content, dict):
        raise ValueError(f"--config {file} must hold flags and their values, as in `port: 8000`")
    arguments: list[str] = []
    for key, value in content.items():
        name = "--" + str(key).replace("_", "-").removeprefix("--")
        name = "--model" if name == "--model-tag" else name
        if name not in known and f"--no-{name[2:]}" not in known and value is not None:
            arguments += _arguments(name, value, own)
    return arguments


def _arguments(name: str, value: Any, own: Mapping[str, bool]) -> list[str]:
    if isinstance(value, bool) and own.get(name) is False:  # a flag of ours
        return [name] if value else [f"--no-{name[2:]}"] * (f"--no-{name[2:]}" in own)
    if isinstance(value, list) and own.get(name) and name != "--allowed-origins":
        return [part for each in value for part in (name, str(each))]
    written = value if isinstance(value, str) else json.dumps(value)
    return [f"{name}={written}"]
