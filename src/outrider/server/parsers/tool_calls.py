"""What the forms of tool calls share: the events of a call, JSON read character by character, and the envelope
`{"name": ..., "arguments": ...}`. Once a call has begun it cannot be taken back; until then its text is held."""

import json
import secrets
import string
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass, field
from typing import Any

from outrider.registry import Registry
from outrider.server.parsers.base import (
    HELD_LIMIT,
    MalformedError,
    Scanner,
    Steps,
    StepsTo,
    ToolCallBegin,
    ToolCallEnd,
)
from outrider.server.parsers.forced import Format, WantedCalls

SPACES = " \t\r\n"
MAX_NAME_LEN = 256
ID_LEN = 9  # letters or digits in a short id
MAX_DEPTH = 512  # brackets of the arguments that are matched by kind; deeper ones are only counted
VALUE_STARTS = '{["-0123456789tfn'
ARGUMENT_KEYS = ("arguments", "parameters")
UNMARKED_KEYS = ("name", "type", "id", *ARGUMENT_KEYS)  # any other key makes JSON without a marker plain text
Closed = Generator[None, str, bool]
_CLOSING = {"{": "}", "[": "]"}
_ALPHANUMERIC = string.ascii_letters + string.digits


def long_id() -> str:
    return f"call_{secrets.token_hex(12)}"


def short_id() -> str:
    """A call's id of nine letters and digits, as Mistral's templates demand."""
    return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(ID_LEN))


@dataclass(frozen=True)
class ToolOptions:
    tool_names: frozenset[str] | None = None  # the tools of the request; only calls without a marker are checked
    schemas: Mapping[str, Mapping[str, Any] | None] = field(default_factory=dict)  # of their arguments
    make_id: Callable[[], str] | None = None  # None: what the form is used to
    held_limit: int = HELD_LIMIT


@dataclass
class _Envelope:
    """What has been read of one JSON call."""

    unmarked: bool  # plain JSON that no marker announced: it must show that it is a call
    name: str | None = None
    arguments: str | None = None  # read before the name was known
    closed: bool = True  # whether those were
    over: bool = False  # the call has been said


class ToolParser(Scanner):
    """Plain text with calls in it. Text outside calls is said exactly as written. A call that breaks off before its
    name and the start of its arguments are known is text, marker included; one that breaks off later is ended with
    the arguments as written and closed=False."""

    markers: tuple[str, ...] = ()  # what opens calls
    marks: tuple[str, ...] = ()  # all that may be special tokens
    default_id: Callable[[], str] = staticmethod(long_id)

    def __init__(self, options: ToolOptions | None = None) -> None:
        self._options = options or ToolOptions()
        self._num_calls = 0
        self._open = False  # a call has begun and not ended
        self._ids: set[str] = set()
        super().__init__(self._options.held_limit)

    @classmethod
    def forced(cls, wanted: WantedCalls) -> Format:
        """The grammar of an answer that is calls and nothing else, as the model is used to write them."""
        raise NotImplementedError

    def run(self) -> Steps:
        while marker := (yield from self.until(self.markers)):
            yield from self.attempt(self.calls(marker))

    def calls(self, marker: str) -> Steps:
        """The calls behind a marker that has just been held; raises MalformedError where they stop being calls."""
        raise NotImplementedError

    def attempt(self, steps: Steps) -> Steps:
        try:
            yield from steps
        except MalformedError:
            if self._open:
                self.end(closed=False)
        self.release()

    # one call

    @property
    def index(self) -> int:
        """The number of the call that is being read."""
        return self._num_calls

    def schema_of(self, name: str) -> Mapping[str, Any]:
        return self._options.schemas.get(name) or {}

    def begin(self, name: str, id: str | None = None) -> None:
        make = self._options.make_id or self.default_id
        if not id or id in self._ids:
            id = make()
        self._ids.add(id)
        self.drop()
        self.emit(ToolCallBegin(self._num_calls, id, name))
        self._open = True

    def end(self, closed: bool) -> None:
        self.emit(ToolCallEnd(self._num_calls, closed))
        self._num_calls += 1
        self._open = False

    def arguments(self, name: str, id: str | None = None) -> Steps:
        """A call whose arguments, a JSON object, stand here."""
        if self.char != "{" or not name:
            raise MalformedError
        self.begin(name, id)
        self.end((yield from self.container(self.pass_on)))

    def plain_name(self) -> StepsTo:
        """A name that is written without quotes."""
        name = ""
        while self.char.isalnum() or (self.char and self.char in "_-.:/"):
            name += self.char
            if len(name) > MAX_NAME_LEN:
                raise MalformedError
            yield from self.hold()
        return name

    # JSON; `take` either holds a character or passes it on as part of the arguments

    def pass_on(self) -> Steps:
        self.say(self._num_calls, self.char)
        yield from self.advance()

    def quoted(self, take: Callable[[], Steps]) -> Steps:
        if self.char != '"':
            raise MalformedError
        yield from take()
        while self.char != '"':
            for _ in range(2 if self.char == "\\" else 1):
                if not self.char:
                    raise MalformedError
                yield from take()
        yield from take()

    def container(self, take: Callable[[], Steps]) -> Closed:
        """An object or array; returns whether every bracket met its like. What stands between is not judged."""
        expected: list[str] = []
        depth, matched = 0, True
        while self.char:
            if self.char == '"':
                yield from self.quoted(take)
                continue
            if self.char in "{[":
                if depth < MAX_DEPTH:
                    expected.append(_CLOSING[self.char])
                depth += 1
            elif self.char in "}]":
                depth -= 1
                if depth < len(expected):
                    matched = expected.pop() == self.char and matched
            yield from take()
            if depth == 0:
                return matched
        raise MalformedError

    def value(self, take: Callable[[], Steps]) -> Closed:
        if self.char and self.char in "{[":
            return (yield from self.container(take))
        if self.char == '"':
            yield from self.quoted(take)
            return True
        if not self.char or self.char not in VALUE_STARTS:
            raise MalformedError
        while self.char.isalnum() or (self.char and self.char in "+-."):
            yield from take()
        return bool(self.char)  # at the end of the text it may have been cut off

    def held_string(self) -> StepsTo:
        """Holds a JSON string and returns what it means."""
        start = self.num_held
        yield from self.quoted(self.hold)
        try:
            return str(json.loads(self.held_since(start), strict=False))
        except ValueError:
            raise MalformedError from None

    # {"name": ..., "arguments": ...}

    def envelope(self, unmarked: bool = False) -> Steps:
        """A call written as one JSON object, the keys in any order. Once the call is over, what is left of the
        object is held, and so is whatever broke it: the form decides whether that is text."""
        call = _Envelope(unmarked)
        yield from self.envelope_open()
        try:
            while True:
                yield from self.member(call)
                yield from self.skip(SPACES)
                if not self.char or self.char not in ",}":
                    raise MalformedError
                last = self.char == "}"
                if last and not call.over:
                    self.without_arguments(call)
                yield from self.hold()
                if last:
                    break
                yield from self.skip(SPACES)
        except MalformedError:
            if call.over:
                return
            raise
        self.drop()

    def envelope_open(self) -> Steps:
        if self.char != "{":
            raise MalformedError
        yield from self.hold()
        yield from self.skip(SPACES)

    def member(self, call: _Envelope) -> Steps:
        key = yield from self.held_string()
        if call.unmarked and key not in UNMARKED_KEYS:
            raise MalformedError
        yield from self.skip(SPACES)
        if self.char != ":":
            raise MalformedError
        yield from self.hold()
        yield from self.skip(SPACES)
        if key == "name" and call.name is None:
            call.name = yield from self.held_string()
            self.check_name(call)
            if call.arguments is not None:
                self.whole_call(call, call.arguments)
        elif key in ARGUMENT_KEYS and not call.over:
            yield from self.envelope_arguments(call)
        else:
            yield from self.value(self.hold)

    def check_name(self, call: _Envelope) -> None:
        name, known = call.name, self._options.tool_names
        # isprintable also refuses the lone surrogates that JSON escapes can write and UTF-8 cannot
        if not name or len(name) > MAX_NAME_LEN or not name.isprintable():
            raise MalformedError
        if call.unmarked and known is not None and name not in known:
            raise MalformedError

    def envelope_arguments(self, call: _Envelope) -> Steps:
        if call.unmarked and self.char != "{":
            raise MalformedError
        if call.name is None:
            start = self.num_held
            call.closed = yield from self.value(self.hold)
            call.arguments = self.held_since(start)
            return
        if not self.char or self.char not in VALUE_STARTS:
            raise MalformedError
        self.begin(call.name)
        closed = yield from self.value(self.pass_on)
        call.over = True
        self.end(closed)

    def without_arguments(self, call: _Envelope) -> None:
        if call.name is None or call.unmarked:
            raise MalformedError
        self.whole_call(call, "{}")  # an empty string would be no JSON

    def whole_call(self, call: _Envelope, arguments: str) -> None:
        assert call.name is not None
        self.begin(call.name)
        self.say(self._num_calls, arguments)
        self.end(call.closed)
        call.over = True


tool_parsers: Registry[type[ToolParser]] = Registry("tool parser")
