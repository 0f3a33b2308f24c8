"""A product whose inputs several programs share, in one launch: each leaves the sums of its part, and whoever is the
last adds them up, part after part, so that a sum does not depend on who that is. Attention finds out who is the last in
the same way."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_COUNTERS = 8192
_made: dict[torch.device, Tensor] = {}


@triton.jit
def place_of(row, column, num_columns):
    """Of sums in a matrix [T, N]. row and column broadcast to their shape."""
    return row.to(tl.int64) * num_columns + column


@triton.jit
def is_last(counter_at, parts):
    """Whether all other parts have been left, as this program's has."""
    tl.debug_barrier()  # all of this program's threads have written before it is counted
    last = tl.atomic_add(counter_at, 1, sem="acq_rel") == parts - 1
    if last:
        tl.store(counter_at, 0)
    return last


@triton.jit
def put_together(own, part, sums, row, column, fits, num_rows, num_columns, PARTS: tl.constexpr):
    """The sums of all parts, of which [PARTS, T, N] were left, and part number `part` is at hand. All of them are asked
    for before any is added."""
    at = sums + place_of(row, column, num_columns)
    size = tl.cast(num_rows, tl.int64) * num_columns
    found = ()
    for number in tl.static_range(PARTS):
        was_left = fits & (row * 0 + part != number)
        found = found + (tl.load(at + number * size, mask=was_left, other=own, cache_modifier=".cg"),)  # type: ignore[assignment] # noqa: RUF005
    total = found[0]  # type: ignore[misc]
    for number in tl.static_range(1, PARTS):
        total += found[number]
    return total


def counters_for(device: torch.device, count: int) -> Tensor | None:
    """Zero before and after every launch; one launch at a time may use them. None: they are too few, or would have to
    be made, and so zeroed, within a recording, of which other recordings know nothing."""
    if device not in _made:
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return None
        _made[device] = torch.zeros(MAX_COUNTERS, dtype=torch.int32, device=device)
    return _made[device] if count <= MAX_COUNTERS else None
