"""A matrix in few bits on a GPU: numbers of 4 or 8 bits, with a scale that each group of a row's numbers shares. It is
computed with as it is: numbers are widened where they are used. What it stands for is dense()."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from outrider.kernels.dispatch import use_triton

MAX_HALF = 64  # columns whose numbers lie in the lower halves of neighbouring bytes
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP8_MAX = 448.0
GROUPS = (128, 64, 32)  # numbers that share a scale, where that is ours to choose: the first that divides a row


ROUNDED_TO = ("fp8", "int4")  # kinds that dense matrices can be rounded to


class Kind(Enum):
    """What the bits of a number mean."""

    INT4 = "int4"  # 0 ... 15, less 8
    UINT4 = "uint4"  # 0 ... 15
    FP4 = "fp4"  # sign, two bits of exponent, one of mantissa
    INT8 = "int8"
    FP8 = "fp8"  # e4m3

    @property
    def num_bits(self) -> int:
        return 8 if self in (Kind.INT8, Kind.FP8) else 4


@dataclass(frozen=True)
class Quantised:
    """[N, K]: number n of a row stands for scale * n + offset."""

    kind: Kind
    data: Tensor  # [N, K] uint8; of 4 bits [N, K / 2], see pack_halves()
    scale: Tensor  # [N, G], each for K / G numbers; of any type
    offset: Tensor | None = None  # like scale
    order: Tensor | None = None  # [K]: which column of the input belongs to each number; None: its own

    def __post_init__(self) -> None:
        assert self.num_columns % self.scale.shape[1] == 0, (self.data.shape, self.scale.shape)
        assert self.kind.num_bits == 8 or self.num_columns % (2 * self.half) == 0, self.num_columns

    @property
    def num_columns(self) -> int:
        return self.data.shape[1] * 8 // self.kind.num_bits

    @property
    def group(self) -> int:
        """Numbers that share a scale."""
        return self.num_columns // self.scale.shape[1]

    @property
    def half(self) -> int:
        return min(self.group, MAX_HALF)

    @property
    def num_bytes(self) -> int:
        tensors = (self.data, self.scale, self.offset, self.order)
        return sum(each.numel() * each.element_size() for each in tensors if each is not None)

    def rows_from(self, first: int) -> Quantised:
        """Without the first rows."""
        offset = None if self.offset is None else self.offset[first:]
        return Quantised(self.kind, self.data[first:], self.scale[first:], offset, self.order)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[N, K]: what it stands for, rounded once."""
        if use_triton(self.data):
            from outrider.kernels.gpu import quantised as gpu

            return gpu.dense(self, dtype)
        return dense_reference(self, dtype)


def dense_reference(weight: Quantised, dtype: torch.dtype) -> Tensor:
    num_rows, data = len(weight.data), weight.data
    numbers = _NUMBERS[weight.kind](data if weight.kind.num_bits == 8 else unpack_halves(data, weight.half))
    values = numbers.view(num_rows, -1, weight.group) * weight.scale.float()[..., None]
    if weight.offset is not None:
        values += weight.offset.float()[..., None]
    values = values.view(num_rows, -1)
    if weight.order is not None:
        values = torch.empty_like(values).index_copy_(1, weight.order, values)
    return values.to(dtype)


def _fp4(numbers: Tensor) -> Tensor:
    table = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)], device=numbers.device)
    return table[numbers.int()]


_NUMBERS: dict[Kind, Callable[[Tensor], Tensor]] = {
    Kind.INT4: lambda numbers: numbers.float() - 8,
    Kind.UINT4: lambda numbers: numbers.float(),
    Kind.FP4: _fp4,
    Kind.INT8: lambda numbers: numbers.view(torch.int8).float(),
    Kind.FP8: lambda numbers: numbers.view(torch.float8_e4m3fn).float(),
}


def pack_halves(numbers: Tensor, half: int) -> Tensor:
    """[N, K] of 4 bits -> [N, K / 2]: of every 2 * `half` numbers the first ones lie in the lower halves of bytes, the
    others in the upper ones, so that they come apart without being shuffled."""
    low, high = numbers.unflatten(-1, (-1, 2, half)).unbind(-2)
    return (low | high << 4).flatten(-2)


def unpack_halves(data: Tensor, half: int) -> Tensor:
    low_and_high = data.unflatten(-1, (-1, half))
    return torch.stack([low_and_high & 15, low_and_high >> 4], -2).flatten(-3)


def is_packable(num_columns: int, group: int, kind: Kind) -> bool:
    """Whether rows of so many numbers have such a form: kernels know no group that is cut off, or an odd half."""
    if num_columns % group or group < 16 or (group > MAX_HALF and group % MAX_HALF):
        return False
    return kind.num_bits == 8 or num_columns % (2 * min(group, MAX_HALF)) == 0


def pack_numbers(
    kind: Kind, numbers: Tensor, scale: Tensor, offset: Tensor | None = None, order: Tensor | None = None
) -> Quantised:
    """numbers [N, K] uint8, one a byte; is_packable() says whether there is such a form."""
    group = numbers.shape[1] // scale.shape[1]
    if kind.num_bits == 4:
        numbers = pack_halves(numbers, min(group, MAX_HALF))
    return Quantised(kind, numbers.contiguous(), scale.contiguous(), offset, order)


def joined(parts: Sequence[Quantised]) -> Quantised | None:
    """One below the other; None where they are of different kinds."""
    first = parts[0]
    for part in parts[1:]:
        same = part.kind is first.kind and part.num_columns == first.num_columns
        same = same and part.scale.shape[1] == first.scale.shape[1] and part.scale.dtype == first.scale.dtype
        same = (
            same and (part.offset is None) == (first.offset is None) and (part.order is None) == (first.order is None)
        )
        if not same or (part.order is not None and first.order is not None and not part.order.equal(first.order)):
            return None
    if len(parts) == 1:
        return first
    offsets = [part.offset for part in parts if part.offset is not None]
    return Quantised(
        first.kind,
        torch.cat([part.data for part in parts]),
        torch.cat([part.scale for part in parts]),
        torch.cat(offsets) if offsets else None,
        first.order,
    )


def quantise(weight: Tensor, kind: Kind) -> Quantised | None:
    """The nearest numbers to a dense matrix [N, K]: in 4 bits with a scale for each group, in 8 one for each row. None
    where it has no such form."""
    num_rows, num_columns = weight.shape
    sizes = GROUPS if kind.num_bits == 4 else (num_columns,)
    group = next((size for size in sizes if is_packable(num_columns, size, kind)), None)
    if group is None:
        return None
    values = weight.float().view(num_rows, -1, group)
    most = values.abs().amax(-1)
    scale = (most / (FP8_MAX if kind is Kind.FP8 else 7.5)).clamp(min=torch.finfo(torch.float32).tiny)
    scale = scale.to(torch.bfloat16) if kind is Kind.INT4 else scale
    steps = (values / scale.float()[..., None]).view(num_rows, num_columns)
    if kind is Kind.FP8:
        return pack_numbers(kind, steps.clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn).view(torch.uint8), scale)
    return pack_numbers(kind, (steps.round().clamp(-8, 7) + 8).to(torch.uint8), scale)
