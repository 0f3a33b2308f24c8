"""A call that must come: a form of tool calls as a structural tag, which a grammar then holds the model to.
Markers that are special tokens are asked for by their ids: text that only looks like one would be no marker."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.tokenizer import Tokenizer

Format = dict[str, Any]
PLAIN_NAME = re.compile(r"[\w.:/-]{1,64}", re.ASCII)


@dataclass(frozen=True)
class WantedCalls:
    """Calls of some of these tools: exactly one, or one and more."""

    tools: Mapping[str, Mapping[str, Any] | None]  # name -> JSON schema of the arguments
    several: bool
    special_ids: Mapping[str, int]  # markers that are special tokens
    template: str  # the chat template, where a form has dialects

    def __post_init__(self) -> None:
        for name in self.tools:
            if not PLAIN_NAME.fullmatch(name):
                raise ValueError(f"the tool name {name[:64]!r} is not made of 1 to 64 of A-Z a-z 0-9 _ - . : /")

    def mark(self, text: str) -> Format:
        id = self.special_ids.get(text)
        return literal(text) if id is None else {"type": "token", "token": id}

    def listed(self, tags: Sequence[Format], separator: str) -> Format:
        how = {"separator": separator, "at_least_one": True, "stop_after_first": not self.several}
        return {"type": "tags_with_separator", "tags": tags, **how}

    def arguments(self, name: str) -> Format:
        schema = dict(self.tools[name] or {})
        if not schema.keys() & {"$ref", "anyOf", "oneOf", "allOf", "enum", "const"}:
            schema.setdefault("type", "object")
        return {"type": "json_schema", "json_schema": schema}


def special_ids(tokenizer: Tokenizer | None, marks: Iterable[str]) -> dict[str, int]:
    found = {mark: tokenizer.special_id(mark) for mark in marks} if tokenizer is not None else {}
    return {mark: id for mark, id in found.items() if id is not None}


def literal(text: str) -> Format:
    return {"type": "const_string", "value": text}


def sequence(*parts: Format) -> Format:
    return {"type": "sequence", "elements": list(parts)}


def tag(begin: Format, content: Format, end: Format) -> Format:
    """A structural tag's text, which stands as it is."""
    begin, end = (each["value"] if each["type"] == "const_string" else each for each in (begin, end))
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def json_call(wanted: WantedCalls, name: str, key: str) -> Format:
    """`{"name": ..., KEY: {...}}`"""
    begin = f'{{"name": {json.dumps(name)}, "{key}": '
    return tag(literal(begin), wanted.arguments(name), literal("}"))
