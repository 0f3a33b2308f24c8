"""Which replica a request should go to: the one that has most of its prompt in its pages, unless others are much less
busy. A prompt is known by names of its parts; each stands for all that comes before it too, as a page's name does."""

from __future__ import annotations

import hashlib
import threading
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson

PART = 64  # bytes of a text, at most
MAX_PARTS = 1024  # of a prompt: those who agree so far will find enough in common
MAX_NAMES = 2**17  # that are remembered of a replica
ENOUGH = 0.2  # share of a prompt that must be known somewhere, or it may go anywhere
SPREAD = 4  # requests more than the least busy one has, or half of those: then the one that knows a prompt is left
_FRAME = ("model", "tools", "tool_choice", "chat_template_kwargs", "reasoning_effort", "instructions", "cache_salt")


def names_of(body: Mapping[str, Any], owner: bytes = b"") -> list[bytes]:
    """Of a request's prompt, from its beginning on. `owner`: prompts of others share no pages with it."""
    frame = orjson.dumps([body.get(name) for name in _FRAME])
    link, names = hashlib.blake2b(frame + b"\n" + owner, digest_size=12).digest(), []
    for part in _parts(body):
        link = hashlib.blake2b(link + part, digest_size=12).digest()
        names.append(link)
        if len(names) == MAX_PARTS:
            break
    return names


def _parts(body: Mapping[str, Any]) -> Iterator[bytes]:
    """No message shares a part with the next: a conversation that goes on begins with the parts that it had."""
    for text in _texts(body):
        for begin in range(0, len(text), PART):
            yield text[begin : begin + PART]


def _texts(body: Mapping[str, Any]) -> Iterator[bytes]:
    """Without what the model itself has said: that follows from the rest, and clients write it in many ways."""
    for holder in ("messages", "input", "prompt"):
        given = body.get(holder)
        if isinstance(given, str):
            yield given.encode("utf-8", errors="replace")
        elif isinstance(given, list):
            if given and isinstance(given[0], int):
                yield orjson.dumps(given)
            else:
                yield from (orjson.dumps(each, option=orjson.OPT_SORT_KEYS) for each in given if not _is_answer(each))


def _is_answer(message: Any) -> bool:
    if not isinstance(message, Mapping):
        return False
    return message.get("role") == "assistant" or message.get("type") in ("function_call", "reasoning")


@dataclass
class _Known:
    names: OrderedDict[bytes, None] = field(default_factory=OrderedDict)  # the oldest first
    num_requests: int = 0  # under way


class Affinity:
    """What replicas have seen, and how busy they are. Threads may share it."""

    def __init__(self) -> None:
        self._replicas: dict[str, _Known] = {}
        self._lock = threading.Lock()

    def ranked(self, names: Sequence[bytes], replicas: Collection[str]) -> list[str]:
        """All of these, the best first."""
        with self._lock:
            known = {each: self._replicas.get(each) or _Known() for each in replicas}
            least = min((each.num_requests for each in known.values()), default=0)
            shares = {name: _num_known(each.names, names) / max(len(names), 1) for name, each in known.items()}
            most = max(shares.values(), default=0.0)

            def cost(name: str) -> tuple[float, int, str]:
                seen = known[name]
                excess = (seen.num_requests - least) / max(SPREAD, least / 2)
                return excess - (shares[name] / most if most >= ENOUGH else 0.0), len(seen.names), name

            return sorted(known, key=cost)

    def sent(self, replica: str, names: Sequence[bytes]) -> None:
        """A request went there: it will have its pages."""
        with self._lock:
            known = self._replicas.setdefault(replica, _Known())
            known.num_requests += 1
            for name in reversed(names):  # the beginning of a prompt is forgotten after its end
                known.names[name] = None
                known.names.move_to_end(name)
            while len(known.names) > MAX_NAMES:
                known.names.popitem(last=False)

    def ended(self, replica: str) -> None:
        with self._lock:
            if replica in self._replicas:
                known = self._replicas[replica]
                known.num_requests = max(known.num_requests - 1, 0)

    def forget(self, replica: str) -> None:
        """It has ended, and its pages with it."""
        with self._lock:
            if replica in self._replicas:
                self._replicas[replica].names.clear()

    def num_requests(self, replica: str) -> int:
        with self._lock:
            return self._replicas[replica].num_requests if replica in self._replicas else 0


def _num_known(known: Mapping[bytes, None], names: Sequence[bytes]) -> int:
    """How many of the first names are known. Whoever knows a name knows those before it, or has forgotten them last:
    so the place can be found by halving."""
    low, high = 0, len(names)
    while low < high:
        middle = (low + high) // 2
        if names[middle] in known:
            low = middle + 1
        else:
            high = middle
    return low
