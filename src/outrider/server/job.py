"""A client's request on its way through the engine: several sequences, one stream of events back to the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from outrider.engine.request import Logprob, Request
from outrider.outputs import CompletionOutput
from outrider.server.errors import ApiError, past_deadline

GRACE = 5.0  # seconds after the deadline


@dataclass(frozen=True)
class Piece:
    """What one step added to one sequence. Pieces of a sequence, joined, are its output."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[dict[int, Logprob]]
    draft_positions: list[int]
    text_ends: list[int]
    draft: list[int] = field(default_factory=list)  # proposed for this step; only for those who asked
    final: CompletionOutput | None = None  # with the last piece: all of it

    def can_be_joined(self, other: Event) -> bool:
        """Whether what came right after it may be sent with it. Whoever asked for drafts sees every step."""
        return isinstance(other, Piece) and self.index == other.index and not self.draft and not other.draft

    def joined(self, other: Piece) -> Piece:
        """What two steps added, one after the other."""
        return Piece(
            index=self.index,
            text=self.text + other.text,
            token_ids=self.token_ids + other.token_ids,
            logprobs=self.logprobs + other.logprobs,
            draft_positions=self.draft_positions + other.draft_positions,
            text_ends=self.text_ends + other.text_ends,
            final=other.final,
        )


class Accepted:
    """The engine has taken the job: from here on, only faults and deadlines can end it early."""


Event = Piece | ApiError | Accepted


@dataclass(eq=False)
class Job:
    """Made on the event loop; the engine's thread alone touches `requests` once it is submitted."""

    job_id: str
    requests: list[Request]
    deadline: float  # by time.monotonic()
    streams: bool = True  # otherwise only last pieces are sent
    loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    submitted: float = field(default_factory=time.monotonic)
    started: float | None = None  # when the engine first worked at it
    first_token: float | None = None
    events: asyncio.Queue[Event] = field(default_factory=asyncio.Queue)
    begun: bool = False  # its first piece is on its way
    closed: bool = False  # nothing more will be sent

    @property
    def num_prompt_tokens(self) -> int:
        """Every prompt once, however many answers it gets."""
        return sum(len(ids) for ids in {id(request.prompt): request.prompt for request in self.requests}.values())

    def send(self, *events: Event) -> None:
        """From the engine's thread, at once."""
        try:
            self.loop.call_soon_threadsafe(self._put, events)
        except RuntimeError:  # the loop has been closed: nobody is listening
            self.closed = True

    def _put(self, events: Sequence[Event]) -> None:
        for event in events:
            self.events.put_nowait(event)

    async def accepted(self) -> None:
        with self._watched():
            event = await self._next()
        assert isinstance(event, Accepted)

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Until every sequence has ended. Close it (aclosing) where it may be left before. Where more has come than the
        event loop has had time for, it is sent together: the busier the server, the fewer and larger the pieces."""
        num_left = len(self.requests)
        with self._watched():
            following: Event | None = None
            while num_left:
                event = await self._next() if following is None else _unless_error(following)
                assert isinstance(event, Piece)
                following = self._waiting()
                while following is not None and event.can_be_joined(following):
                    assert isinstance(following, Piece)
                    event, following = event.joined(following), self._waiting()
                num_left -= event.final is not None
                yield event

    @contextmanager
    def _watched(self) -> Iterator[None]:
        """The engine's thread keeps the deadline; should it hang, the client is told all the same.
        One timer for all events: a timeout around each of them would cost more than the event."""
        seconds = self.deadline + GRACE - time.monotonic()
        timer = self.loop.call_later(max(seconds, 0), self.events.put_nowait, past_deadline())
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
