"""What the parts of a recorded round hand on to one another: tensors in fixed places, one set for all recordings, as
large as the largest of them needs. Only one round is on the device at a time."""

from __future__ import annotations

from torch import Tensor

from outrider.engine.cache import Cache
from outrider.engine.round import Pass
from outrider.engine.upload import upload_to
from outrider.kernels.round import Layout
from outrider.types import Guidance, Hidden, RoundShape, Seats, Verdict


class Buffers:
    def __init__(self, cache: Cache, vocab_size: int, largest: RoundShape, *, keeps_last: bool) -> None:
        """`largest`: no round has more seats, rows, judged rows or judged drafts. `keeps_last`: what came out of the
        last layer is looked at by whoever drafts."""
        self.largest = largest
        whole, number = cache.state.lengths, cache.carry
        num_seats, num_rows = largest.num_seats, largest.num_rows
        self._layout = Layout.empty(largest, cache.page_table)
        self._seats = whole.new_zeros(4 * num_seats)
        self._logits = number.new_zeros(largest.num_judged, vocab_size)
        num_kept = num_rows if keeps_last else 0
        self._last = number.new_zeros(num_kept, cache.shape.hidden_size)
        self._taps = number.new_zeros(num_rows, cache.shape.num_taps, cache.shape.hidden_size)
        self._tokens = whole.new_zeros(num_seats * (1 + largest.max_drafts))
        self._count, self._kept = whole.new_zeros(2, num_seats).unbind()
        self._head_width = 3 * (1 + largest.max_drafts)
        self._head = cache.page_table.new_zeros(num_seats * self._head_width)
        self._bits = cache.page_table.new_zeros(num_seats * (1 + largest.max_drafts), -(-vocab_size // 32))
        self._is_guided = False

    def seat_table(self, num_seats: int) -> Tensor:
        """[4, B]: see Seats."""
        return self._seats[: 4 * num_seats].view(4, num_seats)

    def seats(self, num_seats: int) -> Seats:
        return Seats.of(self.seat_table(num_seats))

    def guidance(self, num_seats: int) -> Guidance:
        return Guidance.of(self._head[: num_seats * self._head_width].view(num_seats, -1), self._bits)

    def guide(self, said: tuple[Tensor, Tensor] | None) -> None:
        """What grammars say about the round under way; None: nothing."""
        if said is not None:
            head, bits = said
            upload_to(self._head[: head.numel()], head.flatten())
            upload_to(self._bits[: len(bits)], bits)
        elif self._is_guided:
            self._head.zero_()
        self._is_guided = said is not None

    def layout(self, shape: RoundShape) -> Layout:
        return self._layout.within(shape)

    def logits(self, shape: RoundShape) -> Tensor:
        return self._logits[: shape.num_judged]

    def passed(self, shape: RoundShape) -> Pass:
        hidden = Hidden(self._last[: shape.num_rows], self._taps[: shape.num_rows])
        return Pass(hidden, self.logits(shape))

    def verdict(self, shape: RoundShape) -> Verdict:
        count, width = shape.num_seats, 1 + shape.max_drafts
        return Verdict(self._tokens[: count * width].view(count, width), self._count[:count], self._kept[:count])
