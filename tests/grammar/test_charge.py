"""What is charged to an answer: computing of its own, and not what the collector of garbage takes meanwhile."""

import gc
import time

from outrider.grammar.charge import seconds_computed


def test_garbage_is_nobodys() -> None:
    kept = [[number] for number in range(500_000)]
    begin, charged = time.thread_time(), seconds_computed()
    for _ in range(3):
        gc.collect()
    taken, charged = time.thread_time() - begin, seconds_computed() - charged
    assert len(kept) == 500_000
    assert taken > 0.01
    assert charged < taken / 10


def test_computing_is_charged() -> None:
    begin, charged = time.thread_time(), seconds_computed()
    while time.thread_time() - begin < 0.05:
        pass
    assert seconds_computed() - charged > 0.049
