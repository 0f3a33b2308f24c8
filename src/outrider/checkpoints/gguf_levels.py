"""Quantised matrices of GGUF files as a GPU computes with them: every number of a block, the scale of its group, and
where the type has one, an offset. What a number stands for is the same; only its place changes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.checkpoints.gguf_file import TENSOR_TYPES
from outrider.kernels.packed import Blocks
from outrider.kernels.quantised import Kind, Quantised, is_packable, pack_numbers


@dataclass(frozen=True)
class Levels:
    """[N, K] of one kind: number n of a row stands for scale * n + offset of its group."""

    kind: Kind
    numbers: Tensor  # [N, K] uint8, as the kind means its bits
    scale: Tensor  # [N, G] float32
    offset: Tensor | None = None

    @property
    def group(self) -> int:
        return self.numbers.shape[1] // self.scale.shape[1]

    def in_eight_bits(self, group: int) -> Levels:
        """The same numbers, wider, with a scale for every `group` of them, and an offset."""
        numbers = self.numbers
        if self.kind is Kind.INT4:
            numbers = (numbers.to(torch.int8) - 8).view(torch.uint8)
        offset = torch.zeros_like(self.scale) if self.offset is None else self.offset
        each = self.group // group
        return Levels(Kind.INT8, numbers, *(part.repeat_interleave(each, 1) for part in (self.scale, offset)))


def quantised_of(parts: Sequence[Blocks], device: torch.device) -> Quantised | None:
    """One matrix below the other; of different types, all become as wide as the widest. None where a type is not known
    here, or a GPU could not compute with it."""
    if any(TENSOR_TYPES[part.type_number][0] not in READERS for part in parts):
        return None
    levels = [_levels(part, device) for part in parts]
    first = levels[0]
    if any(each.kind is not first.kind or each.group != first.group for each in levels):
        group = min(each.group for each in levels)
        levels = [each.in_eight_bits(group) for each in levels]
        first = levels[0]
    if not is_packable(first.numbers.shape[1], first.group, first.kind):
        return None
    offsets = [each.offset for each in levels if each.offset is not None]
    assert len(offsets) in (0, len(levels)), "a kind has an offset, or has none"
    numbers, scale = torch.cat([each.numbers for each in levels]), torch.cat([each.scale for each in levels])
    return pack_numbers(first.kind, numbers, scale, torch.cat(offsets) if offsets else None)


def _levels(part: Blocks, device: torch.device) -> Levels:
    name, _, size = TENSOR_TYPES[part.type_number]
    blocks = part.data.to(device)
    return READERS[name](blocks.view(len(blocks), -1, size))


def _half(blocks: Tensor, at: int) -> Tensor:
    """[N, B]: the half-precision number at this byte of every block."""
    return blocks[..., at : at + 2].contiguous().view(torch.float16)[..., 0].float()


def _nibbles(blocks: Tensor, begin: int, end: int) -> Tensor:
    """[N, B, 2, bytes]: the lower halves of bytes, then the upper ones."""
    stored = blocks[..., begin:end]
    return torch.stack([stored & 15, stored >> 4], -2)


def _fifth_bits(blocks: Tensor, begin: int) -> Tensor:
    """[N, B, 2, 16]: a bit for each of 32 numbers, as 16."""
    places = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    bits = blocks[..., begin : begin + 4, None] >> places & 1
    return bits.flatten(-2).unflatten(-1, (2, 16)) << 4


def _signed(numbers: Tensor, middle: int) -> Tensor:
    return (numbers.to(torch.int8) - middle).view(torch.uint8)


def _q4_0(blocks: Tensor) -> Levels:
    return Levels(Kind.INT4, _nibbles(blocks, 2, 18).flatten(1), _half(blocks, 0))


def _q4_1(blocks: Tensor) -> Levels:
    return Levels(Kind.UINT4, _nibbles(blocks, 4, 20).flatten(1), _half(blocks, 0), _half(blocks, 2))


def _q5_0(blocks: Tensor) -> Levels:
    numbers = (_nibbles(blocks, 6, 22) | _fifth_bits(blocks, 2)).flatten(1)
    return Levels(Kind.INT8, _signed(numbers, 16), _half(blocks, 0))


def _q5_1(blocks: Tensor) -> Levels:
    numbers = (_nibbles(blocks, 8, 24) | _fifth_bits(blocks, 4)).flatten(1)
    return Levels(Kind.INT8, numbers, _half(blocks, 0), _half(blocks, 2))


def _q8_0(blocks: Tensor) -> Levels:
    return Levels(Kind.INT8, blocks[..., 2:34].flatten(1), _half(blocks, 0))


def _six_bit_scales(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """[N, B * 8] each: scales and offsets of the groups of 32 in a block of 256."""
    low, middle, high = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scale = torch.cat([low & 63, (high & 15) | (low >> 6 << 4)], -1)
    offset = torch.cat([middle & 63, (high >> 4) | (middle >> 6 << 4)], -1)
    scales = _half(blocks, 0)[..., None] * scale.float()
    return scales.flatten(1), (-_half(blocks, 2)[..., None] * offset.float()).flatten(1)


def _pairs(blocks: Tensor, begin: int) -> Tensor:
    """[N, B, 8, 32]: of each 32 bytes the lower halves, then the upper ones."""
    stored = blocks[..., begin : begin + 128].unflatten(-1, (4, 32))
    return torch.stack([stored & 15, stored >> 4], -2).flatten(-3, -2)


def _q4_k(blocks: Tensor) -> Levels:
    return Levels(Kind.UINT4, _pairs(blocks, 16).flatten(1), *_six_bit_scales(blocks))


def _q5_k(blocks: Tensor) -> Levels:
    places = torch.arange(8, dtype=torch.uint8, device=blocks.device)
    fifth = blocks[..., None, 16:48] >> places[:, None] & 1  # [N, B, 8, 32]
    return Levels(Kind.INT8, (_pairs(blocks, 48) | fifth << 4).flatten(1), *_six_bit_scales(blocks))


def _q6_k(blocks: Tensor) -> Levels:
    low = blocks[..., :128].unflatten(-1, (2, 2, 32))  # two halves of a block, two rows of bytes
    low = torch.stack([low & 15, low >> 4], -3).flatten(-3, -2)  # [N, B, 2, 4, 32]
    places = torch.arange(0, 8, 2, dtype=torch.uint8, device=blocks.device)
    high = blocks[..., 128:192].unflatten(-1, (2, 1, 32)) >> places[:, None] & 3
    scale = _half(blocks, 208)[..., None] * blocks[..., 192:208].view(torch.int8).float()
    return Levels(Kind.INT8, _signed((low | high << 4).flatten(1), 32), scale.flatten(1))


READERS: dict[str, Callable[[Tensor], Levels]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
