"""A client's request on its way through the engine: several sequences, one stream of events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from outrider.server.errors import ApiError, past_deadline
from outrider.server.protocol import Accepted, Piece, SequenceCounts

GRACE = 5.0  # seconds after the deadline
Event = Piece | ApiError | Accepted


@dataclass(eq=False)
class Job:
    number: int
    job_id: str
    prompts: list[list[int]]  # their tokens; of one with images, those of its text until the engine has taken it
    n: int  # answers to each
    deadline: float  # by time.monotonic()
    submitted: float = field(default_factory=time.monotonic)
    begun: list[list[int]] = field(default_factory=list)  # of each sequence: tokens that its client has already
    known: dict[int, Piece] = field(default_factory=dict)  # what became of them, with the first piece of what is new
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    counts: dict[int, SequenceCounts] = field(default_factory=dict)  # of each sequence, as of its latest piece
    closed: bool = False  # nothing more will come

    @property
    def num_sequences(self) -> int:
        return len(self.prompts) * self.n

    @property
    def num_prompt_tokens(self) -> int:
        """Every prompt once, however many answers it gets."""
        return sum(map(len, self.prompts))

    @property
    def num_begun(self) -> int:
        return sum(map(len, self.begun))

    def text_begin(self, index: int) -> int:
        """Length of the text that a client has of a sequence already, once a piece of it has come."""
        return len(self.known[index].text) if index in self.known else 0

    def prompt_of(self, index: int) -> list[int]:
        return self.prompts[index // self.n]

    @property
    def num_cached(self) -> int:
        """Of the prompts' tokens, those found in the cache; of answers to the same prompt, the first one's count."""
        return sum(count.num_cached for index, count in self.counts.items() if index % self.n == 0)

    async def accepted(self) -> None:
        with self._watched():
            event = await self._next()
        assert isinstance(event, Accepted)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Until every sequence has ended. Close it (aclosing) where it may be left before. Where more has come than the
        event loop has had time for, it is sent together: the busier the server, the fewer and larger the pieces."""
        num_left = self.num_sequences
        with self._watched():
            following: Event | None = None
            while num_left:
                event = await self._next() if following is None else _unless_error(following)
                assert isinstance(event, Piece)
                following = self._waiting()
                while following is not None and event.can_be_joined(following):
                    assert isinstance(following, Piece)
                    event, following = event.joined(following), self._waiting()
                self.counts[event.index] = SequenceCounts._make(event.counts)
                num_left -= event.ending is not None
                if self.begun and event.index not in self.known:
                    self.known[event.index], event = event.split(len(self.begun[event.index]))
                yield event

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """The engine keeps the deadline; should it hang, the client is told all the same.
        One timer for all events: a timeout around each of them would cost more than the event."""
        seconds = self.deadline + GRACE - time.monotonic()
        timer = asyncio.get_running_loop().call_later(max(seconds, 0), self.events.put_nowait, past_deadline())
        try:
            yield
        finally:
            timer.cancel()

    async def _next(self) -> Piece | Accepted:
        return _unless_error(await self.events.get())

    def _waiting(self) -> Event | None:
        return None if self.events.empty() else self.events.get_nowait()


def _unless_error(event: Event) -> Piece | Accepted:
    if isinstance(event, ApiError):
        raise event
    return event
