"""Made-up acceptance in one launch, so that rounds which are measured with it cost what others do; engine/verify.py
says what it computes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu import launch
from outrider.types import Step


@launch.jit_for_any_size
def _accept_first(
    choice, judged, requests, slots, following, judged_start, starts, num_rows, num_drafts, tokens, draft_count, out,
    tokens_row, count, certain, rest, SPREAD: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    fits = at < count
    request = tl.load(requests + tl.load(judged + at, mask=fits, other=0))
    slot = tl.load(slots + at, mask=fits, other=0)
    place = at - tl.load(judged_start + request)
    draft = tl.load(tokens + slot * tokens_row + tl.load(following + at, mask=fits, other=0))
    length = tl.load(starts + request) + tl.load(num_rows + request) - tl.load(num_drafts + request)
    turn = length.to(tl.float32) * SPREAD
    is_right = place < certain + (turn - tl.floor(turn) < rest).to(tl.int32)
    agreed = tl.where(is_right, draft, tl.abs(draft - 1))
    own = tl.load(choice + at, mask=fits, other=0)
    tl.store(out + at, tl.where(place < tl.load(draft_count + slot), agreed, own), mask=fits)


def accept_first(choice: Tensor, step: Step, certain: int, rest: float, spread: float) -> Tensor:
    state, batch, early = step.state, step.batch, launch.early(choice)
    out = torch.empty_like(choice)
    _accept_first[(triton.cdiv(len(choice), 128),)](
        choice, step.judged, batch.request, step.judged_slots, step.judged_next, step.judged_start, step.starts,
        step.num_rows, step.num_drafts, state.tokens, state.draft_count, out,
        state.tokens.stride(0), len(choice), certain, rest, SPREAD=spread, BLOCK=128, EARLY=early,
        **launch.options(early),
    )  # fmt: skip
    return out
