"""Which regular expressions a grammar can hold an answer to. xgrammar passes over some constructs with a warning, in
the `pattern` of a JSON schema more than elsewhere; an answer would then break the pattern, so they are refused here."""

from __future__ import annotations

import re
from dataclasses import dataclass

_GROUP = re.compile(r"\(\?(?P<kind>:|<[A-Za-z_]\w*>|<?[=!]|.?)", re.DOTALL)
_QUANTIFIER = re.compile(r"[*+?]|\{\d+(,\d*)?\}")
_KNOWN_ESCAPES = frozenset("dDsSwWnrtfvxuc0")
_GROUP_NAMES = {
    "=": "a lookahead",
    "!": "a negative lookahead",
    "<=": "a lookbehind",
    "<!": "a negative lookbehind",
}


@dataclass
class _Group:
    """An open group, and where the walk stands in its present alternative."""

    begins_text: bool  # nothing can stand before this group, so that ^ may be its first part
    is_empty: bool = True  # the present alternative has no part yet
    is_ended: bool = False  # the present alternative ended with $
    any_ended: bool = False  # one of its alternatives did
    has_anchor: bool = False


def check_dialect(regex: str) -> None:
    """A ValueError that names the first construct no grammar can keep, and where it stands."""
    _Walk(regex).run()


class _Walk:
    """Goes through a regular expression once, from left to right."""

    def __init__(self, regex: str) -> None:
        self._regex, self._place = regex, 0
        self._groups = [_Group(begins_text=True)]
        self._closed: _Group | None = None  # the group that has just ended: a quantifier would repeat it

    def run(self) -> None:
        while self._place < len(self._regex):
            self._part(self._regex[self._place])

    def _part(self, character: str) -> None:
        quantifier = _QUANTIFIER.match(self._regex, self._place)
        if quantifier is not None and not self._group.is_empty:
            self._quantifier(quantifier[0])
            return
        self._closed = None
        if character == "(":
            self._open()
        elif character == ")" and len(self._groups) > 1:
            self._close()
        elif character == "|":
            self._group.any_ended |= self._group.is_ended
            self._group.is_empty, self._group.is_ended = True, False
            self._place += 1
        elif character in "^$":
            self._anchor(character)
        else:
            self._atom(character)

    @property
    def _group(self) -> _Group:
        return self._groups[-1]

    def _open(self) -> None:
        found = _GROUP.match(self._regex, self._place)
        opening, kind = (found[0], found["kind"]) if found is not None else ("(", ":")
        if kind in _GROUP_NAMES:
            raise self._refused(_GROUP_NAMES[kind], opening)
        if kind != ":" and len(kind) < 2:
            raise self._refused("a group modifier", opening)
        begins_text = self._group.begins_text and self._group.is_empty
        self._begin_part()
        self._groups.append(_Group(begins_text))
        self._place += len(opening)

    def _close(self) -> None:
        group = self._closed = self._groups.pop()
        self._group.is_ended = group.any_ended or group.is_ended
        self._group.has_anchor |= group.has_anchor
        self._place += 1

    def _anchor(self, character: str) -> None:
        group = self._group
        if character == "^" and not (group.begins_text and group.is_empty):
            raise self._refused("an anchor that is not at the beginning", "^")
        group.has_anchor = True
        group.is_ended |= character == "$"
        self._place += 1

    def _quantifier(self, text: str) -> None:
        if self._closed is not None and self._closed.has_anchor:
            raise self._refused("an anchor that is repeated", text)
        self._place += len(text)
        following = self._regex[self._place : self._place + 1]
        if following == "+":
            raise self._refused("a possessive quantifier", text + following)
        self._place += following == "?"  # lazy: the same texts match

    def _atom(self, character: str) -> None:
        self._begin_part()
        if character == "[":
            self._class()
        elif character == "\\":
            self._escape(in_class=False)
        else:
            self._place += 1

    def _begin_part(self) -> None:
        if self._group.is_ended:
            raise self._refused("an anchor that is not at the end", "$ before " + self._regex[self._place])
        self._group.is_empty = False

    def _class(self) -> None:
        self._place += 1
        while self._place < len(self._regex) and self._regex[self._place] != "]":
            if self._regex[self._place] == "\\":
                self._escape(in_class=True)
            else:
                self._place += 1
        self._place += 1

    def _escape(self, in_class: bool) -> None:
        letter = self._regex[self._place + 1 : self._place + 2]
        if letter in set("123456789k") and not in_class:
            raise self._refused("a backreference", "\\" + letter)
        if letter in set("bB") and not in_class:
            raise self._refused("a word boundary", "\\" + letter)
        if letter in set("pP"):
            raise self._refused("a Unicode class", "\\" + letter)
        if letter.isalnum() and letter not in _KNOWN_ESCAPES and not (in_class and letter == "b"):
            raise self._refused("an unknown escape", "\\" + letter)
        self._place += 2

    def _refused(self, what: str, text: str) -> ValueError:
        return ValueError(f"it holds {what}, {text} at character {self._place + 1}, which is not supported")
