"""Where a draft's rows go: one row of each request for every place ahead of its newest token."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels import native_round
from outrider.kernels.dispatch import use_native_round, use_triton
from outrider.types import NULL_PAGE, Step


@dataclass(frozen=True)
class Ahead:
    """Place 0 is each request's newest token."""

    indices: Tensor  # [depth, B] cache indices
    locations: Tensor  # [depth, B] where they are written: page * page_size + offset
    request: Tensor  # [B] which request a row is of
    query_start: Tensor  # [B + 1] int32, where each row begins
    count: Tensor  # [B] how many tokens are drafted: depth, or 0
    around: Tensor | None = None  # [depth + 2, B] indices from the place before on, none below 0; None: not known

    def lagging(self, lag: int) -> Tensor:
        """The indices of the tokens `lag` places before, at least 0."""
        if lag == 1 and self.around is not None:
            return self.around[:-2]
        return (self.indices - lag).clamp(min=0) if lag else self.indices

    def following(self) -> Tensor:
        """The indices of the tokens after them."""
        return self.indices + 1 if self.around is None else self.around[2:]


def rows_ahead(step: Step, depth: int) -> Ahead:
    if use_triton(step.starts):
        from outrider.kernels.gpu import ahead as gpu

        return gpu.rows_ahead(step, depth)
    found = native_round.rows_ahead(step, depth) if use_native_round(step.starts) else rows_ahead_reference(step, depth)
    device, num_requests = step.starts.device, len(step.starts)
    return Ahead(
        *found,
        request=torch.arange(num_requests, device=device),
        query_start=torch.arange(num_requests + 1, dtype=torch.int32, device=device),
        count=torch.where(step.emits, depth, 0),
    )


def rows_ahead_reference(step: Step, depth: int) -> tuple[Tensor, Tensor]:
    """Indices and locations."""
    batch = step.batch
    request = torch.arange(len(batch.slots), device=batch.slots.device)
    indices = step.state.lengths[batch.slots] - 1 + torch.arange(depth, device=request.device)[:, None]
    page = batch.page_table[request, indices // batch.page_size].long()
    return indices, torch.where(step.emits, page, NULL_PAGE) * batch.page_size + indices % batch.page_size
