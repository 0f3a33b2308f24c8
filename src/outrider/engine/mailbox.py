"""What host and device tell each other of recorded rounds: seats and new pages go one way, outcomes come the other.
Places are used in turn, and none again before its round is over."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.kernels.mail import Mail

# Places, and how many seats add one more. Few rounds are under way at a time; but what is recorded meanwhile takes some
# too, and so does what a drafter catches up on (graphs.py: 32 seats of 64 rows at once). And rounds that nobody wants
# any more are not waited for.
LEAST_ROUNDS, SEATS_PER_ROUND = 32, 16


class Mailbox:
    def __init__(self, device: torch.device, num_seats: int, width: int) -> None:
        """`width`: numbers that an outcome has for each seat, at most."""
        is_cuda = device.type == "cuda"

        def new(*size: int) -> Tensor:
            return torch.zeros(size, dtype=torch.long, pin_memory=is_cuda)

        self._num_rounds = num_rounds = LEAST_ROUNDS + num_seats // SEATS_PER_ROUND
        self.max_pages = 64 + 2 * num_seats  # that a round can be told of
        self.mail = Mail(
            number=torch.zeros(1, dtype=torch.long, device=device),
            seats=new(num_rounds, 4, num_seats),
            places=new(num_rounds, 1 + 3 * self.max_pages),
            outcomes=new(num_rounds, num_seats * width),
        )
        self._number = 0  # of the last round that was told
        # what has happened once the round of a place is over; none where the device is the host
        self._over = [torch.cuda.Event() for _ in range(num_rounds)] if is_cuda else []
        self._is_ended = [True] * num_rounds

    def tell(self, table: Tensor, pages: Sequence[tuple[int, int, int]] = ()) -> int:
        """Who takes part in the next round to begin, [4, B], and new entries of page tables: slot, place, page. Returns
        the round's place. Waits only where the device is so many rounds behind."""
        self._number += 1
        place = self._number % self._num_rounds
        if self._over and self._is_ended[place]:
            self._over[place].synchronize()
        elif self._over:  # somebody gave it up in the middle
            torch.cuda.synchronize()
        self._is_ended[place] = False
        self.mail.seats[place, :, : table.shape[1]] = table
        told = self.mail.places[place]
        told[: 1 + 3 * len(pages)] = torch.tensor([len(pages), *itertools.chain.from_iterable(pages)])
        return place

    def ended(self, place: int) -> torch.cuda.Event | None:
        """All of a round has been sent to the device. Its outcome is good once this has happened; None: it has."""
        self._is_ended[place] = True
        if not self._over:
            return None
        self._over[place].record()
        return self._over[place]

    def repeat(self, count: int) -> None:
        """The last round will begin so many times more."""
        if self._over:
            torch.cuda.synchronize()
        self.mail.seats[:] = self.mail.seats[self._number % self._num_rounds].clone()
        self.mail.places[:, 0] = 0
        self._number += count
