"""What a parser of model output says (events), and a scanner that reads text one character at a time.
A scanner is a generator over characters, so that no way of cutting the text into pieces can change what it says."""

import re
from collections.abc import Generator, Iterable
from dataclasses import dataclass
from typing import Protocol

HELD_LIMIT = 64 * 2**10  # characters held back while they may still become a call; beyond, they are plain text

# a part of a scanner: it yields where it waits for the next character ("" once the text has ended)
Steps = Generator[None, str, None]
StepsTo = Generator[None, str, str]


@dataclass(frozen=True)
class Text:
    text: str


@dataclass(frozen=True)
class Reasoning:
    text: str


@dataclass(frozen=True)
class ToolCallBegin:
    index: int
    id: str
    name: str


@dataclass(frozen=True)
class ToolArguments:
    """A piece of the arguments; all pieces of a call together are the JSON text that the model wrote."""

    index: int
    text: str


@dataclass(frozen=True)
class ToolCallEnd:
    index: int
    closed: bool  # every bracket of the arguments was closed by its like; False: cut off or malformed, given as written


Event = Text | Reasoning | ToolCallBegin | ToolArguments | ToolCallEnd


def merged(events: Iterable[Event]) -> list[Event]:
    """Neighbouring events of one kind as one."""
    found: list[Event] = []
    for event in events:
        match found[-1] if found else None, event:
            case Text(first), Text(second):
                found[-1] = Text(first + second)
            case Reasoning(first), Reasoning(second):
                found[-1] = Reasoning(first + second)
            case ToolArguments(index, first), ToolArguments(same, second) if index == same:
                found[-1] = ToolArguments(index, first + second)
            case _:
                found.append(event)
    return found


class Parser(Protocol):
    def feed(self, text: str) -> list[Event]:
        """What the next piece of text settles; neighbouring events of one kind come as one."""

    def finish(self) -> list[Event]:
        """What was still held back; nothing may be fed afterwards."""


class MalformedError(Exception):
    """The text is not what its marker promised. The character that showed it has not been taken."""


class Scanner:
    """Reads characters through `run`, which a form writes as if the whole text were there.
    `char` is the character looked at; what was taken and may still turn out to be plain text is held."""

    def __init__(self, held_limit: int = HELD_LIMIT) -> None:
        self.char = ""
        self._held: list[str] = []
        self._held_limit = held_limit
        self._pushed: list[str] = []  # characters to be read again, the next one last
        self._events: list[Event] = []
        self._pieces: list[str] = []  # of the event that is still growing
        self._growing: type[Text] | type[Reasoning] | int = Text  # its kind; an int: arguments of that call
        self._plain: re.Pattern[str] | None = None  # waiting in plain text: only these characters need a look
        self._finished = False
        self._machine = self._whole()
        next(self._machine)

    def run(self) -> Steps:
        raise NotImplementedError

    def feed(self, text: str) -> list[Event]:
        assert not self._finished, "fed after finish"
        position = 0
        while position < len(text):
            if self._plain is not None:
                found = self._plain.search(text, position)
                stop = found.start() if found else len(text)
                if stop > position:
                    self._pieces.append(text[position:stop])
                position = stop
            if position < len(text):
                self._machine.send(text[position])
                position += 1
        return self._take_events()

    def finish(self) -> list[Event]:
        if not self._finished:
            self._finished = True
            try:
                self._machine.send("")
            except StopIteration:
                pass
            else:
                raise AssertionError("a scanner waits for more after the end")
        return self._take_events()

    def _whole(self) -> Steps:
        yield from self.advance()
        yield from self.run()
        self.release()

    def _take_events(self) -> list[Event]:
        self._settle()
        events, self._events = self._events, []
        return events

    def _settle(self) -> None:
        if self._pieces:
            text = "".join(self._pieces)
            kind = self._growing
            self._events.append(ToolArguments(kind, text) if isinstance(kind, int) else kind(text))
            self._pieces = []

    def emit(self, event: Event) -> None:
        self._settle()
        self._events.append(event)

    def say(self, kind: type[Text] | type[Reasoning] | int, text: str) -> None:
        if kind != self._growing:
            self._settle()
            self._growing = kind
        self._pieces.append(text)

    def release(self, kind: type[Text] | type[Reasoning] = Text) -> None:
        """What was held is plain after all."""
        if self._held:
            self.say(kind, "".join(self._held))
            self._held.clear()

    def drop(self) -> None:
        """What was held belongs to a marker or a call and is not shown."""
        self._held.clear()

    @property
    def num_held(self) -> int:
        return len(self._held)

    def held_since(self, start: int) -> str:
        return "".join(self._held[start:])

    def reached(self, marker: str) -> None:
        """A marker is complete; what follows it is not there yet."""

    def advance(self) -> Steps:
        if self._pushed:
            self.char = self._pushed.pop()
        else:
            self.char = yield

    def hold(self) -> Steps:
        """Takes a character that may still be plain text."""
        if len(self._held) >= self._held_limit:
            raise MalformedError
        self._held.append(self.char)
        yield from self.advance()

    def skip(self, characters: str) -> Steps:
        while self.char and self.char in characters:
            yield from self.hold()

    def expect(self, *literals: str) -> StepsTo:
        """Holds and returns the literal that stands here, or "" having taken nothing."""
        taken = ""
        while True:
            if taken in literals:
                return taken
            if not self.char or not any(literal.startswith(taken + self.char) for literal in literals):
                break
            taken += self.char
            if taken in literals:
                self.reached(taken)
            yield from self.hold()
        if taken:
            del self._held[-len(taken) :]
            self._pushed += [self.char, *reversed(taken)]
            self.char = self._pushed.pop()
        return ""

    def until(self, markers: Iterable[str], kind: type[Text] | type[Reasoning] = Text) -> StepsTo:
        """Says everything up to the next of the markers, holds that and returns it; "" at the end of the text.
        Only the longest tail that may still become a marker is held back."""
        markers = tuple(markers)
        starts = "".join({marker[0] for marker in markers})
        pattern = re.compile(f"[{re.escape(starts)}]" if starts else r"(?!)")
        tail = ""
        self.release(kind)
        while self.char:
            tail += self.char
            while tail and not any(marker.startswith(tail) for marker in markers):
                self.say(kind, tail[0])
                tail = tail[1:]
            self._held = list(tail)
            if tail in markers:
                self.reached(tail)
                yield from self.advance()
                return tail
            if not tail and not self._pushed:
                self._plain = pattern
                yield from self.advance()
                self._plain = None
            else:
                yield from self.advance()
        self.release(kind)
        return ""
