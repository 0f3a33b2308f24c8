"""Prefix caching: which pages of earlier texts a request begins with, and what its own are called, so that others find
them. Pages that the drafter has not seen have names of their own: of use to those alone who do without it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.engine.pages import PagePool, page_hashes, root_of
from outrider.engine.request import Request
from outrider.engine.snapshots import Snapshots


@dataclass
class PrefixStats:
    queried: int = 0
    hit: int = 0


@dataclass(frozen=True)
class Known:
    """Names of the pages that a request could reuse."""

    seen: list[bytes]  # if the drafter follows its text
    any: list[bytes]  # if not: those that the drafter has seen, then others
    num_unseen: int  # rows in pages that are there, and that the drafter has not seen


class Prefixes:
    def __init__(self, pool: PagePool, page_size: int, snapshots: Snapshots | None, *, enabled: bool) -> None:
        """`snapshots`: where layers are recurrent, so that pages alone are of no use."""
        self.pool, self._page_size, self._snapshots, self._enabled = pool, page_size, snapshots, enabled
        self._has_unseen = False  # pages that the drafter has not seen have been named
        self.stats = PrefixStats()

    def look_up(self, request: Request) -> Known:
        seen = self._reusable(request, followed=True)
        unseen = self._reusable(request, followed=False) if self._has_unseen else []
        known = self.pool.num_known(seen)
        mixed = [*seen[:known], *unseen[known:]]
        return Known(seen, mixed, (self.pool.num_known(mixed) - known) * self._page_size)

    def take(self, request: Request, known: Known) -> list[int]:
        """Known pages, taken into use: as far as recurrent layers can go on from them, where there are some."""
        names = known.seen if request.is_followed else known.any
        found = self.pool.match(names)
        if self._snapshots is not None:
            count = self._snapshots.find(request, names[: len(found)])
            self.pool.release(found[count:])
            found = found[:count]
        return found

    def begin(self, request: Request, known: Known, num_reused: int) -> None:
        """It has been given so many pages that were known, and others."""
        names = known.seen if request.is_followed else self._reusable(request, followed=False)
        request.page_names = names[:num_reused]
        if not request.num_preemptions:
            request.num_cached = min(num_reused * self._page_size, len(request.prompt))
            self.stats.queried += len(request.prompt)
            self.stats.hit += request.num_cached

    def _reusable(self, request: Request, *, followed: bool) -> list[bytes]:
        """The last token must be run for its logits; so must a prompt whose log-probabilities are wanted."""
        if not self._enabled or request.params.prompt_logprobs is not None or request.recompute:
            return []
        names = self._names(request, len(request.tokens) - 1, followed=followed)
        while request.whole(0, len(names) * self._page_size) != len(names) * self._page_size:
            names.pop()  # the last page ends inside an image
        return names

    def _names(self, request: Request, num_tokens: int, *, followed: bool) -> list[bytes]:
        root = root_of(request.params.tenant, followed=followed)
        return page_hashes(request.named_tokens[:num_tokens], self._page_size, 0, root)

    def name(self, request: Request) -> None:
        """Pages that target and drafter have filled can be found by other requests."""
        size, known = self._page_size, len(request.page_names)
        num_full = (request.num_followed if request.is_followed else request.num_computed) // size
        if num_full <= known or not self._enabled:
            return
        root = root_of(request.params.tenant, followed=request.is_followed)
        parent = request.page_names[-1] if known else root
        names = page_hashes(request.named_tokens[: num_full * size], size, known, parent)
        self._give(request, names)
        if self._snapshots is not None:
            self._snapshots.settle(request, known, names)
        request.page_names += names
        self._has_unseen = self._has_unseen or not request.is_followed

    def name_all(self, request: Request) -> None:
        """The same at its end, with pages that the drafter, at rest, has not seen to."""
        self.name(request)
        known, num_full = len(request.page_names), request.num_computed // self._page_size
        if request.is_followed and num_full > known and self._enabled:
            self._give(request, self._names(request, num_full * self._page_size, followed=False)[known:])
            self._has_unseen = True

    def _give(self, request: Request, names: Sequence[bytes]) -> None:
        """To the first of its pages that have none."""
        for page, name in zip(request.pages[len(request.page_names) :], names, strict=False):
            self.pool.name(page, name)

    def forget(self, request: Request) -> None:
        """What is remembered of it is found by nobody."""
        self.pool.forget(request.pages)
        if self._snapshots is not None:  # also those that go by the names of others' pages
            self._snapshots.forget(request.page_names)
