"""Qwen3-Coder and Qwen3.5: `<tool_call><function=name><parameter=key>value</parameter></function></tool_call>`.
Values are plain text, of the type that the tool's schema says; they become the JSON object that clients expect."""

import json
from collections.abc import Mapping
from typing import Any

from outrider.server.parsers.base import MalformedError, Steps
from outrider.server.parsers.forced import Format, WantedCalls, literal, sequence, tag
from outrider.server.parsers.tool_calls import SPACES, ToolParser, tool_parsers

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FUNCTION, FUNCTION_END = "<function=", "</function>"
PARAMETER, PARAMETER_END = "<parameter=", "</parameter>"
_ENDS = ("\n" + PARAMETER_END, PARAMETER_END)  # the line end before the tag is no part of the value
_JSON_TYPES = {"integer", "number", "boolean", "null", "array", "object"}
_DECIDING = {"anyOf", "oneOf", "allOf", "enum", "const", "$ref"}  # may mean any type
_OPEN_TYPES = ["string", *sorted(_JSON_TYPES)]


@tool_parsers.register("qwen3_coder", "qwen3_xml")
class QwenXmlParser(ToolParser):
    markers = (OPEN, FUNCTION)  # models forget the outer tag
    marks = (OPEN, CLOSE)

    @classmethod
    def forced(cls, wanted: WantedCalls) -> Format:
        calls = []
        for name in wanted.tools:
            parameters = {**wanted.arguments(name), "style": "qwen_xml"}
            inner = sequence(literal(f"\n{FUNCTION}{name}>\n"), parameters, literal(f"\n{FUNCTION_END}\n"))
            calls.append(tag(wanted.mark(OPEN), inner, wanted.mark(CLOSE)))
        return wanted.listed(calls, "\n")

    def calls(self, marker: str) -> Steps:
        if marker == OPEN:
            yield from self.skip(SPACES)
            if not (yield from self.expect(FUNCTION)):
                raise MalformedError
        name = yield from self.plain_name()
        if not name or self.char != ">":
            raise MalformedError
        yield from self.hold()
        self.begin(name)
        self.say(self.index, "{")
        yield from self.parameters(name)
        self.say(self.index, "}")
        self.end(closed=True)
        yield from self.skip(SPACES)
        if (yield from self.expect(CLOSE)):
            self.drop()

    def parameters(self, function: str) -> Steps:
        separator = ""
        while True:
            yield from self.skip(SPACES)
            found = yield from self.expect(PARAMETER, FUNCTION_END)
            if not found:
                raise MalformedError
            if found == FUNCTION_END:
                self.drop()
                return
            yield from self.parameter(function, separator)
            separator = ", "

    def parameter(self, function: str, separator: str) -> Steps:
        start = self.num_held
        while self.char and self.char not in ">\n":
            yield from self.hold()
        key = self.held_since(start)
        if self.char != ">":
            raise MalformedError
        yield from self.hold()
        if self.char == "\n":
            yield from self.hold()
        self.drop()
        self.say(self.index, f"{separator}{json.dumps(key, ensure_ascii=False)}: ")
        if _is_text(self.schema_of(function), key):
            yield from self.text_value()
        else:
            yield from self.json_value()

    def text_value(self) -> Steps:
        """Passed on as it comes: a file that is written may be long."""
        self.say(self.index, '"')
        tail = ""
        while self.char:
            tail += self.char
            while tail and not any(end.startswith(tail) for end in _ENDS):
                self.say(self.index, _escaped(tail[0]))
                tail = tail[1:]
            yield from self.advance()
            if tail in _ENDS:
                self.say(self.index, '"')
                return
        self.say(self.index, _escaped(tail))
        raise MalformedError

    def json_value(self) -> Steps:
        """Known only once it is whole: what is no JSON after all is text."""
        start, tail = self.num_held, ""
        while tail != PARAMETER_END:
            if not self.char:
                raise MalformedError
            tail = (tail + self.char)[-len(PARAMETER_END) :]
            yield from self.hold()
        text = self.held_since(start).removesuffix(PARAMETER_END).removesuffix("\n")
        self.drop()
        self.say(self.index, text.strip() if _is_json(text) else json.dumps(text, ensure_ascii=False))


def _is_text(schema: Mapping[str, Any], key: str) -> bool:
    properties = schema.get("properties")
    found = properties.get(key) if isinstance(properties, Mapping) else None
    if not isinstance(found, Mapping):
        return True
    types = found.get("type", _OPEN_TYPES if found.keys() & _DECIDING else "string")
    return not _JSON_TYPES & set(types if isinstance(types, list) else [types])


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _escaped(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)[1:-1]
