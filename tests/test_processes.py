"""What processes that serve have in common."""

import gc

from outrider.processes import freeze_heap


def test_what_a_server_has_made_is_not_looked_through_again() -> None:
    made = [[number] for number in range(200_000)]
    try:
        freeze_heap()
        assert gc.get_freeze_count() > len(made)
        assert len(gc.get_objects()) < len(made) / 10
    finally:
        gc.unfreeze()
