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
    student, teacher, teacher_sums, best, losses, surprises, firsts, size, stride, teacher_stride, soft, hard, cap,
    CAPPED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Looks at a row twice: first for its sum, its best token and both divergences, then for the slope of the loss."""
    row = tl.program_id(0).to(tl.int64)
    student += row * stride
    teacher += row * teacher_stride
    teacher_sum = tl.load(teacher_sums + row)
    wanted = tl.load(best + row)
    place = tl.arange(0, BLOCK)
    highest, total, cross = float("-inf"), 0.0, 0.0
    first, first_value = 0, float("-inf")
    for begin in range(0, size, BLOCK):
        fits = begin + place < size
        said = tl.load(student + begin + place, mask=fits, other=float("-inf")).to(tl.float32)
        said = tl.where(fits, _capped(said, cap, CAPPED), float("-inf"))
        taught = tl.load(teacher + begin + place, mask=fits, other=float("-inf")).to(tl.float32)
        chance = tl.exp(taught - teacher_sum)
        cross += tl.sum(tl.where(fits, chance * (taught - said), 0.0))
        top = tl.max(said, 0)
        found = begin + tl.argmax(said, 0)
        first = tl.where(top > first_value, found, first)
        first_value = tl.maximum(top, first_value)
        better = tl.maximum(highest, top)
        total = total * tl.exp(highest - better) + tl.sum(tl.exp(said - better))
        highest = better
    log_sum = highest + tl.log(total)
    surprise = log_sum - _capped(tl.load(student + wanted).to(tl.float32), cap, CAPPED)
    tl.store(losses + row, soft * (cross - teacher_sum + log_sum) + hard * surprise)
    tl.store(surprises + row, surprise)
    tl.store(firsts + row, first)
    for begin in range(0, size, BLOCK):
        fits = begin + place < size
        said = _capped(tl.load(student + begin + place, mask=fits, other=0.0).to(tl.float32), cap, CAPPED)
        taught = tl.load(teacher + begin + place, mask=fits, other=float("-inf")).to(tl.float32)
        slope = (soft + hard) * tl.exp(said - log_sum) - soft * tl.exp(taught - teacher_sum)
        slope -= tl.where(begin + place == wanted, hard, 0.0)
        if CAPPED:
            slope *= 1 - (said / cap) * (said / cap)
        tl.store(student + begin + place, slope.to(student.dtype.element_ty), mask=fits)


def compare(
    student: Tensor, teacher: Tensor, teacher_sum: Tensor, best: Tensor, soft: float, hard: float, softcap: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """student [n, V] products with the drafter's head, before any cap, which become the slope of the loss; teacher
    [n, V] logits, their log-sum-exp [n] and best tokens [n] -> loss, surprise and the drafter's best token, [n]."""
    num_rows, size = student.shape
    loss, surprise = torch.empty(2, num_rows, dtype=torch.float32, device=student.device).unbind()
    first = torch.empty(num_rows, dtype=torch.long, device=student.device)
    if num_rows:
        _compare[(num_rows,)](
            student, teacher, teacher_sum, best, loss, surprise, first, size, student.stride(0), teacher.stride(0),
            soft, hard, softcap, CAPPED=softcap != 0.0, BLOCK=min(BLOCK, triton.next_power_of_2(size)), num_warps=8,
        )  # fmt: skip
    return loss, surprise, first
