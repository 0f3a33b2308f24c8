"""A drafter's logits against the target's, one program a row: the loss, and where the logits were, its gradient."""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096


@triton.jit
def _capped(logits, cap, CAPPED: tl.constexpr):
    if CAPPED:
        return cap * (1 - 2 / (1 + tl.exp(2 * logits / cap)))
    return logits


@triton.jit
def _compare(
    student, teacher, losses, surprises, agreements, size, stride, teacher_stride, soft, hard, cap, fading,
    CAPPED: tl.constexpr, LK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Looks at a row twice: first for both sums, both best tokens and both divergences, then for the loss' slope;
    between them, for what both distributions share, where that matters."""
    row = tl.program_id(0).to(tl.int64)
    student += row * stride
    teacher += row * teacher_stride
    place = tl.arange(0, BLOCK)
    highest, total, first = float("-inf"), 0.0, 0
    taught_highest, taught_total, cross, best = float("-inf"), 0.0, 0.0, 0
    for begin in range(0, size, BLOCK):
        fits = begin + place < size
        said = tl.load(student + begin + place, mask=fits, other=float("-inf")).to(tl.float32)
        said = tl.where(fits, _capped(said, cap, CAPPED), float("-inf"))
        taught = tl.load(teacher + begin + place, mask=fits, other=float("-inf")).to(tl.float32)
        top, taught_top = tl.max(said, 0), tl.max(taught, 0)
        first = tl.where(top > highest, begin + tl.argmax(said, 0), first)
        best = tl.where(taught_top > taught_highest, begin + tl.argmax(taught, 0), best)
        better, taught_better = tl.maximum(highest, top), tl.maximum(taught_highest, taught_top)
        total = total * tl.exp(highest - better) + tl.sum(tl.exp(said - better))
        chance, smaller = tl.exp(taught - taught_better), tl.exp(taught_highest - taught_better)
        taught_total = taught_total * smaller + tl.sum(chance)
        cross = cross * smaller + tl.sum(tl.where(fits, chance * (taught - said), 0.0))
        highest, taught_highest = better, taught_better
    log_sum, taught_sum = highest + tl.log(total), taught_highest + tl.log(taught_total)
    surprise = log_sum - _capped(tl.load(student + best).to(tl.float32), cap, CAPPED)
    apart = cross / taught_total - taught_sum + log_sum
    share, covered = 1.0, 0.0  # of the loss that is the divergence; of the drafter's distribution, where it is lower
    if LK:
        over = 0.0  # of the target's distribution, where the drafter's is not lower
        for begin in range(0, size, BLOCK):
            said = tl.load(student + begin + place, mask=begin + place < size, other=float("-inf")).to(tl.float32)
            taught = tl.load(teacher + begin + place, mask=begin + place < size, other=float("-inf")).to(tl.float32)
            said = tl.where(begin + place < size, _capped(said, cap, CAPPED), float("-inf"))
            chance, wanted = tl.exp(said - log_sum), tl.exp(taught - taught_sum)
            covered += tl.sum(tl.where(chance < wanted, chance, 0.0))
            over += tl.sum(tl.where(chance < wanted, 0.0, wanted))
        share = tl.exp(-fading * (covered + over))
        apart = share * apart + (1 - share) * (1 - covered - over)
    tl.store(losses + row, soft * apart + hard * surprise)
    tl.store(surprises + row, surprise)
    tl.store(agreements + row, first == best)
    for begin in range(0, size, BLOCK):
        fits = begin + place < size
        said = _capped(tl.load(student + begin + place, mask=fits, other=0.0).to(tl.float32), cap, CAPPED)
        taught = tl.load(teacher + begin + place, mask=fits, other=float("-inf")).to(tl.float32)
        chance, wanted = tl.exp(said - log_sum), tl.exp(taught - taught_sum)
        slope = chance - wanted
        if LK:
            slope = share * slope + (1 - share) * chance * (covered - tl.where(chance < wanted, 1.0, 0.0))
        slope = soft * slope + hard * chance
        slope -= tl.where(begin + place == best, hard, 0.0)
        if CAPPED:
            slope *= 1 - (said / cap) * (said / cap)
        tl.store(student + begin + place, slope.to(student.dtype.element_ty), mask=fits)


def compare(
    student: Tensor, teacher: Tensor, soft: float, hard: float, softcap: float = 0.0, fading: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """student [n, V] products with the drafter's head, before any cap, which become the slope of the loss; teacher
    [n, V] logits -> loss, surprise, and whether both have the same best token, [n]. fading: 0, or the LK hybrid's."""
    num_rows, size = student.shape
    loss, surprise = torch.empty(2, num_rows, dtype=torch.float32, device=student.device).unbind()
    agreed = torch.empty(num_rows, dtype=torch.bool, device=student.device)
    if num_rows:
        _compare[(num_rows,)](
            student, teacher, loss, surprise, agreed, size, student.stride(0), teacher.stride(0), soft, hard, softcap,
            fading, CAPPED=softcap != 0.0, LK=fading != 0.0, BLOCK=min(BLOCK, triton.next_power_of_2(size)),
            num_warps=8,
        )  # fmt: skip
    return loss, surprise, agreed
