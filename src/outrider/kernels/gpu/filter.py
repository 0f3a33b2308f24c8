"""Where top_k, top_p and min_p cut a row of logits off, without sorting it: the cut is searched digit by digit, each time
with one launch in which several programs share every row."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu import launch

BLOCK = 4096  # columns of a program: how many share a row depends on its width alone, and so do the bits of its sums
DIGIT = 3  # bits
PEAK, BY_COUNT, BY_MASS = (
    0,
    1,
    2,
)  # what a launch looks for: the largest logit, a digit of the k-th best, one of the cut


@triton.jit
def _key(value, SHIFT: tl.constexpr):
    """A whole number from 0 that grows with a float32. SHIFT: its last bits, which say nothing about a bfloat16."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    return (tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 2147483648) >> SHIFT


@triton.jit
def _value(key, SHIFT: tl.constexpr):
    bits = ((key << SHIFT) - 2147483648).to(tl.int32)
    return tl.where(bits < 0, (bits | ((1 << SHIFT) - 1)) ^ 0x7FFFFFFF, bits).to(tl.float32, bitcast=True)


@triton.jit
def _weight(value, top, heat):
    return tl.exp((value - top) / tl.maximum(heat, 1e-6))  # greedy rows are not cut


@triton.jit
def _options(requests, temperature, top_k, top_p, min_p, row):
    request = tl.load(requests + row)
    heat = tl.load(temperature + request)
    return heat, tl.load(top_k + request), tl.load(top_p + request), tl.load(min_p + request)


@triton.jit
def _found(
    whole, real, counts, masses, row, heat, most, share, width, sought, shift, num_parts,
    PARTS: tl.constexpr, SHIFT: tl.constexpr, DIGIT: tl.constexpr,
):  # fmt: skip
    """What is known of a row after the launch before, which sought a digit: the largest logit, then of the k-th best and
    of the cut, as far as their digits are known: the key, how many keys are surely above it, and their mass."""
    CHOICES: tl.constexpr = 1 << DIGIT
    whole += row * 4
    real += row * 3
    best, cut = tl.load(whole), tl.load(whole + 1)
    best_count, cut_count = tl.load(whole + 2), tl.load(whole + 3)
    top, best_mass, cut_mass = tl.load(real), tl.load(real + 1), tl.load(real + 2)
    part, choice = tl.arange(0, PARTS), tl.arange(0, CHOICES)
    at = (row * num_parts + part)[:, None] * CHOICES + choice[None, :]
    is_part = (part < num_parts)[:, None]
    mass = tl.load(masses + at, mask=is_part, other=0.0)
    if sought == 0:
        top = tl.max(tl.max(tl.where(is_part, mass, float("-inf")), 0), 0)
    else:
        count = tl.sum(tl.load(counts + at, mask=is_part, other=0), 0).to(tl.int64)
        total = tl.sum(mass, 0)
        if sought == 1:
            enough = count >= most
        else:
            one = _weight(_value(best, SHIFT), top, heat)
            enough = total >= share * (best_mass + (most - best_count).to(tl.float32) * one)
        digit = tl.sum((enough & (choice > 0)).to(tl.int64))
        above = choice == digit + 1
        is_last = digit == CHOICES - 1
        above_count, above_mass = tl.sum(tl.where(above, count, 0)), tl.sum(tl.where(above, total, 0.0))
        if sought == 1:
            best += digit << shift
            best_count = tl.where(is_last, best_count, above_count)
            best_mass = tl.where(is_last, best_mass, above_mass)
        else:
            cut += digit << shift
            cut_count = tl.where(is_last, cut_count, above_count)
            cut_mass = tl.where(is_last, cut_mass, above_mass)
    return best, cut, best_count, cut_count, top, best_mass, cut_mass


@triton.jit
def _keep(whole, real, row, best, cut, best_count, cut_count, top, best_mass, cut_mass):
    whole += row * 4
    real += row * 3
    tl.store(whole, best)
    tl.store(whole + 1, cut)
    tl.store(whole + 2, best_count)
    tl.store(whole + 3, cut_count)
    tl.store(real, top)
    tl.store(real + 1, best_mass)
    tl.store(real + 2, cut_mass)


@triton.jit
def _columns(logits, row, part, row_stride, width, BLOCK: tl.constexpr):
    column = part * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    value = tl.load(logits + row * row_stride + column, mask=inside, other=float("-inf")).to(tl.float32)
    return column, inside, value


@triton.jit(do_not_specialize=["before", "before_shift", "sought", "shift"])
def _search(
    logits, temperature, top_k, top_p, min_p, requests, old_whole, old_real, old_counts, old_masses,
    new_whole, new_real, new_counts, new_masses, row_stride, width, num_parts, before, before_shift, sought, shift,
    PARTS: tl.constexpr, SHIFT: tl.constexpr, DIGIT: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (part, row): how many of its columns reach each choice of the next digit, and their mass."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    CHOICES: tl.constexpr = 1 << DIGIT
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    column, inside, value = _columns(logits, row, part, row_stride, width, BLOCK)
    at = (row * num_parts + part) * CHOICES
    if sought == 0:
        peak = tl.max(value)
        for choice in tl.static_range(CHOICES):
            tl.store(new_masses + at + choice, peak)
        if part == 0:
            _keep(new_whole, new_real, row, 0, 0, 0, 0, 0.0, 0.0, 0.0)
        return
    heat, most, share, ratio = _options(requests, temperature, top_k, top_p, min_p, row)
    best, cut, best_count, cut_count, top, best_mass, cut_mass = _found(
        old_whole, old_real, old_counts, old_masses, row, heat, tl.minimum(most, width), share, width, before,
        before_shift, num_parts, PARTS, SHIFT, DIGIT,
    )  # fmt: skip
    if part == 0:
        _keep(new_whole, new_real, row, best, cut, best_count, cut_count, top, best_mass, cut_mass)
    key = tl.where(inside, _key(value, SHIFT), -1)
    weight = tl.where(inside, _weight(value, top, heat), 0.0)
    known = tl.where(sought == 1, best, cut)
    for choice in tl.static_range(1, CHOICES):
        reaches = key >= known + (tl.full((), choice, dtype=tl.int64) << shift)
        tl.store(new_counts + at + choice, tl.sum(reaches.to(tl.int32)))
        tl.store(new_masses + at + choice, tl.sum(tl.where(reaches, weight, 0.0)))


@triton.jit
def _settled(
    whole, real, counts, masses, row, heat, most, share, width, num_parts,
    PARTS: tl.constexpr, SHIFT: tl.constexpr, DIGIT: tl.constexpr,
):  # fmt: skip
    """The key of the cut, how many columns that equal it stay, and the largest logit."""
    best, cut, best_count, cut_count, top, best_mass, cut_mass = _found(
        whole, real, counts, masses, row, heat, most, share, width, 2, 0, num_parts, PARTS, SHIFT, DIGIT
    )  # fmt: skip
    mass = best_mass + (most - best_count).to(tl.float32) * _weight(_value(best, SHIFT), top, heat)
    is_best = (cut <= best) | (share >= 1)
    key = tl.minimum(tl.where(is_best, best, cut), _key(top, SHIFT))
    above = tl.where(is_best, best_mass, cut_mass)
    stay = tl.where(is_best, (most - best_count).to(tl.float32), float("inf"))
    if share < 1:
        light = tl.ceil((share * mass - above) / _weight(_value(key, SHIFT), top, heat))
        stay = tl.minimum(stay, tl.maximum(light, 1.0))
    return key, stay, top


@triton.jit
def _equals(
    logits, temperature, top_k, top_p, min_p, requests, whole, real, counts, masses, equals, row_stride, width,
    num_parts, PARTS: tl.constexpr, SHIFT: tl.constexpr, DIGIT: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (part, row): how many of its columns equal the cut."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    heat, most, share, ratio = _options(requests, temperature, top_k, top_p, min_p, row)
    key, stay, top = _settled(
        whole, real, counts, masses, row, heat, tl.minimum(most, width), share, width, num_parts, PARTS, SHIFT, DIGIT
    )
    column, inside, value = _columns(logits, row, part, row_stride, width, BLOCK)
    tl.store(equals + row * num_parts + part, tl.sum(((_key(value, SHIFT) == key) & inside).to(tl.int32)))


@triton.jit
def _cut(
    logits, temperature, top_k, top_p, min_p, requests, whole, real, counts, masses, equals, cut, last, row_stride,
    width, num_parts, LEAST: tl.constexpr,
    PARTS: tl.constexpr, SHIFT: tl.constexpr, DIGIT: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (part, row): of columns that equal the cut the first ones stay; whoever has the last of these, or part 0
    where all stay, says where it is."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    heat, most, share, ratio = _options(requests, temperature, top_k, top_p, min_p, row)
    if (heat <= LEAST) | ((most >= width) & (share >= 1) & (ratio <= 0)):
        if part == 0:
            tl.store(cut + row, float("-inf"))
            tl.store(last + row, width)
        return
    key, stay, top = _settled(
        whole, real, counts, masses, row, heat, tl.minimum(most, width), share, width, num_parts, PARTS, SHIFT, DIGIT
    )
    each = tl.arange(0, PARTS)
    count = tl.load(equals + row * num_parts + each, mask=each < num_parts, other=0)
    before = tl.sum(tl.where(each < part, count, 0))
    own = tl.sum(tl.where(each == part, count, 0))
    value_at = _value(key, SHIFT)
    worth = tl.where(ratio > 0, top + heat * tl.log(tl.where(ratio > 0, ratio, 1.0)), float("-inf"))
    is_all = (tl.sum(count).to(tl.float32) <= stay) | (value_at < worth)
    if is_all & (part == 0):
        tl.store(cut + row, tl.maximum(value_at, worth))
        tl.store(last + row, width)
    if (~is_all) & (before.to(tl.float32) < stay) & ((before + own).to(tl.float32) >= stay):
        column, inside, value = _columns(logits, row, part, row_stride, width, BLOCK)
        same = ((_key(value, SHIFT) == key) & inside).to(tl.int32)
        hit = (same > 0) & ((tl.cumsum(same) + before).to(tl.float32) == stay)
        tl.store(cut + row, value_at)
        tl.store(last + row, tl.min(tl.where(hit, column, width)))


@dataclass(frozen=True)
class Notes:
    """What one launch leaves to the next."""

    whole: Tensor  # [R, 4] int64
    real: Tensor  # [R, 3]
    counts: Tensor  # [R, P, C] int32
    masses: Tensor  # [R, P, C]

    @classmethod
    def of(cls, num_rows: int, num_parts: int, device: torch.device) -> Notes:
        shape = (num_rows, num_parts, 1 << DIGIT)
        return cls(
            torch.empty(num_rows, 4, dtype=torch.int64, device=device),
            torch.empty(num_rows, 3, device=device),
            torch.empty(shape, dtype=torch.int32, device=device),
            torch.empty(shape, device=device),
        )

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter((self.whole, self.real, self.counts, self.masses))


def cuts(
    logits: Tensor,
    temperature: Tensor,
    filters: tuple[Tensor, Tensor, Tensor],
    requests: Tensor,
    *,
    least: float,
) -> tuple[Tensor, Tensor]:
    """Of each row [R] of logits [R, V]: the logit at which it is cut off, and the last column that may equal it.
    Options by request [B]: top_k (V or more: off), top_p, min_p. A row whose temperature is at most `least` is not
    cut."""
    num_rows, width = logits.shape
    cut = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    last = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if not num_rows:
        return cut, last
    early, num_parts = launch.early(logits), triton.cdiv(width, BLOCK)
    grid, given = (num_parts, num_rows), (logits, temperature, *filters, requests)
    shift = 16 if logits.dtype == torch.bfloat16 else 0
    common = {"PARTS": triton.next_power_of_2(num_parts), "SHIFT": shift, "DIGIT": DIGIT, "BLOCK": BLOCK,
              "EARLY": early, "num_warps": 4, **launch.options(early)}  # fmt: skip
    old, new = (Notes.of(num_rows, num_parts, logits.device) for _ in range(2))
    shifts = range((32 - shift - 1) // DIGIT * DIGIT, -1, -DIGIT)
    steps = [(PEAK, 0), *((BY_COUNT, each) for each in shifts), *((BY_MASS, each) for each in shifts)]
    before = (PEAK, 0)
    for sought in steps:
        _search[grid](*given, *old, *new, logits.stride(0), width, num_parts, *before, *sought, **common)
        old, new, before = new, old, sought
    equals = torch.empty(num_rows, num_parts, dtype=torch.int32, device=logits.device)
    _equals[grid](*given, *old, equals, logits.stride(0), width, num_parts, **common)
    _cut[grid](*given, *old, equals, cut, last, logits.stride(0), width, num_parts, LEAST=least, **common)
    return cut, last
