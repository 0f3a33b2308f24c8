"""The page pool under random use: every page is free or used, never both, and reuse gives the right pages."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from outrider.engine.pages import PagePool, page_hashes

PAGE = 4


class PoolMachine(RuleBasedStateMachine):
    """Texts come, reuse what is known, name what they fill, and go. A model remembers what every page holds."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(12)
        self.holders: list[list[int]] = []
        self.content: dict[int, bytes] = {}

    @initialize(num_ample=st.none() | st.integers(1, 12))
    def begin(self, num_ample: int | None) -> None:
        self.pool = PagePool(12, num_ample=num_ample)

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


def of_text(pool: PagePool, tokens: list[int]) -> tuple[int, list[int]]:
    """A text comes, is computed and ends: how many of its pages were known, and those it had."""
    names = page_hashes(tokens, PAGE)
    known = pool.match(names)
    pages = known + (pool.allocate(len(names) - len(known)) or [])
    for page, name in zip(pages, names, strict=True):
        pool.name(page, name)
    pool.release(pages)
    return len(known), pages


def test_texts_that_do_not_come_again_take_no_more_memory_than_is_ample() -> None:
    pool = PagePool(100, num_ample=6)
    used = [of_text(pool, [number] * 2 * PAGE)[1] for number in range(20)]
    assert {page for pages in used for page in pages} == set(range(1, 7))
    assert of_text(pool, [19] * 3 * PAGE)[0] == 2, "the last one is still there"
    longer = pool.allocate(9)
    assert longer is not None, "who runs has whatever there is"
    assert set(longer) > set(range(1, 7))
    assert pool.num_free == 99 - 9
    pool.release(longer)
    assert of_text(pool, [7] * 9 * PAGE)[1] == longer, "which others have then, too"


def test_texts_that_come_again_are_given_more() -> None:
    pool = PagePool(100, num_ample=6)
    texts = [[number] * 2 * PAGE for number in range(20)]
    first, second, third = ([of_text(pool, text)[0] for text in texts] for _ in range(3))
    assert first == [0] * 20
    assert second == [0] * 17 + [2] * 3, "of the first who came back nothing was kept"
    assert third == [2] * 20
    assert pool._num_ample <= pool.num_pages
    pool.check()


def test_a_beginning_that_all_share_stays() -> None:
    pool = PagePool(100, num_ample=8)
    shared = list(range(100, 100 + 4 * PAGE))
    found = [of_text(pool, [*shared, *[number] * 2 * PAGE])[0] for number in range(30)]
    assert found == [0] + [4] * 29
    assert pool.num_free == 99
    assert pool._num_used == 9
