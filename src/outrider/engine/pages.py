"""Who owns which page: reference counts, and reuse of pages whose tokens come again. A page's name is the hash of all
tokens up to its end, so equal prefixes share pages. Pages that nobody can find are taken first, as their memory is in
use already; then those that never were used, as far as they are ample; then those that have been free for longest."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence

from outrider.types import NULL_PAGE

ROOT = b"outrider"
ROOT_UNFOLLOWED = b"outrider, not seen by the drafter"


def root_of(tenant: str | None, *, followed: bool = True) -> bytes:
    """Where the names of a tenant's pages begin: nobody finds pages of another's, not even by their speed. Pages that
    the drafter has not seen (`followed` false) are found by those alone who do without it; they find others too."""
    root = ROOT if followed else ROOT_UNFOLLOWED
    return root if tenant is None else hashlib.sha256(root + tenant.encode()).digest()


def page_hashes(tokens: Sequence[int], page_size: int, start: int = 0, parent: bytes = ROOT) -> list[bytes]:
    """Names of the full pages of `tokens` from page number `start` on; `parent` is the name of the page before."""
    names = []
    for begin in range(start * page_size, len(tokens) - page_size + 1, page_size):
        parent = hashlib.sha256(parent + array("q", tokens[begin : begin + page_size]).tobytes()).digest()
        names.append(parent)
    return names


class PagePool:
    """Pages 1..num_pages - 1 (page 0 is the dump). A free page keeps its name until someone needs the room; `forgets`
    is told of names that nobody will find again. Where memory is taken as it is used, `num_ample` pages are enough for
    those who do not come again: above, a text that has ended gives up its pages before memory is taken that never was
    used. Should somebody look for them, twice as many are ample from then on."""

    def __init__(
        self, num_pages: int, forgets: Callable[[bytes], None] = lambda name: None, num_ample: int | None = None
    ) -> None:
        self.num_pages = num_pages
        self._forgets = forgets
        self._references = [0] * num_pages
        self._num_used = 1  # pages from here on never were
        self._num_ample = num_pages if num_ample is None else num_ample
        self._free: OrderedDict[int, None] = OrderedDict()  # of the others
        self._page_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}
        self._given_up: dict[bytes, None] = {}  # names whose pages were taken though others never were used

    @property
    def num_free(self) -> int:
        return len(self._free) + self.num_pages - self._num_used

    @property
    def capacity(self) -> int:
        return self.num_pages - 1

    def allocate(self, count: int) -> list[int] | None:
        """Fresh pages, or None (and nothing taken) where there are not enough."""
        if count > self.num_free:
            return None
        pages = [self._take() for _ in range(count)]
        for page in pages:
            self._references[page] = 1
        return pages

    def _take(self) -> int:
        """The free page that will be missed least."""
        page = next(iter(self._free), None)
        name = self._name_of.get(page) if page is not None else None
        is_left = self._num_used < self.num_pages
        if page is None or (name is not None and is_left and self._num_used <= self._num_ample):
            self._num_used += 1
            return self._num_used - 1
        del self._free[page]
        self._forget(page)
        if name is not None and is_left:
            self._given_up[name] = None
            if len(self._given_up) > self.num_pages:
                del self._given_up[next(iter(self._given_up))]
        return page

    def match(self, names: Sequence[bytes]) -> list[int]:
        """The longest run of known pages for these names, taken into use."""
        pages = []
        for name in names:
            page = self._page_of.get(name)
            if page is None:
                break
            if self._references[page] == 0:
                del self._free[page]
            self._references[page] += 1
            pages.append(page)
        missed = [name for name in names[len(pages) :] if name in self._given_up]
        for name in missed:  # once: it may have to wait, and ask again
            del self._given_up[name]
        if missed:
            self._num_ample = min(2 * self._num_ample, self.num_pages)
        return pages

    def num_known(self, names: Sequence[bytes]) -> int:
        """How many of them match() would find."""
        return next((number for number, name in enumerate(names) if name not in self._page_of), len(names))

    def name(self, page: int, name: bytes) -> None:
        """Makes a full page findable. Where another page has the name already, that one stays the known one."""
        if name not in self._page_of and page not in self._name_of:
            self._page_of[name] = page
            self._name_of[page] = name

    def release(self, pages: Sequence[int]) -> None:
        """Gives pages back, the last first: the end of a text is the least likely to come again."""
        for page in reversed(pages):
            assert page != NULL_PAGE
            assert self._references[page] > 0, f"page {page} is released twice"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free[page] = None
                if page not in self._name_of:
                    self._free.move_to_end(page, last=False)

    def forget(self, pages: Sequence[int]) -> None:
        """Nobody will find these pages again; those who use them go on doing so."""
        for page in pages:
            self._forget(page)
            if page in self._free:
                self._free.move_to_end(page, last=False)

    def check(self) -> None:
        """Raises if the books do not balance; cheap enough for tests after every step."""
        for page in range(1, self.num_pages):
            is_free = page in self._free or page >= self._num_used
            assert (self._references[page] == 0) == is_free, f"page {page} is neither free nor used"
        assert all(self._page_of[name] == page for page, name in self._name_of.items())
        assert len(self._page_of) == len(self._name_of)

    def _forget(self, page: int) -> None:
        name = self._name_of.pop(page, None)
        if name is not None:
            del self._page_of[name]
            self._forgets(name)
