"""Mamba-2 between its two projections: one launch for the convolution, one for the states, however many rows there are.
Row after row, never in chunks, so that a row's result does not depend on what is computed with it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu import launch
from outrider.kernels.mamba import MambaWeights, Snapshots, States
from outrider.types import Batch

BLOCK_ROWS = 16  # of a program of the convolution; no shorter than its past
STATE_SIZE = 2048  # numbers of the state that a program holds


@triton.jit
def _inputs(channels, history, behind, channel, num_rows, num_channels, row_stride, PAST: tl.constexpr):
    """The convolution's inputs at rows of a request, those before its first from what its slot remembers."""
    fits = (channel < num_channels)[None, :]
    rows = behind.to(tl.int64)[:, None]
    now = tl.load(
        channels + rows * row_stride + channel[None, :], mask=((rows >= 0) & (rows < num_rows)) & fits, other=0.0
    ).to(tl.float32)
    if PAST > 0:
        before = tl.load(
            history + (rows + PAST) * num_channels + channel[None, :],
            mask=((rows < 0) & (rows >= -PAST)) & fits, other=0.0,
        )  # fmt: skip
        now = tl.where(rows < 0, before, now)
    return now


@triton.jit
def _soonest(wanted, slot, first_index, begin, end, num_slots, WANTED: tl.constexpr, BLOCK_WANTED: tl.constexpr):
    """The first of a request's rows after which a snapshot is wanted; where there is none, its end."""
    number = tl.arange(0, BLOCK_WANTED)
    until = tl.load(wanted + number * num_slots + slot, mask=number < WANTED, other=0)
    row = begin + until - 1 - first_index
    return tl.min(tl.where((row >= begin) & (row < end), row, end), 0)


@triton.jit(do_not_specialize=["num_kept", "first", "num_slots"])
def _convolve(
    channels, conv, bias, states, query_start, slots, read, kept_rows, mixed, indices, wanted, snapshots,
    num_channels, row_stride, slot_stride, entry_stride, num_kept, first, num_slots,
    PAST: tl.constexpr, HAS_BIAS: tl.constexpr, LANES: tl.constexpr, BLOCK_PAST: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, WANTED: tl.constexpr, BLOCK_WANTED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A few channels of a few rows of one request. The program with the first rows is the only one that looks at what
    the slot remembers, and it writes what must be remembered: perhaps in the same place, so after all its reading."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    block, request = tl.program_id(1), tl.program_id(2)
    begin = tl.load(query_start + request).to(tl.int64)
    num_rows = tl.load(query_start + request + 1).to(tl.int64) - begin
    if (block > 0) & (block * BLOCK_R >= num_rows):
        return
    channel = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    fits = channel < num_channels
    row = block * BLOCK_R + tl.arange(0, BLOCK_R)
    slot = tl.load(slots + request).to(tl.int64)
    history = states + slot * slot_stride + tl.load(read + request).to(tl.int64) * entry_stride
    own = channels + begin * row_stride
    total = tl.zeros((BLOCK_R, BLOCK_C), dtype=tl.float32)
    for tap in tl.static_range(PAST + 1):
        weight = tl.load(conv + tap * num_channels + channel, mask=fits, other=0.0).to(tl.float32)
        value = _inputs(own, history, row - PAST + tap, channel, num_rows, num_channels, row_stride, PAST)
        total += weight[None, :] * value
    if HAS_BIAS:
        total += tl.load(bias + channel, mask=fits, other=0.0).to(tl.float32)[None, :]
    total = total / (1 + tl.exp(-total))
    at = mixed + (begin + row)[:, None] * num_channels + channel[None, :]
    tl.store(at, total, mask=(row < num_rows)[:, None] & fits[None, :])
    if PAST > 0:  # noqa: SIM102 (one is known when this is compiled)
        if block == 0:
            lane = tl.arange(0, LANES)
            number, place = lane // PAST, lane % PAST
            kept = tl.load(kept_rows + request * num_kept + number, mask=number < num_kept, other=-2) - begin
            exists = (number < num_kept) & (kept >= -1) & (kept < num_rows)
            behind = kept + 1 + place - PAST
            recent = _inputs(own, history, behind, channel, num_rows, num_channels, row_stride, PAST)
            if WANTED > 0:
                end = begin + num_rows
                first_index = tl.load(indices + begin, mask=num_rows > 0, other=0)
                soonest = _soonest(wanted, slot, first_index, begin, end, num_slots, WANTED, BLOCK_WANTED)
                if soonest < end:
                    for each in range(WANTED):
                        after = tl.load(wanted + each * num_slots + slot) - 1 - first_index
                        if (after >= 0) & (after < num_rows):
                            past = tl.arange(0, BLOCK_PAST)
                            then = _inputs(
                                own, history, after + 1 + past - PAST, channel, num_rows, num_channels, row_stride, PAST
                            )
                            to = tl.load(wanted + (WANTED + each) * num_slots + slot) * entry_stride
                            cell = snapshots + to + past[:, None] * num_channels + channel[None, :]
                            tl.store(cell, then, mask=(past < PAST)[:, None] & fits[None, :])
            tl.debug_barrier()  # another thread may not have read yet what this one writes over
            target = states + slot * slot_stride + (first + number).to(tl.int64) * entry_stride + place * num_channels
            tl.store(target[:, None] + channel[None, :], recent, mask=exists[:, None] & fits[None, :])


@triton.jit
def _load_row(x_at, b_at, c_at, step_at, row, end, d_fits, n_fits, num_channels, row_stride):
    """After the last row, the last row again: nobody will look at it."""
    row = tl.maximum(tl.minimum(row, end - 1), 0)
    x = tl.load(x_at + row * num_channels, mask=d_fits, other=0.0)
    b = tl.load(b_at + row * num_channels, mask=n_fits, other=0.0)
    c = tl.load(c_at + row * num_channels, mask=n_fits, other=0.0)
    return x, b, c, tl.load(step_at + row * row_stride).to(tl.float32)


@triton.jit(do_not_specialize=["num_kept", "first", "num_slots"])
def _scan(
    mixed, steps, step_bias, rates, skips, states, query_start, slots, read, kept_rows, out, indices, wanted, snapshots,
    num_channels, row_stride, slot_stride, entry_stride, num_heads, per_group, num_groups, num_kept, first, num_slots,
    SIZE: tl.constexpr, DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_KEPT: tl.constexpr,
    WANTED: tl.constexpr, BLOCK_WANTED: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """A few channels of one head of one request, row after row, the state held all along."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    head, request = tl.program_id(1), tl.program_id(2)
    begin = tl.load(query_start + request).to(tl.int64)
    end = tl.load(query_start + request + 1).to(tl.int64)
    n = tl.arange(0, BLOCK_N)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    n_fits, d_fits = n < SIZE, d < DIM
    fits = n_fits[:, None] & d_fits[None, :]
    owner = tl.load(slots + request).to(tl.int64)
    slot = states + owner * slot_stride
    cell = (head * SIZE + n)[:, None] * DIM + d[None, :]
    state = tl.load(slot + tl.load(read + request).to(tl.int64) * entry_stride + cell, mask=fits, other=0.0)
    tl.debug_barrier()  # the same place may be written below, by another thread
    each = tl.arange(0, BLOCK_KEPT)
    kept = tl.load(kept_rows + request * num_kept + each, mask=each < num_kept, other=9223372036854775807)
    earliest = tl.min(tl.where(kept >= begin, kept, 9223372036854775807), 0)  # no row before it is kept
    soonest = end  # the next row after which a snapshot is wanted
    first_index = end * 0
    if WANTED > 0:
        first_index = tl.load(indices + begin, mask=begin < end, other=0)
        soonest = _soonest(wanted, owner, first_index, begin, end, num_slots, WANTED, BLOCK_WANTED)
    bias = tl.load(step_bias + head).to(tl.float32)
    rate = tl.load(rates + head).to(tl.float32)
    skip = tl.load(skips + head).to(tl.float32)
    x_at = mixed + head * DIM + d
    b_at = mixed + num_heads * DIM + (head // per_group) * SIZE + n
    c_at = b_at + num_groups * SIZE
    step_at = steps + head
    x, b, c, raw = _load_row(x_at, b_at, c_at, step_at, begin, end, d_fits, n_fits, num_channels, row_stride)
    for row in range(begin, end):
        # the next row is on its way while this one is computed
        next_x, next_b, next_c, next_raw = _load_row(
            x_at, b_at, c_at, step_at, row + 1, end, d_fits, n_fits, num_channels, row_stride
        )
        raw += bias
        # softplus, max(raw, 0) + log(1 + small), by a series that is exact to the last bits where `small` is tiny
        small = tl.exp(-tl.abs(raw))
        s = small / (2 + small)
        z = s * s
        series = 1 + z * (1.0 / 3 + z * (1.0 / 5 + z * (1.0 / 7 + z * (1.0 / 9 + z * (1.0 / 11 + z * (1.0 / 13))))))
        step = tl.maximum(raw, 0.0) + 2 * s * series
        state = state * tl.exp(step * rate) + b[:, None] * (step * x)[None, :]
        y = tl.sum(state * c[:, None], 0) + skip * x
        tl.store(out + (row * num_heads + head) * DIM + d, y, mask=d_fits)
        if row >= earliest:
            for number in range(num_kept):
                if tl.load(kept_rows + request * num_kept + number) == row:
                    tl.store(slot + (first + number).to(tl.int64) * entry_stride + cell, state, mask=fits)
        if WANTED > 0:  # noqa: SIM102 (one is known when this is compiled)
            if row == soonest:
                soonest = end
                for place in range(WANTED):
                    after = begin + tl.load(wanted + place * num_slots + owner) - 1 - first_index
                    if after == row:
                        to = tl.load(wanted + (WANTED + place) * num_slots + owner) * entry_stride
                        tl.store(snapshots + to + cell, state, mask=fits)
                    soonest = tl.where(after > row, tl.minimum(after, soonest), soonest)
        x, b, c, raw = next_x, next_b, next_c, next_raw


def mamba(
    projected: Tensor, states: States, batch: Batch, weights: MambaWeights, snapshots: Snapshots | None = None
) -> Tensor:
    """projected [T, heads * D | C | heads] (gate, channels, steps) -> [T, heads * D] float32, not gated yet. The states
    that the batch asks for are kept, and snapshots taken where they are wanted."""
    assert batch.recurrence is not None
    projected = projected if projected.stride(1) == 1 else projected.contiguous()
    slots, read, first = batch.slots.contiguous(), batch.recurrence.read.contiguous(), batch.recurrence.first
    kept_rows = batch.recurrence.rows.contiguous()
    num_rows, num_requests, num_kept = len(projected), len(slots), kept_rows.shape[1]
    histories, memories = states
    _, num_entries, num_heads, size, dim = memories.shape
    kernel, num_channels = weights.conv.shape
    inner, past = num_heads * dim, kernel - 1
    assert num_channels == inner + 2 * weights.num_groups * size, (weights.conv.shape, memories.shape)
    assert first + num_kept <= num_entries, (batch.recurrence, num_entries)
    assert past <= BLOCK_ROWS, "only the program with a request's first rows knows what was before them"
    assert histories[0, 0].is_contiguous()
    assert memories[0, 0].is_contiguous()
    mixed = torch.empty(num_rows, num_channels, dtype=torch.float32, device=projected.device)
    out = torch.empty(num_rows, inner, dtype=torch.float32, device=projected.device)
    if not num_rows:
        return out
    wanted, num_wanted = slots, 0
    taken: Snapshots = states
    if batch.recurrence.wanted is not None and snapshots is not None:
        wanted, num_wanted, taken = batch.recurrence.wanted, batch.recurrence.wanted.shape[1], snapshots
        assert wanted.is_contiguous()
        assert taken[0].stride(0) == histories.stride(1)
        assert taken[1].stride(0) == memories.stride(1)
    block_wanted = triton.next_power_of_2(max(num_wanted, 1))
    early = launch.early(projected)
    lanes = triton.next_power_of_2(max(num_kept * past, 1))
    block_c = min(max(8192 // lanes, 16), 128)
    _convolve[(triton.cdiv(num_channels, block_c), triton.cdiv(batch.max_rows, BLOCK_ROWS), num_requests)](
        projected[:, inner:], weights.conv.contiguous(), mixed if weights.conv_bias is None else weights.conv_bias,
        histories, batch.query_start, slots, read, kept_rows, mixed, batch.indices, wanted, taken[0],
        num_channels, projected.stride(0), histories.stride(0), histories.stride(1), num_kept, first, len(histories),
        PAST=past, HAS_BIAS=weights.conv_bias is not None, LANES=lanes, BLOCK_PAST=triton.next_power_of_2(max(past, 1)),
        BLOCK_R=BLOCK_ROWS, BLOCK_C=block_c, WANTED=num_wanted, BLOCK_WANTED=block_wanted,
        EARLY=early, num_warps=4, **launch.options(early),
    )  # fmt: skip
    block_n = triton.next_power_of_2(size)
    block_d = min(triton.next_power_of_2(dim), max(STATE_SIZE // block_n, 4))
    # one warp: sums over the state need no other's word
    _scan[(triton.cdiv(dim, block_d), num_heads, num_requests)](
        mixed, projected[:, inner + num_channels :], weights.step_bias, weights.rate, weights.skip, memories,
        batch.query_start, slots, read, kept_rows, out, batch.indices, wanted, taken[1],
        num_channels, projected.stride(0), memories.stride(0), memories.stride(1),
        num_heads, num_heads // weights.num_groups, weights.num_groups, num_kept, first, len(memories),
        SIZE=size, DIM=dim, BLOCK_N=block_n, BLOCK_D=block_d, BLOCK_KEPT=triton.next_power_of_2(max(num_kept, 1)),
        WANTED=num_wanted, BLOCK_WANTED=block_wanted,
        EARLY=early, num_warps=1, **launch.options(early),
    )  # fmt: skip
    return out
