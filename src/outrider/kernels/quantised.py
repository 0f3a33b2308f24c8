"""A matrix in few bits on a GPU: numbers of 4 or 8 bits, with a scale that each group of a row's numbers shares. It is
computed with as it is: numbers are widened where they are used. What it stands for is dense()."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import Enum

import torch
from torch import Tensor

from outrider.kernels.dispatch import use_triton

RUN = 128  # numbers whose words lie together, at most
MIN_PART = 16  # numbers that a tensor core takes at once
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP8_MAX = 448.0
FP4_GROUP = 32
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

    @property
    def num_parts(self) -> int:
        """Numbers in a word of 16 bits."""
        return 16 // self.num_bits


@dataclass(frozen=True)
class Quantised:
    """[N, K]: number n of a row stands for scale * n + offset."""

    kind: Kind
    data: Tensor  # [N, W] int16: see pack_words()
    scale: Tensor  # [G, N] float32, each for `group` numbers of a row; four bytes can be copied without waiting. Or
    # [ceil(G / 4), N] int32: scales that are powers of two, four exponents a word (pack_exponents)
    num_columns: int  # K
    group: int
    offset: Tensor | None = None  # like scale
    order: Tensor | None = None  # [K]: which column of the input belongs to each number; None: its own

    @property
    def part(self) -> int:
        part = part_for(self.num_columns, self.group, self.kind)
        assert part is not None
        return part

    @property
    def num_bytes(self) -> int:
        tensors = (self.data, self.scale, self.offset, self.order)
        return sum(each.numel() * each.element_size() for each in tensors if each is not None)

    @property
    def has_exponents(self) -> bool:
        return self.scale.dtype == torch.int32

    def rows(self, chosen: Tensor) -> Quantised:
        """Some of its rows, in this order."""
        offset = None if self.offset is None else self.offset[:, chosen]
        return replace(self, data=self.data[chosen], scale=self.scale[:, chosen].contiguous(), offset=offset)

    def rows_from(self, first: int) -> Quantised:
        """Without the first rows."""
        offset = None if self.offset is None else self.offset[:, first:]
        return replace(self, data=self.data[first:], scale=self.scale[:, first:], offset=offset)

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[N, K]: what it stands for, rounded once."""
        if use_triton(self.data):
            from outrider.kernels.gpu import quantised as gpu

            return gpu.dense(self, dtype)
        return dense_reference(self, dtype)


@dataclass(frozen=True)
class QuantisedStack:
    """[E, N, K]: as many matrices of one kind, kept one below the other."""

    matrix: Quantised  # [E * N, K]
    num_matrices: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.num_matrices, len(self.matrix.data) // self.num_matrices, self.matrix.num_columns

    @property
    def num_bytes(self) -> int:
        return self.matrix.num_bytes

    def dense(self, dtype: torch.dtype) -> Tensor:
        """[E, N, K]"""
        return self.matrix.dense(dtype).view(self.shape)


def dense_reference(weight: Quantised, dtype: torch.dtype) -> Tensor:
    words = gathered(weight.data) if weight.kind is Kind.FP4 else weight.data
    numbers = _NUMBERS[weight.kind](unpack_words(words, weight.kind.num_parts, weight.part))
    group = torch.arange(weight.num_columns, device=numbers.device) // weight.group
    values = numbers[:, : weight.num_columns] * scales(weight).T[:, group]
    if weight.offset is not None:
        values += weight.offset.float().T[:, group]
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


def pack_words(numbers: Tensor, num_parts: int, part: int) -> Tensor:
    """[N, K] uint8 -> [N, W] int16. Of every run of `part * num_parts` numbers the first `part` lie in the lowest bits
    of as many words, the next ones above them, and so on: they come apart without being shuffled. The last run is
    filled up with zeros."""
    missing = -numbers.shape[1] % (part * num_parts)
    runs = torch.nn.functional.pad(numbers, (0, missing)).unflatten(-1, (-1, num_parts, part)).int()
    words = sum(runs[..., index, :] << (16 // num_parts * index) for index in range(num_parts))
    assert isinstance(words, Tensor)
    return words.to(torch.int16).flatten(-2).contiguous()


def unpack_words(words: Tensor, num_parts: int, part: int) -> Tensor:
    """[N, W] int16 -> [N, K] uint8, and zeros behind."""
    num_bits = 16 // num_parts
    runs = words.int().unflatten(-1, (-1, part))
    parts = [(runs >> (num_bits * index)) & (2**num_bits - 1) for index in range(num_parts)]
    return torch.stack(parts, -2).flatten(-3).to(torch.uint8)


def spread(words: Tensor) -> Tensor:
    """Words of four fp4 -> with a number's bits as far apart as a bfloat16's (sign, two of the exponent, one of the
    mantissa), each three bits to the right of the one before, the last in what is left: a mask and a multiplication
    widen most of them."""
    sign, size = _fp4_parts(words)
    last = sign[3] << 14 | (size[3] & 4) << 11 | (size[3] & 3) << 10
    found = sign[0] << 15 | size[0] << 6 | sign[1] << 12 | size[1] << 3 | sign[2] << 9 | size[2] | last
    return found.to(torch.int16)


def gathered(words: Tensor) -> Tensor:
    """What was spread()."""
    bits = words.int()
    sign = [bits >> place & 1 for place in (15, 12, 9, 14)]
    size = [bits >> 6 & 7, bits >> 3 & 7, bits & 7, bits >> 11 & 4 | bits >> 10 & 3]
    numbers = [(s << 3 | m) << 4 * place for place, (s, m) in enumerate(zip(sign, size, strict=True))]
    return (numbers[0] | numbers[1] | numbers[2] | numbers[3]).to(torch.int16)


def _fp4_parts(words: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    numbers = [words.int() >> 4 * place & 15 for place in range(4)]
    return [number >> 3 for number in numbers], [number & 7 for number in numbers]


def pack_exponents(exponents: Tensor) -> Tensor:
    """[N, G] bytes that stand for 2 ** (byte - 127) -> [ceil(G / 4), N] int32."""
    bytes_ = torch.nn.functional.pad(exponents, (0, -exponents.shape[1] % 4)).contiguous()
    return bytes_.view(torch.int32).T.contiguous()


def scales(weight: Quantised) -> Tensor:
    """[G, N] float32, or a few more than there are groups."""
    if not weight.has_exponents:
        return weight.scale.float()
    places = torch.arange(0, 32, 8, dtype=torch.int32, device=weight.scale.device)
    bytes_ = (weight.scale[:, None] >> places[:, None] & 255).flatten(0, 1).to(torch.uint8)
    return bytes_.view(torch.float8_e8m0fnu).float()


def part_for(num_columns: int, group: int, kind: Kind) -> int | None:
    """How many numbers lie side by side: as many as can be, where scales change only between parts. None: there is no
    such form."""
    part = RUN // kind.num_parts
    if group == num_columns:
        return part
    if num_columns % group:
        return None
    while part >= MIN_PART:
        if group % (part * kind.num_parts) == 0 or group in (part, 2 * part):
            return part
        part //= 2
    return None


def is_packable(num_columns: int, group: int, kind: Kind) -> bool:
    """Whether rows of so many numbers, of which so many share a scale, have such a form."""
    return part_for(num_columns, group, kind) is not None


def pack_numbers(
    kind: Kind, numbers: Tensor, scale: Tensor, offset: Tensor | None = None, order: Tensor | None = None
) -> Quantised:
    """numbers [N, K] uint8, one a byte; scale and offset [N, G], scales in bytes being exponents (of groups of 32).
    is_packable() says whether there is such a form."""
    num_columns = numbers.shape[1]
    group = num_columns // scale.shape[1]
    part = part_for(num_columns, group, kind)
    assert part is not None, (num_columns, group, kind)
    data = pack_words(numbers, kind.num_parts, part)
    data = spread(data) if kind is Kind.FP4 else data
    offset = None if offset is None else offset.float().T.contiguous()
    packed = pack_exponents(scale) if scale.dtype == torch.uint8 else scale.float().T.contiguous()
    return Quantised(kind, data, packed, num_columns, group, offset, order)


def joined(parts: Sequence[Quantised]) -> Quantised | None:
    """One below the other; None where they are of different kinds."""
    first = parts[0]
    for part in parts[1:]:
        same = part.kind is first.kind and part.num_columns == first.num_columns and part.group == first.group
        same = same and part.scale.dtype == first.scale.dtype
        same = (
            same and (part.offset is None) == (first.offset is None) and (part.order is None) == (first.order is None)
        )
        if not same or (part.order is not None and first.order is not None and not part.order.equal(first.order)):
            return None
    if len(parts) == 1:
        return first
    offsets = [part.offset for part in parts if part.offset is not None]
    return replace(
        first,
        data=torch.cat([part.data for part in parts]),
        scale=torch.cat([part.scale for part in parts], 1),
        offset=torch.cat(offsets, 1) if offsets else None,
    )


def quantise(weight: Tensor, kind: Kind) -> Quantised | None:
    """The nearest numbers to a dense matrix [N, K]: in 4 bits with a scale for each group, in 8 one for each row; fp4
    as MXFP4 has it. A stack [E, N, K]: one below the other. None where it has no such form."""
    if weight.dim() == 3:
        parts = [quantise(each, kind) for each in weight]  # one by one, for it takes several times the memory
        found = [part for part in parts if part is not None]
        return joined(found) if found else None
    if kind is Kind.FP4:
        return _quantise_fp4(weight)
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


def _quantise_fp4(weight: Tensor) -> Quantised | None:
    """In groups of 32, whose scales are powers of two: the smallest that leave the largest number within reach."""
    num_rows, num_columns = weight.shape
    if not is_packable(num_columns, FP4_GROUP, Kind.FP4):
        return None
    values = weight.float().view(num_rows, -1, FP4_GROUP)
    most = values.abs().amax(-1).clamp(min=torch.finfo(torch.float32).tiny)
    exponent = (most / FP4_VALUES[-1]).log2().ceil().clamp(-126, 127)
    steps = values / exponent.exp2()[..., None]
    middles = torch.tensor(FP4_VALUES, device=weight.device).unfold(0, 2, 1).mean(-1)
    numbers = torch.bucketize(steps.abs().contiguous(), middles) + 8 * (steps < 0)
    return pack_numbers(Kind.FP4, numbers.view(num_rows, num_columns).to(torch.uint8), (exponent + 127).to(torch.uint8))
