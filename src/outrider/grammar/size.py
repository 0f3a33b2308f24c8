"""Repetitions of repetitions, bounded before a grammar is compiled. In `(([a-z]{0,99}){0,99}){0,99}` nothing says where
one round of the outer loops ends and the next begins: a text can be cut up in so many ways that to follow all of them
takes seconds a token."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

MAX_LOOSE_DEPTH = 3  # repetitions of nothing but repetitions
MAX_LOOSE_PRODUCT = 2**14  # of their counts

_QUANTIFIER = r"[*+?]|\{\s*\d*\s*,?\s*\d*\s*\}"
_CLASS = r"\[(?:\\.|[^\]\\])*\]"
_REGEX = re.compile(rf"(?P<quantifier>{_QUANTIFIER})|(?P<open>\((?:\?(?::|<\w+>))?)|(?P<close>\))|(?P<or>\|)|"
                    rf"(?P<anchor>[\^$])|(?P<atom>{_CLASS}|\\.|.)", re.DOTALL)  # fmt: skip
_EBNF = re.compile(rf"(?P<skip>\s+|#[^\n]*)|(?P<quantifier>{_QUANTIFIER})|(?P<open>\()|(?P<close>\))|(?P<or>\|)|"
                   rf"""(?P<atom>{_CLASS}|"(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')|(?P<name>[A-Za-z_][\w.-]*)|(?P<other>.)""",
                   re.DOTALL)  # fmt: skip
_RULE = re.compile(r"([A-Za-z_][\w.-]*)\s*::=")


@dataclass(frozen=True)
class _Part:
    """What matters of a part of a grammar."""

    is_loose: bool = False  # it may match texts of several lengths, and nothing in it is certain to be there
    depth: int = 0  # of repetitions right within each other
    product: int = 1  # of their counts


@dataclass
class _Group:
    alternatives: list[_Part] = field(default_factory=list)
    parts: list[_Part] = field(default_factory=list)  # of the present alternative

    def end_alternative(self) -> None:
        loose = bool(self.parts) and all(part.is_loose for part in self.parts)
        self.alternatives.append(_Part(loose, *_largest(self.parts)))
        self.parts = []

    def ended(self) -> _Part:
        self.end_alternative()
        return _Part(any(part.is_loose for part in self.alternatives), *_largest(self.alternatives))


def check_regex_size(regex: str) -> None:
    _check(_read(regex, _REGEX, lambda name: _Part()), "the regular expression")


def check_grammar_size(grammar: str) -> None:
    ends = [*(match.start() for match in _RULE.finditer(grammar)), len(grammar)]
    bodies = [
        (match[1], grammar[match.end() : end]) for match, end in zip(_RULE.finditer(grammar), ends[1:], strict=True)
    ]
    rules, known = dict(bodies), dict[str, _Part]()

    def part_of(name: str) -> _Part:
        if name not in known:
            known[name] = _Part()  # while it is looked at: a rule that leads back to itself
            known[name] = _read(rules.get(name, ""), _EBNF, part_of)
        return known[name]

    for name in rules:
        _check(part_of(name), "the grammar")


def _check(part: _Part, what: str) -> None:
    if part.depth > MAX_LOOSE_DEPTH or (part.depth > 1 and part.product > MAX_LOOSE_PRODUCT):
        raise ValueError(
            f"guided: {what} repeats repetitions {part.depth} deep, {part.product} times in all; at most "
            f"{MAX_LOOSE_DEPTH} deep and {MAX_LOOSE_PRODUCT} times are taken: put something certain between them"
        )


def _read(text: str, tokens: re.Pattern[str], part_of: Callable[[str], _Part]) -> _Part:
    groups = [_Group()]
    for kind, token in _tokens(text, tokens):
        parts = groups[-1].parts
        if kind == "open":
            groups.append(_Group())
        elif kind == "close" and len(groups) > 1:
            ended = groups.pop().ended()
            groups[-1].parts.append(ended)
        elif kind == "or":
            groups[-1].end_alternative()
        elif kind == "quantifier" and parts:
            parts[-1] = _repeated(parts[-1], *_counts(token))
        elif kind == "name":
            parts.append(part_of(token))
        elif kind in ("atom", "other", "quantifier", "close"):
            parts.append(_Part())
    while len(groups) > 1:  # a bracket that is never closed: the compiler will say so
        ended = groups.pop().ended()
        groups[-1].parts.append(ended)
    return groups[0].ended()


def _tokens(text: str, tokens: re.Pattern[str]) -> Iterator[tuple[str, str]]:
    for match in tokens.finditer(text):
        yield match.lastgroup or "", match[0]


def _repeated(part: _Part, low: int, high: int | None) -> _Part:
    if (low, high) == (0, 1):  # an option
        return _Part(True, part.depth, part.product)
    count = max(low, 1) if high is None else max(high, 1)
    depth = 1 + (part.depth if part.is_loose else 0)
    product = count * (part.product if part.is_loose else 1)
    return _Part(part.is_loose or low != high, max(depth, part.depth), max(product, part.product))


def _counts(quantifier: str) -> tuple[int, int | None]:
    if quantifier in "*+?":
        return {"*": (0, None), "+": (1, None), "?": (0, 1)}[quantifier]
    low, comma, high = quantifier[1:-1].partition(",")
    least = int(low) if low.strip() else 0
    return least, (int(high) if high.strip() else None) if comma else least


def _largest(parts: list[_Part]) -> tuple[int, int]:
    return max((part.depth for part in parts), default=0), max((part.product for part in parts), default=1)
