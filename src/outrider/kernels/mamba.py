"""Mamba-2 between its two projections: a causal convolution of every channel, then every head's recurrent state.
Row after row, never in chunks, so that a row's result does not depend on what is computed with it."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels import native
from outrider.kernels.dispatch import use_native, use_triton
from outrider.types import Batch

_MAMBA = struct.Struct("@19q 7q 6q")  # mamba_work of mamba.c

States = tuple[Tensor, Tensor]  # of the convolution [S, E, kernel - 1, C] and of the heads [S, E, heads, N, D]
Snapshots = tuple[Tensor, ...]  # the same two, [C, ...]


@dataclass(frozen=True)
class MambaWeights:
    """C channels go through the convolution: those of the heads (heads * D), then B and C of every group (2 N)."""

    conv: Tensor  # [kernel, C], the newest input last
    conv_bias: Tensor | None  # [C]
    step_bias: Tensor  # [heads] float32
    rate: Tensor  # [heads] float32, negative: how fast a head forgets
    skip: Tensor  # [heads] float32
    num_groups: int


def mamba_reference(
    projected: Tensor, states: States, batch: Batch, weights: MambaWeights, snapshots: Snapshots | None = None
) -> Tensor:
    """Requests side by side, padded to the longest: slow, obvious, on any device without asking the host anything."""
    assert batch.recurrence is not None
    read, kept_rows, first = batch.recurrence.read, batch.recurrence.rows, batch.recurrence.first
    starts = batch.query_start[:-1].long()
    kept = kept_rows - starts[:, None]  # [B, E] rows of the request
    places = batch.slots[:, None], first + torch.arange(kept.shape[1], device=kept.device)
    _, _, num_heads, state_size, head_dim = states[1].shape
    inner = num_heads * head_dim
    row = torch.arange(len(projected), device=projected.device) - starts[batch.request]
    row = row.clamp(max=batch.max_rows)  # rows that only fill up share one place more
    num_rows = batch.max_rows + 1
    padded = projected.new_zeros(len(starts), num_rows, projected.shape[1] - inner, dtype=torch.float32)
    padded[batch.request, row] = projected[:, inner:].float()
    inputs, steps = padded.split([padded.shape[-1] - num_heads, num_heads], dim=-1)

    past = states[0].shape[2]
    history = torch.cat([states[0][batch.slots, read], inputs], dim=1)  # [B, past + R, C]
    window = kept[..., None] + 1 + torch.arange(past, device=kept.device)
    each = torch.arange(len(starts), device=kept.device)[:, None, None]
    wanted, targets = _wanted(batch)  # [B, W] rows of the request, and where their states go
    if snapshots is not None:
        then = history[each, wanted[..., None].clamp(min=0) + 1 + torch.arange(past, device=kept.device)]
        snapshots[0][targets] = torch.where((wanted >= 0)[..., None, None], then, snapshots[0][targets])
        taken = snapshots[1][targets]  # [B, W, heads, N, D]
    states[0][places] = history[each, window]
    taps = [weights.conv[i].float() * history[:, i : i + num_rows] for i in range(past + 1)]
    mixed = torch.stack(taps).sum(0)
    mixed = F.silu(mixed if weights.conv_bias is None else mixed + weights.conv_bias.float())

    wide = weights.num_groups * state_size
    x, b, c = mixed.split([inner, wide, wide], dim=-1)
    x = x.unflatten(-1, (num_heads, head_dim))  # [B, R, heads, D]
    per_group = num_heads // weights.num_groups
    b, c = (each.unflatten(-1, (-1, state_size)).repeat_interleave(per_group, dim=2) for each in (b, c))
    steps = F.softplus(steps + weights.step_bias)  # [B, R, heads]
    state = states[1][batch.slots, read]  # [B, heads, N, D]
    saved = states[1][places]  # [B, E, heads, N, D]
    out = torch.zeros_like(x)
    for r in range(num_rows):
        step = steps[:, r, :, None, None]
        state = state * torch.exp(step * weights.rate[:, None, None]) + step * b[:, r, ..., None] * x[:, r, :, None]
        out[:, r] = (state * c[:, r, ..., None]).sum(2) + weights.skip[:, None] * x[:, r]
        saved = torch.where((kept == r)[..., None, None, None], state[:, None], saved)
        if snapshots is not None:
            taken = torch.where((wanted == r)[..., None, None, None], state[:, None], taken)
    states[1][places] = saved
    if snapshots is not None:
        snapshots[1][targets] = taken
    return out[batch.request, row].flatten(1)


def _wanted(batch: Batch) -> tuple[Tensor, Tensor]:
    """Which rows of each request snapshots are wanted after, -1: none of this pass, and in which places; [B, W]."""
    assert batch.recurrence is not None
    if batch.recurrence.wanted is None:
        nothing = batch.slots.new_zeros(len(batch.slots), 0)
        return nothing, nothing
    ends, places = batch.recurrence.wanted[:, :, batch.slots].transpose(1, 2)
    starts, counts = batch.query_start[:-1].long(), batch.query_start.diff()[:, None]
    rows = ends - 1 - batch.indices[starts.clamp(max=len(batch.indices) - 1)][:, None]
    return torch.where((rows >= 0) & (rows < counts), rows, -1), places


def mamba_native(
    projected: Tensor, states: States, batch: Batch, weights: MambaWeights, snapshots: Snapshots | None = None
) -> Tensor:
    assert batch.recurrence is not None
    wanted = batch.recurrence.wanted if snapshots is not None else None
    num_wanted = 0 if wanted is None else wanted.shape[1]
    num_rows, num_requests = len(projected), len(batch.slots)
    num_slots, num_entries, num_heads, state_size, head_dim = states[1].shape
    kernel, conv_size = weights.conv.shape
    inner, num_kept = num_heads * head_dim, batch.recurrence.rows.shape[1]
    assert conv_size == inner + 2 * weights.num_groups * state_size, (weights.conv.shape, states[1].shape)
    assert projected.shape[1] == inner + conv_size + num_heads, (projected.shape, states[1].shape)
    assert batch.recurrence.first + num_kept <= num_entries, (batch.recurrence, num_entries)
    mixed, steps = projected.new_empty(num_rows, conv_size), projected.new_empty(num_rows, num_heads, 2)
    out = projected.new_empty(num_rows, inner)
    work = _MAMBA.pack(
        native._address(projected),
        native._address(weights.conv),
        0 if weights.conv_bias is None else native._address(weights.conv_bias, size=conv_size),
        *(native._address(each, size=num_heads) for each in (weights.step_bias, weights.rate, weights.skip)),
        native._address(batch.query_start, torch.int32, num_requests + 1),
        native._address(batch.slots, torch.int64),
        native._address(batch.recurrence.read, torch.int64, num_requests),
        native._address(batch.recurrence.rows, torch.int64, num_requests * num_kept),
        native._address(states[0], size=num_slots * num_entries * (kernel - 1) * conv_size),
        native._address(states[1]),
        mixed.data_ptr(),
        steps.data_ptr(),
        out.data_ptr(),
        native._address(batch.indices, torch.int64, num_rows),
        0 if wanted is None else native._address(wanted, torch.int64, 2 * num_wanted * num_slots),
        *((0, 0) if wanted is None or snapshots is None else map(native._address, snapshots)),
        num_rows,
        num_requests,
        num_entries,
        num_kept,
        batch.recurrence.first,
        num_wanted,
        num_slots,
        kernel,
        num_heads,
        head_dim,
        state_size,
        weights.num_groups,
        torch.get_num_threads(),
    )
    native._native().mamba(work)
    return out


def mamba(
    projected: Tensor, states: States, batch: Batch, weights: MambaWeights, snapshots: Snapshots | None = None
) -> Tensor:
    """projected [T, heads * D | C | heads] (gate, channels, steps) -> [T, heads * D] float32, not gated yet. The states
    that the batch asks for are kept, and snapshots taken where they are wanted."""
    if use_native(projected):
        return mamba_native(projected, states, batch, weights, snapshots)
    if use_triton(projected):
        from outrider.kernels.gpu import mamba as gpu

        return gpu.mamba(projected, states, batch, weights, snapshots)
    return mamba_reference(projected, states, batch, weights, snapshots)
