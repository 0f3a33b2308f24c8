"""The next round's seats and pages, read by the device from the host's memory: one launch, where a copy between two
recordings takes several times as long."""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu import launch

if TYPE_CHECKING:
    from outrider.kernels.mail import Mail

BLOCK = 32  # entries of page tables that are read at a time


@launch.jit_for_any_size
def _take_seats(
    number, told, places, seats, page_table, room, num_seats, places_row, table_row,
    NUM_ROUNDS: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_P: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
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
    own = places + (now % NUM_ROUNDS) * places_row
    count = tl.load(own, volatile=True).to(tl.int32)
    at = tl.arange(0, BLOCK_P)
    # a way to the host takes longer than all else: the first are asked for before it is known how many there are
    slot, column, page = _entry(own, at, 1 + 3 * at < places_row)
    tl.store(seats + field * num_seats + seat, found, mask=exists)
    tl.store(page_table + slot * table_row + column, page.to(tl.int32), mask=at < count)
    for begin in range(BLOCK_P, count, BLOCK_P):
        slot, column, page = _entry(own, begin + at, begin + at < count)
        tl.store(page_table + slot * table_row + column, page.to(tl.int32), mask=begin + at < count)


@triton.jit
def _entry(places, number, exists):
    entry = places + 1 + 3 * number
    slot = tl.load(entry, mask=exists, other=0, volatile=True)
    column = tl.load(entry + 1, mask=exists, other=0, volatile=True)
    return slot, column, tl.load(entry + 2, mask=exists, other=0, volatile=True)


def take_seats(mail: Mail, seats: Tensor, page_table: Tensor) -> None:
    num_seats, early = seats.shape[1], launch.early(seats)
    _take_seats[(1,)](
        mail.number, mail.seats, mail.places, seats, page_table, mail.seats.shape[2], num_seats,
        mail.places.stride(0), page_table.stride(0),
        NUM_ROUNDS=len(mail.seats), BLOCK_B=triton.next_power_of_2(num_seats), BLOCK_P=BLOCK, EARLY=early, num_warps=1,
        **launch.options(early),
    )  # fmt: skip
