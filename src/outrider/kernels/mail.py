"""How a recorded round learns who is seated, and where it writes its outcome: memory of the host that the device reads
and writes itself, so that no copy stands between two rounds."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from outrider.kernels.dispatch import use_triton


@dataclass(frozen=True)
class Mail:
    """Rounds are counted on both sides, and round n finds its own in place n % R."""

    number: Tensor  # [1] on the device: of the round under way
    seats: Tensor  # [R, 4, B] on the host
    places: Tensor  # [R, 1 + 3 N] on the host: how many entries of page tables are new; slot, place and page of each
    outcomes: Tensor  # [R, N] on the host

    def tables(self, num_requests: int, num_columns: int) -> Tensor:
        """The outcomes of rounds of such a size: [R, B, columns]."""
        size = num_requests * num_columns
        return self.outcomes[:, :size].view(len(self.outcomes), num_requests, num_columns)

    def put(self, outcome: Tensor) -> Tensor:
        """Writes down an outcome [B, columns], where no kernel has; returns all tables of such a size."""
        tables = self.tables(*outcome.shape)
        tables[self.number % len(tables)] = outcome
        return tables


def take_seats(mail: Mail, seats: Tensor, page_table: Tensor) -> None:
    """The next round begins: who takes part in it goes to `seats` [4, B], new pages to the table [S, M]."""
    if use_triton(seats):
        from outrider.kernels.gpu import mail as gpu

        gpu.take_seats(mail, seats, page_table)
    else:
        take_seats_reference(mail, seats, page_table)


def take_seats_reference(mail: Mail, seats: Tensor, page_table: Tensor) -> None:
    mail.number.add_(1)
    place = int(mail.number) % len(mail.seats)
    seats.copy_(mail.seats[place, :, : seats.shape[1]])
    count, *_ = mail.places[place]
    slot, column, page = mail.places[place, 1 : 1 + 3 * int(count)].view(-1, 3).unbind(1)
    page_table[slot, column] = page.int()
