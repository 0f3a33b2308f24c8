"""The next round's seats, read by the device from the host's memory: one launch, where a copy between two recordings
takes several times as long."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu import launch

if TYPE_CHECKING:
    from outrider.kernels.mail import Mail


@launch.jit_for_any_size
def _take_seats(
    number, told, seats, room, num_seats, NUM_ROUNDS: tl.constexpr, BLOCK_B: tl.constexpr, EARLY: tl.constexpr
):
    """One warp: the number is read by all of its threads before one of them counts on."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    now = tl.load(number) + 1
    tl.store(number, now)
    field, seat = tl.arange(0, 4)[:, None], tl.arange(0, BLOCK_B)[None, :]
    exists = (seat < num_seats) & (field < 4)
    place = told + (now % NUM_ROUNDS) * 4 * room + field * room + seat
    found = tl.load(place, mask=exists, other=0, volatile=True)  # the host has written it since it was last read
    tl.store(seats + field * num_seats + seat, found, mask=exists)


def take_seats(mail: Mail, seats: Tensor) -> None:
    num_seats, early = seats.shape[1], launch.early(seats)
    _take_seats[(1,)](
        mail.number, mail.seats, seats, mail.seats.shape[2], num_seats,
        NUM_ROUNDS=len(mail.seats), BLOCK_B=triton.next_power_of_2(num_seats), EARLY=early, num_warps=1,
        **launch.options(early),
    )  # fmt: skip
