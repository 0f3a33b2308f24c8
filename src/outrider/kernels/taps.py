"""Taps, the target's residual streams that a drafter reads: which of them outlive a round, and how they reach rows that
read them later."""

from __future__ import annotations

import torch
from torch import Tensor

from outrider.kernels import native_round
from outrider.kernels.dispatch import use_native, use_triton
from outrider.types import NULL_PAGE, Batch, Step, Verdict


def keep_taps(step: Step, taps: Tensor, carried: Tensor, verdict: Verdict, kept: tuple[Tensor, Tensor]) -> None:
    """Those that later rounds need: taps [T, n, H] of each request's last kept rows go to the slots' carry
    [S, C, n, H], those of the last rows of a page to its tails [P, N, n, H]. `kept`: carry and tails; `carried`
    [B, C, n, H]: the carry as it was."""
    if use_triton(taps):
        from outrider.kernels.gpu import taps as gpu

        gpu.keep_taps(step, taps, carried, verdict, kept)
    elif use_native(taps):
        native_round.keep_taps(step, taps, carried, verdict, kept)
    else:
        keep_taps_reference(step, taps, carried, verdict, kept)


def keep_taps_reference(
    step: Step, taps: Tensor, carried: Tensor, verdict: Verdict, kept: tuple[Tensor, Tensor]
) -> None:
    carry, tails = kept
    batch, count = step.batch, carried.shape[1]
    first = batch.query_start[:-1].long()
    source = torch.cat([carried.flatten(0, 1), taps])  # request after request, then row after row

    def upto(request: Tensor, row: Tensor, num: int) -> Tensor:
        """The taps [..., num, n, H] of the `num` rows that end with this row of the request."""
        rows = row[:, None] - torch.arange(num - 1, -1, -1, device=row.device)
        before = request[:, None] * count + count + rows
        return source[torch.where(rows < 0, before, len(first) * count + first[request, None] + rows)]

    carry[batch.slots] = upto(torch.arange(len(first), device=first.device), verdict.kept - 1, count)
    row = torch.arange(len(batch.request), device=first.device)
    inside = row < batch.query_start[-1]
    ends_page = inside & ((batch.indices + 1) % batch.page_size == 0)
    stays = batch.indices < (step.starts + verdict.kept)[batch.request]
    page = batch.page_table[batch.request, batch.indices // batch.page_size].long()
    row = torch.where(inside, row - first[batch.request], 0)
    tails[torch.where(ends_page & stays, page, NULL_PAGE)] = upto(batch.request, row, tails.shape[1])


def keep_missed(batch: Batch, taps: Tensor, missed: Tensor) -> None:
    """Taps [T, n, H] of rows that the drafter does not see: `missed` [S, M, n, H] has those of a slot's last rows."""
    if use_triton(taps):
        from outrider.kernels.gpu import taps as gpu

        gpu.keep_missed(batch, taps, missed)
    elif use_native(taps):
        native_round.keep_missed(batch, taps, missed)
    else:
        keep_missed_reference(batch, taps, missed)


def keep_missed_reference(batch: Batch, taps: Tensor, missed: Tensor) -> None:
    missed[batch.row_slots, batch.indices % missed.shape[1]] = taps


def shift_taps(step: Step, taps: Tensor, carried: Tensor, rows: Batch, back: int) -> Tensor:
    """The taps [T, n, H] of the token before each of the extension's rows; the first ones were carried [B, C, n, H].
    Rows beyond the target's own repeat its last."""
    if use_triton(taps):
        from outrider.kernels.gpu import taps as gpu

        return gpu.shift_taps(step, taps, carried, rows, back)
    if use_native(taps):
        return native_round.shift_taps(step, taps, carried, rows, back)
    return shift_taps_reference(step, taps, carried, rows, back)


def shift_taps_reference(step: Step, taps: Tensor, carried: Tensor, rows: Batch, back: int) -> Tensor:
    num_requests, count = carried.shape[:2]
    source = torch.cat([carried.flatten(0, 1), taps])  # request after request, then row after row
    request = rows.request
    offset = torch.arange(len(request), device=request.device) - rows.query_start[request].long()
    before = torch.minimum(offset - back - 1, step.num_rows[request] - 1)  # row of the target's pass
    own = num_requests * count + step.batch.query_start[request].long() + before
    return source[torch.where(before < 0, request * count + count + before, own)]
