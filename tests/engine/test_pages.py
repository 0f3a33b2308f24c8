"""The page pool under random use: every page is free or used, never both, and reuse gives the right pages."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from outrider.engine.pages import PagePool, page_hashes

PAGE = 4


class PoolMachine(RuleBasedStateMachine):
    """Texts come, reuse what is known, name what they fill, and go. A model remembers what every page holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(12)
        self.holders: list[list[int]] = []
        self.content: dict[int, bytes] = {}

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=24))
    def arrive(self, tokens: list[int]) -> None:
        names = page_hashes(tokens, PAGE)
        reused = self.pool.match(names)
        for page, name in zip(reused, names, strict=False):
            assert self.content[page] == name, "a reused page holds another text"
        fresh = self.pool.allocate(-(-len(tokens) // PAGE) - len(reused))
        if fresh is None:
            self.pool.release(reused)
            return
        pages = reused + fresh
        for page, name in zip(pages, names, strict=False):
            self.content[page] = name
            self.pool.name(page, name)
        for page in fresh[len(names) - len(reused) :]:
            self.content[page] = b"partial"
        self.holders.append(pages)

    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        if self.holders:
            self.pool.release(self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1))))

    @invariant()
    def books_balance(self) -> None:
        self.pool.check()
        used = {page for pages in self.holders for page in pages}
        assert self.pool.num_free == self.pool.capacity - len(used)
        assert 0 not in used


PoolMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
TestPool = PoolMachine.TestCase


def test_a_known_prefix_is_found_and_a_changed_one_is_not() -> None:
    pool = PagePool(8)
    names = page_hashes(list(range(12)), PAGE)
    pages = pool.allocate(3)
    assert pages is not None
    for page, name in zip(pages, names, strict=True):
        pool.name(page, name)
    pool.release(pages)
    assert pool.match(page_hashes([*range(8), 99, 98, 97, 96], PAGE)) == pages[:2]
    assert pool.match(page_hashes([7, *range(1, 12)], PAGE)) == []


def test_hashes_go_on_from_a_parent() -> None:
    tokens = list(range(20))
    whole = page_hashes(tokens, PAGE)
    assert page_hashes(tokens, PAGE, 2, whole[1]) == whole[2:]
    assert len(page_hashes(tokens[:19], PAGE)) == 4


def test_the_oldest_free_page_goes_first() -> None:
    """Of those that somebody may find."""
    pool = PagePool(5)
    first, second = pool.allocate(1), pool.allocate(2)
    assert first is not None
    assert second is not None
    for page, name in zip(first + second, page_hashes(list(range(12)), PAGE), strict=True):
        pool.name(page, name)
    pool.release(first)
    pool.release(second)
    assert pool.allocate(4) == [4, *first, *reversed(second)]
    assert pool.allocate(1) is None


def test_what_nobody_can_find_is_taken_before_memory_that_was_never_used() -> None:
    pool = PagePool(9)
    pages = pool.allocate(4)
    assert pages == [1, 2, 3, 4]
    for page, name in zip(pages, page_hashes(list(range(8)), PAGE), strict=False):
        pool.name(page, name)
    pool.release(pages)
    assert pool.allocate(3) == [3, 4, 5], "those without a name, then a fresh one"
    pool.release([3, 4, 5])
    pool.forget([1])
    assert pool.allocate(8) == [1, 3, 4, 5, 6, 7, 8, 2]
