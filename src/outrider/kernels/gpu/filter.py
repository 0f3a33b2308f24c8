"""Where top_k, top_p and min_p cut a row of logits off, without sorting it: the cut is searched digit by digit, each
time with one launch in which several programs share every row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from outrider.kernels.gpu import launch

BLOCK = 4096  # columns of a program: how many share a row depends on its width alone, and so do the bits of its sums
DIGIT = 3  # bits
# what a launch seeks: the largest logit, a digit of the k-th best, or one of the cut
PEAK, BY_COUNT, BY_MASS = 0, 1, 2


@triton.jit
def _key(value, SHIFT: tl.constexpr):
    """A whole number above 0 that grows with a float32. SHIFT: its last bits, which say nothing about a bfloat16."""
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    if SHIFT:
        high = bits >> SHIFT
        key = tl.where(high < 0, high ^ 0x7FFF, high) + 32768
    else:
        key = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64) + 2147483648
    return key


@triton.jit
def _value(key, SHIFT: tl.constexpr):
    """The float32 of a key; that of 0 is below all others."""
    if SHIFT:
        bits = key.to(tl.int32) - 32768
        bits = tl.where(bits < 0, bits ^ 0x7FFF, bits) << SHIFT
    else:
        bits = (key - 2147483648).to(tl.int32)
        bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    return tl.where(key == 0, float("-inf"), bits.to(tl.float32, bitcast=True))


@triton.jit
def _weight(value, top, heat):
    """Of a logit, where the largest one weighs 1."""
    return tl.exp((value - top) * (1 / tl.maximum(heat, 1e-6)))


@triton.jit
def _options(requests, temperature, top_k, top_p, row, width):
    """Of a row: temperature, how many columns may stay, and which share of the mass."""
    request = tl.load(requests + row)
    most = tl.minimum(tl.load(top_k + request), width)
    return request, tl.load(temperature + request), most, tl.load(top_p + request)


@triton.jit
def _is_settled(sought, shift, most, share, width, TOP: tl.constexpr):
    """Whether a search has nothing to find: without top_k, its first launch finds the whole mass, and that is all."""
    return ((sought == 1) & (most >= width) & (shift < TOP)) | ((sought == 2) & (share >= 1))


@triton.jit
def _found(
    whole, real, counts, masses, row, heat, most, share, width, sought, shift, num_parts,
    PARTS: tl.constexpr, SHIFT: tl.constexpr, DIGIT: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """What is known of a row after the launch before, which sought a digit. Of the k-th best, then of the cut: the key,
    as far as its digits are known, and the mass of what is surely above it; how many are above the k-th best; and
    the largest logit."""
    CHOICES: tl.constexpr = 1 << DIGIT
    whole += row * 3
    real += row * 3
    best, cut, best_count = tl.load(whole), tl.load(whole + 1), tl.load(whole + 2)
    top, best_mass, cut_mass = tl.load(real), tl.load(real + 1), tl.load(real + 2)
    if _is_settled(sought, shift, most, share, width, TOP) == 0:
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
            if sought == 2:
                cut += digit << shift
                cut_mass = tl.where(is_last, cut_mass, above_mass)
            elif most >= width:  # all of them are above the k-th best, which is none
                best_count = most.to(tl.int64)
                best_mass = tl.sum(tl.where(choice == 0, total, 0.0))
            else:
                best += digit << shift
                best_count = tl.where(is_last, best_count, above_count)
                best_mass = tl.where(is_last, best_mass, above_mass)
    return best, cut, best_count, top, best_mass, cut_mass


@triton.jit
def _keep(whole, real, row, best, cut, best_count, top, best_mass, cut_mass):
    whole += row * 3
    real += row * 3
    tl.store(whole, best)
    tl.store(whole + 1, cut)
    tl.store(whole + 2, best_count)
    tl.store(real, top)
    tl.store(real + 1, best_mass)
    tl.store(real + 2, cut_mass)


@triton.jit
def _values(logits, row, part, row_stride, width, BLOCK: tl.constexpr):
    """Of a part's columns, -inf beyond the last one."""
    column = part * BLOCK + tl.arange(0, BLOCK)
    return tl.load(logits + row * row_stride + column, mask=column < width, other=float("-inf")).to(tl.float32)


@triton.jit(do_not_specialize=["before", "before_shift", "sought", "shift"])
def _search(
    logits, temperature, top_k, top_p, requests, old_whole, old_real, old_counts, old_masses,
    new_whole, new_real, new_counts, new_masses, row_stride, width, num_parts, before, before_shift, sought, shift,
    PARTS: tl.constexpr, SHIFT: tl.constexpr, DIGIT: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Program (part, row): how many of its columns reach each choice of the next digit, and their mass."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    CHOICES: tl.constexpr = 1 << DIGIT
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    at = (row * num_parts + part) * CHOICES
    if sought == 0:
        peak = tl.max(_values(logits, row, part, row_stride, width, BLOCK))
        for choice in tl.static_range(CHOICES):
            tl.store(new_masses + at + choice, peak)
        if part == 0:
            _keep(new_whole, new_real, row, 0, 0, 0, 0.0, 0.0, 0.0)
        return
    _, heat, most, share = _options(requests, temperature, top_k, top_p, row, width)
    is_settled = _is_settled(sought, shift, most, share, width, TOP)
    if is_settled & (part > 0):
        return
    best, cut, best_count, top, best_mass, cut_mass = _found(
        old_whole, old_real, old_counts, old_masses, row, heat, most, share, width, before, before_shift, num_parts,
        PARTS, SHIFT, DIGIT, TOP,
    )  # fmt: skip
    if part == 0:
        _keep(new_whole, new_real, row, best, cut, best_count, top, best_mass, cut_mass)
    if is_settled:
        return
    value = _values(logits, row, part, row_stride, width, BLOCK)
    inside = part * BLOCK + tl.arange(0, BLOCK) < width
    key = tl.where(inside, _key(value, SHIFT), -1)
    weight = tl.where(inside, _weight(value, top, heat), 0.0)
    known = tl.where(sought == 1, best, cut)
    for choice in tl.static_range(CHOICES):
        reaches = key >= (known + (tl.full((), choice, dtype=tl.int64) << shift)).to(key.dtype)
        tl.store(new_counts + at + choice, tl.sum(reaches.to(tl.int32)))
        tl.store(new_masses + at + choice, tl.sum(tl.where(reaches, weight, 0.0)))


@triton.jit
def _settled(
    whole, real, counts, masses, row, heat, most, share, width, num_parts,
    PARTS: tl.constexpr, SHIFT: tl.constexpr, DIGIT: tl.constexpr, TOP: tl.constexpr,
):  # fmt: skip
    """The key of the cut, how many columns that equal it stay, and the largest logit."""
    best, cut, best_count, top, best_mass, cut_mass = _found(
        whole, real, counts, masses, row, heat, most, share, width, 2, 0, num_parts, PARTS, SHIFT, DIGIT, TOP
    )
    room = (most - best_count).to(tl.float32)
    is_best = (cut <= best) | (share >= 1)
    key = tl.minimum(tl.where(is_best, best, cut), _key(top, SHIFT).to(tl.int64))
    above = tl.where(is_best, best_mass, cut_mass)
    stay = tl.where(is_best & (most < width), room, float("inf"))
    if share < 1:
        wanted = share * (best_mass + room * _weight(_value(best, SHIFT), top, heat))
        light = tl.ceil((wanted - above) / _weight(_value(key, SHIFT), top, heat))
        stay = tl.minimum(stay, tl.maximum(light, 1.0))
    return key, stay, top


@triton.jit
def _equals(
    logits, temperature, top_k, top_p, requests, whole, real, counts, masses, equals, row_stride, width, num_parts,
    PARTS: tl.constexpr, SHIFT: tl.constexpr, DIGIT: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Program (part, row): how many of its columns equal the cut."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    _, heat, most, share = _options(requests, temperature, top_k, top_p, row, width)
    key, _, _ = _settled(
        whole, real, counts, masses, row, heat, most, share, width, num_parts, PARTS, SHIFT, DIGIT, TOP
    )
    inside = part * BLOCK + tl.arange(0, BLOCK) < width
    same = (_key(_values(logits, row, part, row_stride, width, BLOCK), SHIFT) == key) & inside
    tl.store(equals + row * num_parts + part, tl.sum(same.to(tl.int32)))


@triton.jit
def _cut(
    logits, temperature, top_k, top_p, requests, whole, real, counts, masses, equals, min_p, cut, last, row_stride,
    width, num_parts, LEAST: tl.constexpr,
    PARTS: tl.constexpr, SHIFT: tl.constexpr, DIGIT: tl.constexpr, TOP: tl.constexpr, BLOCK: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Program (part, row): of columns that equal the cut the first ones stay; whoever has the last of these, or part 0
    where all stay, says where it is."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    request, heat, most, share = _options(requests, temperature, top_k, top_p, row, width)
    ratio = tl.load(min_p + request)
    if (heat <= LEAST) | ((most >= width) & (share >= 1) & (ratio <= 0)):
        if part == 0:
            tl.store(cut + row, float("-inf"))
            tl.store(last + row, width)
        return
    key, stay, top = _settled(
        whole, real, counts, masses, row, heat, most, share, width, num_parts, PARTS, SHIFT, DIGIT, TOP
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
    if (is_all == 0) & (before.to(tl.float32) < stay) & ((before + own).to(tl.float32) >= stay):
        column = part * BLOCK + tl.arange(0, BLOCK)
        value = _values(logits, row, part, row_stride, width, BLOCK)
        same = ((_key(value, SHIFT) == key) & (column < width)).to(tl.int32)
        hit = (same > 0) & ((tl.cumsum(same) + before).to(tl.float32) == stay)
        tl.store(cut + row, value_at)
        tl.store(last + row, tl.min(tl.where(hit, column, width)))


@dataclass(frozen=True)
class Notes:
    """What one launch leaves to the next."""

    whole: Tensor  # [R, 3] int64
    real: Tensor  # [R, 3]
    counts: Tensor  # [R, P, C] int32
    masses: Tensor  # [R, P, C]

    @classmethod
    def of(cls, num_rows: int, num_parts: int, device: torch.device) -> Notes:
        shape = (num_rows, num_parts, 1 << DIGIT)
        return cls(
            torch.empty(num_rows, 3, dtype=torch.int64, device=device),
            torch.empty(num_rows, 3, device=device),
            torch.empty(shape, dtype=torch.int32, device=device),
            torch.empty(shape, device=device),
        )

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return self.whole, self.real, self.counts, self.masses


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
    top_k, top_p, min_p = filters
    num_rows, width = logits.shape
    cut = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    last = torch.empty(num_rows, dtype=torch.int32, device=logits.device)
    if not num_rows:
        return cut, last
    early, num_parts = launch.early(logits), triton.cdiv(width, BLOCK)
    shift = 16 if logits.dtype == torch.bfloat16 else 0
    highest = (31 - shift) // DIGIT * DIGIT
    digits = range(highest, -1, -DIGIT)
    grid, given, size = (num_parts, num_rows), (logits, temperature, top_k, top_p, requests), (logits.stride(0), width)
    common: dict[str, Any] = {
        "PARTS": triton.next_power_of_2(num_parts), "SHIFT": shift, "DIGIT": DIGIT, "TOP": highest, "BLOCK": BLOCK,
        "EARLY": early, "num_warps": 4, **launch.options(early),
    }  # fmt: skip
    old, new = (Notes.of(num_rows, num_parts, logits.device) for _ in range(2))
    before = PEAK, 0
    for sought in [before, *((BY_COUNT, digit) for digit in digits), *((BY_MASS, digit) for digit in digits)]:
        _search[grid](*given, *old.tensors, *new.tensors, *size, num_parts, *before, *sought, **common)
        old, new, before = new, old, sought
    equals = torch.empty(num_rows, num_parts, dtype=torch.int32, device=logits.device)
    _equals[grid](*given, *old.tensors, equals, *size, num_parts, **common)
    _cut[grid](*given, *old.tensors, equals, min_p, cut, last, *size, num_parts, LEAST=least, **common)
    return cut, last
