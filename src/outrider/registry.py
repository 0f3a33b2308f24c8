"""Registries: a name to the class that answers to it. Modules register themselves when imported."""

import difflib
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Registry(Generic[T]):
    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._entries: dict[str, T] = {}
        self._rules: list[Callable[[str], T | None]] = []
        self._derived: dict[str, T] = {}  # what the rules have answered

    def register(self, *names: str) -> Callable[[T], T]:
        def add(entry: T) -> T:
            for name in names:
                assert name not in self._entries, f"two {self.kind}s are called {name!r}"
                self._entries[name] = entry
            return entry

        return add

    def derive(self, rule: Callable[[str], T | None]) -> Callable[[str], T | None]:
        """Names that are made of others: the rule answers with an entry, or None where it does not know the name."""
        self._rules.append(rule)
        return rule

    def _find(self, name: str) -> T | None:
        for entries in (self._entries, self._derived):
            if name in entries:
                return entries[name]
        entry = next((entry for rule in self._rules if (entry := rule(name)) is not None), None)
        if entry is not None:
            self._derived[name] = entry
        return entry

    def __getitem__(self, name: str) -> T:
        entry = self._find(name)
        if entry is None:
            close = difflib.get_close_matches(name, list(self._entries), n=1)
            meant = f"did you mean {close[0]!r}? " if close else ""
            raise ValueError(f"unknown {self.kind} {name!r}; {meant}known: {', '.join(sorted(self._entries))}")
        return entry

    def name_of(self, entry: T) -> str | None:
        """The first name that answers with this entry."""
        known = (*self._entries.items(), *self._derived.items())
        return next((name for name, other in known if other is entry), None)

    def __contains__(self, name: str) -> bool:
        return self._find(name) is not None

    def __iter__(self) -> Iterator[str]:
        """The names that were registered, not those that rules answer to."""
        return iter(self._entries)
