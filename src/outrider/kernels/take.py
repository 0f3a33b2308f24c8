"""Rows of a table by number: embeddings, the rows that a head reads, what slots have kept."""

import torch
import torch.nn.functional as F
from torch import Tensor

from outrider.kernels.dispatch import use_triton


def take_rows(table: Tensor, index: Tensor, scale: float = 1.0) -> Tensor:
    """table [N, ...], index [...] -> [..., ...]; times `scale`, which is rounded to the table's own precision first."""
    if use_triton(table) and table.is_contiguous():
        from outrider.kernels.gpu import take as gpu

        return gpu.take_rows(table, index, 1.0 if scale == 1.0 else torch.tensor(scale, dtype=table.dtype).item())
    return take_rows_reference(table, index, scale)


def take_rows_reference(table: Tensor, index: Tensor, scale: float = 1.0) -> Tensor:
    rows = F.embedding(index, table) if table.dim() == 2 else table[index]
    return rows if scale == 1.0 else rows * torch.tensor(scale, dtype=rows.dtype)
