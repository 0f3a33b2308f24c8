"""Registries: a name to the class that answers to it. Modules register themselves when imported; installed packages
declare theirs as entry points of the registry's group."""

import difflib
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar, cast

T = TypeVar("T")


class Registry(Generic[T]):
    def __init__(self, kind: str, group: str | None = None) -> None:
        """`group`: of entry points that are entries too."""
        self.kind = kind
        self._group = group
        self._entries: dict[str, T] = {}
        self._rules: list[Callable[[str], T | None]] = []
        self._derived: dict[str, T] = {}  # what the rules have answered
        self.installed: set[str] = set()  # entries that packages bring: every process knows them
        self._broken: dict[str, str] = {}  # entry points that could not be loaded, and why

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

    def _load_entry_points(self) -> None:
        """Once, when a name is first asked for: whoever declares an entry imports this package, often before us."""
        group, self._group = self._group, None
        for point in entry_points(group=group) if group is not None else ():
            try:
                self._take(point)
            except Exception as error:  # of somebody else's package; nobody else is to suffer from it
                why = f"{point.name} = {point.value} of {_package_of(point)}: {type(error).__name__}: {error}"
                self._broken[point.name] = why
                warnings.warn(f"a {self.kind} is left out, {why}", RuntimeWarning, stacklevel=3)

    def _take(self, point: EntryPoint) -> None:
        """Its module may have registered it already, by decorator."""
        entry = point.load()
        if not isinstance(entry, type):
            raise ValueError("an entry point must name a class, as module:Class")
        self.installed.add(point.name)
        if self._entries.get(point.name) is not entry:
            self.register(point.name)(cast(T, entry))

    def _find(self, name: str) -> T | None:
        self._load_entry_points()
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
            if name in self._broken:
                raise ValueError(f"the {self.kind} {name!r} could not be loaded, {self._broken[name]}")
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
        self._load_entry_points()
        return iter(self._entries)


def _package_of(point: EntryPoint) -> str:
    return f"package {point.dist.name}" if point.dist is not None else "a package without a name"
