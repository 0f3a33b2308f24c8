"""Arguments that another engine knows, and what becomes of them: settled before our own code sees them."""

from __future__ import annotations

import difflib
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

Kind = TypeVar("Kind", bound=type)
Taken = Callable[[Any], bool]  # whether a value asks for nothing that is missing here


@dataclass(frozen=True)
class NoEffect:
    """Taken with any value: there is nothing here that they could change."""

    names: Sequence[str]
    why: str


@dataclass(frozen=True)
class Refused:
    """Taken with the values that ask for nothing; None and whatever is empty always do."""

    names: Mapping[str, Sequence[Any] | Taken]
    why: str

    def takes(self, name: str, value: Any) -> bool:
        taken = self.names[name]
        if value is None or (isinstance(value, str | dict | list | tuple | set | frozenset) and not value):
            return True
        if callable(taken):
            return taken(value)
        return isinstance(value, str | int | float) and value in taken


@dataclass(frozen=True)
class Rules:
    """What becomes of the arguments of one call."""

    works: Mapping[str, str]  # with what there is to know about it
    no_effect: Sequence[NoEffect]
    refused: Sequence[Refused]
    renamed: Mapping[str, str] = field(default_factory=dict)  # of those that work: what they are called here

    def settle(self, given: Mapping[str, Any], what: str, own: Iterable[str] = ()) -> dict[str, Any]:
        """What works of it. All that is refused, or that nobody knows, is named in one ValueError. `own` are arguments
        that need no rule: one of them may have been meant."""
        complaints = [f"{name}: {why}" for name, why in self._complaints(given, own)]
        if complaints:
            raise ValueError(f"{what} cannot take " + "; ".join(complaints))
        return {self.renamed.get(name, name): value for name, value in given.items() if name in self.works}

    def _complaints(self, given: Mapping[str, Any], own: Iterable[str]) -> list[tuple[str, str]]:
        idle = {name for group in self.no_effect for name in group.names}
        refused = {name: group for group in self.refused for name in group.names}
        found = []
        for name, value in given.items():
            group = refused.get(name)
            if group is not None and not group.takes(name, value):
                found.append((f"{name}={value!r}"[:80], group.why))
            elif group is None and name not in self.works and name not in idle:
                found.append((name, self._unknown(name, own)))
        return found

    def _unknown(self, name: str, own: Iterable[str]) -> str:
        close = difflib.get_close_matches(name, [*own, *self.names()], n=1)
        return "nobody knows it" + (f" (did you mean {close[0]}?)" if close else "")

    def names(self) -> list[str]:
        """Every argument that these rules say something about."""
        groups: list[NoEffect | Refused] = [*self.no_effect, *self.refused]
        return [*self.works, *(name for group in groups for name in group.names)]


def accepting(rules: Rules) -> Callable[[Kind], Kind]:
    """For a dataclass: arguments that are not its own go by the rules, and what works of them is given to it."""

    def decorate(made: Kind) -> Kind:
        own = frozenset(made.__dataclass_fields__)  # type: ignore[attr-defined]
        create = made.__init__  # type: ignore[misc]

        @functools.wraps(create)
        def settle_and_create(self: Any, *values: Any, **given: Any) -> None:
            others = given.keys() - own
            if others:
                given |= rules.settle({name: given.pop(name) for name in sorted(others)}, made.__name__, own)
            create(self, *values, **given)

        made.__init__ = settle_and_create  # type: ignore[misc]
        return made

    return decorate
