"""A stream that outlives its replicas: it knows the tokens that its client has, and asks another one for the rest."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from typing import Any

import orjson

Chunk = dict[str, Any]
_EXTRAS = ("token_ids", "token_texts", "draft_positions")
DONE = b"[DONE]"


class Resumable:
    """A streamed request and what has come of it."""

    def __init__(self, body: dict[str, Any], seed: int) -> None:
        """`seed`: where the client has none, so that others would go on with the same."""
        self._shows_tokens = bool(body.get("return_token_ids"))
        self._body = body | {"return_token_ids": True}
        if body.get("seed") is None:
            self._body["seed"] = seed
        given = body.get("continuation")
        self._has_begun = isinstance(given, list)
        self.tokens: list[list[int]] = []
        if isinstance(given, list) and all(isinstance(each, list) for each in given):
            self.tokens = [list(each) for each in given]
        self.tokens += [[] for _ in range(_num_answers(body) - len(self.tokens))]
        self._ended: set[int] = set()
        self._named: set[int] = set()  # answers whose role the client has heard
        self._head: Chunk = {}
        self._held: list[Chunk] = []  # not yet all that belongs to their tokens
        self._num_missing = 0

    @property
    def body(self) -> bytes:
        """What is to be asked for now."""
        begun = {"continuation": self.tokens} if self._has_begun else {}
        return orjson.dumps(self._body | begun)

    def begin_again(self) -> None:
        """The next chunks are another replica's; what was held back will come again."""
        self._held, self._num_missing = [], 0

    def is_last(self, chunk: Chunk) -> bool:
        return False  # an event of its own says so

    def take(self, chunk: Chunk) -> Iterator[Chunk]:
        """What the client gets for a chunk. Chunks that belong to the same tokens are passed on together: so a client
        never has a part of what its tokens stand for."""
        if not self._head and "id" in chunk:
            self._head = {name: chunk[name] for name in ("id", "created") if name in chunk}
        chunk |= {name: value for name, value in self._head.items() if name in chunk}
        choices = chunk.get("choices")
        if not choices:  # usage
            yield chunk
            return
        choice = choices[0]
        index = choice["index"]
        if index in self._ended:
            return
        if "role" in choice.get("delta", ()):
            if index not in self._named:
                self._named.add(index)
                yield chunk
            return
        self._num_missing = self._num_missing or choice.get("num_chunks", 1)
        self._held.append(chunk)
        self._num_missing -= 1
        if not self._num_missing:
            held, self._held = self._held, []
            for each in held:
                self._note(each["choices"][0])
            yield from filter(self._is_wanted, held)

    def _note(self, choice: Chunk) -> None:
        index = choice["index"]
        tokens = choice.get("token_ids", ())
        self.tokens[index] += tokens
        self._has_begun |= bool(tokens)
        self._named.add(index)
        if choice["finish_reason"] is not None:
            self._ended.add(index)

    def _is_wanted(self, chunk: Chunk) -> bool:
        """Without what only we have asked for."""
        choice = chunk["choices"][0]
        if self._shows_tokens:
            return True
        for name in (*_EXTRAS, "num_chunks"):
            choice.pop(name, None)
        says = choice.get("text") or choice.get("delta") or choice.get("logprobs")
        return bool(says or choice["finish_reason"] is not None)


def _num_answers(body: dict[str, Any]) -> int:
    """As far as it can be told; what makes no sense is refused by whoever is asked."""
    prompt, n = body.get("prompt"), body.get("n") or 1
    is_several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
    prompts = len(prompt) if isinstance(prompt, list) and is_several else 1
    return prompts * n if isinstance(n, int) and 0 < n <= 64 and prompts <= 64 else 1


async def events_of(chunks: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """The data of each server-sent event; comments are left out."""
    left = b""
    async for chunk in chunks:
        *events, left = (left + chunk).split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(b"data:"):
                    yield line[5:].strip()
