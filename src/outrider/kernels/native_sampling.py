"""The choice of a token in C: one call instead of noise for a whole vocabulary, and a sort of it."""

from __future__ import annotations

import struct

import torch
from torch import Tensor

from outrider.kernels.native import _address, _native
from outrider.types import Sampling

_DRAW = struct.Struct("@10q 3q 2d")  # draw_work of sampling.c


def draw(
    logits: Tensor,
    sampling: Sampling,
    rows: Tensor,
    positions: Tensor,
    ids: Tensor | None,
    *,
    least: float,
    sharpness: float,
) -> Tensor:
    """As sampling.choose(), with its filters. Rows whose temperature is at most `least` are greedy."""
    logits, rows, positions = logits.contiguous(), rows.contiguous(), positions.contiguous()
    num_rows, width = logits.shape
    assert width > 0, logits.shape
    filters = (0, 0, 0)
    if sampling.filtered:
        filters = _address(sampling.top_k, torch.int64), _address(sampling.top_p), _address(sampling.min_p)
    out = torch.empty(num_rows, dtype=torch.int64, device="cpu")
    work = _DRAW.pack(
        _address(logits),
        _address(rows, torch.int64, num_rows),
        _address(positions, torch.int64, num_rows),
        0 if ids is None else _address(ids, torch.int64, width),
        _address(sampling.temperature),
        _address(sampling.seed, torch.int64),
        *filters,
        out.data_ptr(),
        *(num_rows, width, torch.get_num_threads()),
        *(least, sharpness),
    )
    _native().draw(work)
    return out
