"""A stream of /v1/responses that outlives its replicas. Its events do not say tokens, so another replica is asked for
all of it, with the same seed, and what the client has already is left out. Names of items are made up by each replica:
the client knows those of the first."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import orjson

from outrider.server.router.stream import Chunk

_LAST = frozenset({"response.completed", "response.incomplete", "response.failed"})


class Replayed:
    """A streamed request and what has come of it."""

    def __init__(self, body: dict[str, Any], seed: int) -> None:
        """`seed`: where the client has none."""
        self._body = body if body.get("seed") is not None else body | {"seed": seed}
        self._number = 0  # of the next event
        self._num_marks = 0  # events passed on that are no deltas
        self._passed: dict[tuple[str, int], tuple[int, int]] = {}  # of deltas: characters, log-probabilities
        self._names: dict[tuple[int, str], str] = {}  # of items, as the client knows them
        self._created: int | None = None
        self.begin_again()

    @property
    def body(self) -> bytes:
        return orjson.dumps(self._body)

    def begin_again(self) -> None:
        """The next events are another replica's, from the first on."""
        self._marks_left = self._num_marks
        self._left = dict(self._passed)
        self._renamed: dict[bytes, bytes] = {}

    def is_last(self, event: Chunk) -> bool:
        return event["type"] in _LAST

    def take(self, event: Chunk) -> Iterator[Chunk]:
        """What of an event the client has not."""
        self._learn(event)
        event = self._known(event)
        if "delta" in event:
            event = self._rest(event)
            if not event["delta"]:
                return
        elif self._marks_left:
            self._marks_left -= 1
            return
        else:
            self._num_marks += 1
        yield event | {"sequence_number": self._number}
        self._number += 1

    def _learn(self, event: Chunk) -> None:
        """What an item is called here, and what the client has heard that it is called."""
        if event["type"] != "response.output_item.added":
            return
        for kind in ("id", "call_id"):
            if kind in event["item"]:
                own = event["item"][kind]
                known = self._names.setdefault((event["output_index"], kind), own)
                if own != known:
                    self._renamed[own.encode()] = known.encode()

    def _known(self, event: Chunk) -> Chunk:
        if self._renamed:
            text = orjson.dumps(event)
            for own, known in self._renamed.items():
                text = text.replace(own, known)
            event = orjson.loads(text)
        if "response" in event:
            created = event["response"]["created_at"]
            self._created = self._created or created
            event["response"]["created_at"] = self._created
        return event

    def _rest(self, event: Chunk) -> Chunk:
        """Of a delta, what comes after the characters that were passed on."""
        key = (event["type"], event["output_index"])
        text, rows = event["delta"], event.get("logprobs")
        characters, figures = self._left.get(key, (0, 0))
        self._left[key] = (max(characters - len(text), 0), max(figures - len(rows or ()), 0))
        new = {"delta": text[characters:]} | ({} if rows is None else {"logprobs": rows[figures:]})
        before = self._passed.get(key, (0, 0))
        if new["delta"]:
            self._passed[key] = (before[0] + len(new["delta"]), before[1] + len(new.get("logprobs") or ()))
        return event | new
