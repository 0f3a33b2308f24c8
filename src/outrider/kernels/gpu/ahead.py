"""Where a draft's rows go, in one launch; kernels/ahead.py says what it computes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from outrider.kernels.ahead import Ahead
from outrider.kernels.gpu import launch
from outrider.types import Step


@launch.jit_for_any_size
def _rows_ahead(
    slots, lengths, emits, page_table, around, locations, requests, query_start, count,
    table_row, page_size, num_requests, depth, BLOCK_B: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program n has the places n - 1 of all requests."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    number = tl.program_id(0)
    seat = tl.arange(0, BLOCK_B)
    exists = seat < num_requests
    slot = tl.load(slots + seat, mask=exists, other=0)
    says = tl.load(emits + seat, mask=exists, other=0) != 0
    index = tl.maximum(tl.load(lengths + slot, mask=exists, other=1) - 2 + number, 0)
    tl.store(around + number * num_requests + seat, index, mask=exists)
    if (number > 0) & (number <= depth):
        at = page_table + seat.to(tl.int64) * table_row + index // page_size
        page = tl.load(at, mask=exists & says, other=0).to(tl.int64)
        tl.store(locations + (number - 1) * num_requests + seat, page * page_size + index % page_size, mask=exists)
    if number == 0:
        tl.store(requests + seat, seat.to(tl.int64), mask=exists)
        tl.store(query_start + seat, seat, mask=exists)
        tl.store(query_start + 1 + seat, seat + 1, mask=seat == num_requests - 1)
        tl.store(count + seat, tl.where(says, depth, 0).to(tl.int64), mask=exists)


def rows_ahead(step: Step, depth: int) -> Ahead:
    batch, slots, early = step.batch, step.batch.slots, launch.early(step.starts)
    num_requests = len(slots)
    around, locations = slots.new_empty(depth + 2, num_requests), slots.new_empty(depth, num_requests)
    request, count = slots.new_empty(num_requests), slots.new_empty(num_requests)
    query_start = slots.new_empty(num_requests + 1, dtype=torch.int32)
    _rows_ahead[(depth + 2,)](
        slots, step.state.lengths, step.emits, batch.page_table, around, locations, request, query_start, count,
        batch.page_table.stride(0), batch.page_size, num_requests, depth,
        BLOCK_B=triton.next_power_of_2(num_requests), EARLY=early, num_warps=1, **launch.options(early),
    )  # fmt: skip
    return Ahead(around[1:-1], locations, request, query_start, count, around)
