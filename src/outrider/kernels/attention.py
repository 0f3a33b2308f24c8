"""Attention of a batch's rows over the pages of their requests: causal by cache index, windowed, softcapped, with
sinks, and both ways within blocks."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from outrider.kernels import native
from outrider.kernels.dispatch import use_native, use_triton
from outrider.kernels.rope import UNSCALED, PageScales
from outrider.types import Batch

EXACT_PARTS = 16  # programs that share a request's keys on a GPU, whatever its company


@dataclass(frozen=True)
class AttentionOptions:
    scale: float
    window: int = 0  # keys a row sees, itself included; 0: all
    softcap: float = 0.0
    bidirectional: bool = False  # within an image a row sees what comes after it too
    scales: PageScales = UNSCALED  # of keys and values in pages of 8 bits
    exact: bool = False  # on a GPU too, a row's bits do not depend on its company


def paged_attention_reference(
    q: Tensor, pages: tuple[Tensor, Tensor], batch: Batch, options: AttentionOptions, sinks: Tensor | None = None
) -> Tensor:
    """Gathers every request's pages and masks: slow, obvious, on any device without asking the host anything."""
    last_key = batch.last_key if options.bidirectional else None
    num_pages = -(-batch.max_len // batch.page_size)
    table = batch.page_table[:, :num_pages].long()  # [B, M]
    scales = (options.scales.key, options.scales.value)
    keys, values = (p[table].flatten(1, 2).float() * s for p, s in zip(pages, scales, strict=True))
    # [B, L, kv heads, D]
    groups = q.shape[1] // keys.shape[2]
    keys, values = (x.repeat_interleave(groups, dim=2) for x in (keys, values))

    row = torch.arange(len(q), device=q.device) - batch.query_start[batch.request].long()
    row = row.clamp(max=batch.max_rows)  # rows that only fill up share one place more
    padded = torch.zeros(len(table), batch.max_rows + 1, *q.shape[1:], device=q.device)
    padded[batch.request, row] = q.float()

    def in_rows(values: Tensor) -> Tensor:
        return torch.full(padded.shape[:2], -1, dtype=torch.long, device=q.device).index_put(
            (batch.request, row), values
        )[..., None]

    index = in_rows(batch.indices)
    last = index if last_key is None else in_rows(last_key)

    scores = torch.einsum("brhd,blhd->bhrl", padded, keys) * options.scale
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    key_index = torch.arange(keys.shape[1], device=q.device)
    seen = (key_index <= last) & (key_index >= batch.first_key)  # [B, R, L]
    if options.window:
        seen &= key_index > index - options.window
    scores = scores.masked_fill(~seen[:, None], -torch.inf)
    if sinks is not None:  # they take weight and bring no value
        scores = torch.cat([scores, sinks.float()[:, None, None].expand(*scores.shape[:3], 1)], dim=-1)
    weights = scores.softmax(-1).nan_to_num(0.0)[..., : keys.shape[1]]  # a row that sees nothing gives zeros
    return torch.einsum("bhrl,blhd->brhd", weights, values)[batch.request, row].to(q.dtype)


def paged_attention(
    q: Tensor, pages: tuple[Tensor, Tensor], batch: Batch, options: AttentionOptions, sinks: Tensor | None = None
) -> Tensor:
    """q [T, heads, D], pages [P, page_size, kv heads, D] and [..., D_v], sinks [heads] -> [T, heads, D_v]."""
    if use_native(q):
        return native.paged_attention(
            q,
            *pages,
            batch.page_table,
            batch.query_start,
            batch.indices,
            options.scale,
            window=options.window,
            softcap=options.softcap,
            sinks=sinks,
            first_key=batch.first_key,
            last_key=batch.last_key if options.bidirectional else None,
        )
    if use_triton(q):
        from outrider.kernels.gpu import attention as gpu
        from outrider.kernels.gpu import lone_rows
        from outrider.kernels.gpu.attention_work import Keys

        keys = Keys(
            page_table=batch.page_table,
            query_start=batch.query_start,
            indices=batch.indices,
            last_key=batch.last_key if options.bidirectional else None,
            first_key=batch.first_key,
            page_size=batch.page_size,
            max_rows=batch.max_rows,
            memo=batch.memo,
        )
        scale = options.scale * options.scales.key
        given: dict[str, Any] = {
            "window": options.window,
            "softcap": options.softcap,
            "sinks": sinks,
            "value_scale": options.scales.value,
        }
        if not options.exact and lone_rows.fits(q, pages, keys):
            return lone_rows.attend_rows(q, pages, keys, scale, **given)
        return gpu.paged_attention(q, pages, keys, scale, parts=EXACT_PARTS if options.exact else None, **given)
    return paged_attention_reference(q, pages, batch, options, sinks)
