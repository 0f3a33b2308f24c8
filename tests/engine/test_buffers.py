"""What the parts of a recorded round hand on: nothing of one round is left in the next."""

from __future__ import annotations

import pytest
import torch

from outrider.engine.buffers import Buffers
from outrider.engine.cache import Cache, CacheShape
from outrider.engine.mailbox import LEAST_ROUNDS, Mailbox
from outrider.types import RoundShape

LARGEST = RoundShape(4, 24, 12, 2, 2, 24, 40)
SMALL = RoundShape(2, 6, 6, 2, 2, 3, 40)


def make() -> Buffers:
    shape = CacheShape(num_pages=8, page_size=8, num_slots=5, max_len=40, num_taps=2, hidden_size=6, lookahead=2)
    return Buffers(Cache(shape, [], torch.device("cpu"), torch.float32), 70, LARGEST, keeps_last=True)


def test_what_grammars_say_is_about_one_round() -> None:
    buffers = make()
    head = torch.arange(1, 19, dtype=torch.int32).view(2, 9)
    buffers.guide((head, torch.ones(3, 3, dtype=torch.int32)))
    found = buffers.guidance(2)
    assert found.masks.tolist() == head[:, :3].tolist()
    assert found.num_forced.tolist() == head[:, 3].tolist()
    assert found.forced.tolist() == head[:, 4:].tolist()
    assert found.bits[:3].tolist() == [[1] * 3] * 3
    buffers.guide(None)
    for num_seats in (2, 4):
        assert not buffers.guidance(num_seats).num_forced.any()
        assert not buffers.guidance(num_seats).masks.any()


def test_parts_of_a_round_meet_in_the_same_memory() -> None:
    """Whatever its size, and of rows, whatever their number: the choice of tokens looks at judged rows alone."""
    buffers = make()
    wide = RoundShape(2, 24, 6, 2, 0, 24, 40)
    assert buffers.logits(SMALL).data_ptr() == buffers.logits(wide).data_ptr()
    assert buffers.layout(SMALL).rows.input_ids.data_ptr() == buffers.layout(wide).rows.input_ids.data_ptr()
    assert buffers.seats(2).slots.data_ptr() == buffers.seats(4).slots.data_ptr()
    buffers.verdict(SMALL).tokens.copy_(torch.arange(6).view(2, 3))
    assert buffers.verdict(wide).tokens.tolist() == [[0, 1, 2], [3, 4, 5]]
    passed = buffers.passed(SMALL)
    assert (passed.hidden.last.shape, passed.hidden.taps.shape) == ((6, 6), (6, 2, 6))
    assert passed.logits.shape == (6, 70)


class Over:
    """Instead of a CUDA event."""

    def __init__(self, log: list[str], name: str) -> None:
        self.log, self.name = log, name

    def record(self) -> None:
        self.log.append(f"record {self.name}")

    def synchronize(self) -> None:
        self.log.append(f"wait {self.name}")


def test_a_place_is_used_again_when_its_round_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where a round was given up in the middle, so that nothing says when it is over."""
    box, log, nobody = Mailbox(torch.device("cpu"), 3, 8), [], torch.zeros(4, 3, dtype=torch.long)
    box._over = [Over(log, str(place)) for place in range(LEAST_ROUNDS)]  # type: ignore[misc]
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("wait for all"))
    places = [box.tell(nobody) for _ in range(LEAST_ROUNDS)]
    for place in places:
        if place != places[2]:
            assert box.ended(place) is box._over[place]
    log.clear()
    assert [box.tell(nobody) for _ in range(LEAST_ROUNDS)] == places
    waits = ["wait for all" if place == places[2] else f"wait {place}" for place in places]
    assert log == waits
