"""Taps on a GPU: see kernels/taps.py."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu import launch
from outrider.types import Batch, Step, Verdict

BLOCK = 1024  # numbers of a row that are copied at a time


@triton.jit
def _tap_at(taps, carried, request, first, row, num_carried, size, place, fits):
    """Of a row of a request; those before its first were carried."""
    if row < 0:
        value = tl.load(carried + (request * num_carried + num_carried + row) * size + place, mask=fits)
    else:
        value = tl.load(taps + (first + row) * size + place, mask=fits)
    return value


@triton.jit(do_not_specialize=["num_requests", "num_carried", "num_tails"])
def _keep_taps(
    taps, carried, slots, query_start, num_kept, requests, indices, starts, page_table, carry, tails,
    num_requests, table_row, page_size, size, num_carried, num_tails, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The first num_requests * num_carried programs each have a carried row, the others each a row of the pass, which
    is kept if it is the last of a page."""
    launch.await_last(EARLY)
    number = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    fits = place < size
    if number < num_requests * num_carried:
        request, which = number // num_carried, number % num_carried
        first = tl.load(query_start + request).to(tl.int64)
        row = tl.load(num_kept + request) - num_carried + which
        value = _tap_at(taps, carried, request, first, row, num_carried, size, place, fits)
        tl.store(carry + (tl.load(slots + request) * num_carried + which) * size + place, value, mask=fits)
    else:
        at = number - num_requests * num_carried
        request = tl.load(requests + at)
        index = tl.load(indices + at)
        inside = at < tl.load(query_start + num_requests)
        stays = index < tl.load(starts + request) + tl.load(num_kept + request)
        if inside & stays & ((index + 1) % page_size == 0):
            first = tl.load(query_start + request).to(tl.int64)
            page = tl.load(page_table + request * table_row + index // page_size).to(tl.int64)
            for tail in range(num_tails):
                row = at - first - num_tails + 1 + tail
                value = _tap_at(taps, carried, request, first, row, num_carried, size, place, fits)
                tl.store(tails + (page * num_tails + tail) * size + place, value, mask=fits)


def keep_taps(step: Step, taps: Tensor, carried: Tensor, verdict: Verdict, kept: tuple[Tensor, Tensor]) -> None:
    carry, tails = kept
    batch, early = step.batch, launch.early(taps)
    size, num_requests = taps[0].numel(), len(batch.slots)
    num_carried, num_tails = carry.shape[1], tails.shape[1]
    num_programs = num_requests * num_carried + (len(batch.request) if num_tails else 0)
    if not num_programs:
        return
    _keep_taps[(num_programs, triton.cdiv(size, BLOCK))](
        taps.contiguous(), carried.contiguous(), batch.slots, batch.query_start, verdict.kept, batch.request,
        batch.indices, step.starts, batch.page_table, carry, tails,
        num_requests, batch.page_table.stride(0), batch.page_size, size, num_carried, num_tails,
        BLOCK=BLOCK, EARLY=early, **launch.options(early),
    )  # fmt: skip


@triton.jit
def _keep_missed(taps, row_slots, indices, missed, size, room, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """A program has a row."""
    launch.await_last(EARLY)
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    fits = place < size
    at = tl.load(row_slots + row) * room + tl.load(indices + row) % room
    tl.store(missed + at * size + place, tl.load(taps + row * size + place, mask=fits), mask=fits)


def keep_missed(batch: Batch, taps: Tensor, missed: Tensor) -> None:
    early, size = launch.early(taps), taps[0].numel() if len(taps) else 0
    if size:
        _keep_missed[(len(taps), triton.cdiv(size, BLOCK))](
            taps.contiguous(), batch.row_slots, batch.indices, missed, size, missed.shape[1],
            BLOCK=BLOCK, EARLY=early, **launch.options(early),
        )  # fmt: skip


@triton.jit(do_not_specialize=["num_carried", "back"])
def _shift_taps(
    taps, carried, requests, new_start, old_start, num_rows, out, size, num_carried, back,
    BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    launch.await_last(EARLY)
    row = tl.program_id(0).to(tl.int64)
    request = tl.load(requests + row)
    offset = row - tl.load(new_start + request)
    before = tl.minimum(offset - back - 1, tl.load(num_rows + request) - 1)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    fits = place < size
    first = tl.load(old_start + request).to(tl.int64)
    value = _tap_at(taps, carried, request, first, before, num_carried, size, place, fits)
    tl.store(out + row * size + place, value, mask=fits)


def shift_taps(step: Step, taps: Tensor, carried: Tensor, rows: Batch, back: int) -> Tensor:
    total, size, early = len(rows.request), taps[0].numel(), launch.early(taps)
    out = taps.new_empty(total, *taps.shape[1:])
    _shift_taps[(total, triton.cdiv(size, BLOCK))](
        taps.contiguous(), carried.contiguous(), rows.request, rows.query_start, step.batch.query_start, step.num_rows,
        out, size, carried.shape[1], back, BLOCK=BLOCK, EARLY=early, **launch.options(early),
    )  # fmt: skip
    return out
