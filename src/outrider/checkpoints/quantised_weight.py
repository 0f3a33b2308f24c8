"""One quantised weight: the tensors it is stored in, and the arithmetic that turns them into numbers again.
In every format that is (values - zero) * scale, in float32, with one scale and zero for each block of the weight."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from outrider.kernels.quantised import Kind, Quantised, is_packable, joined, pack_numbers
from outrider.types import Checkpoint

Shape = tuple[int, ...]
Size = tuple[int, int]  # rows and columns of a block
WHOLE = 0  # as many rows or columns as there are
PER_TENSOR, PER_ROW = (WHOLE, WHOLE), (1, WHOLE)
CPU = torch.device("cpu")
FLOAT8_TYPES = {torch.float8_e4m3fn, torch.float8_e5m2}


@dataclass(frozen=True)
class Settings:
    """The quantization_config, or an object inside it; an entry that makes no sense is an error that names it."""

    values: Mapping[str, Any]
    where: str

    def get(self, key: str, kind: type, default: Any) -> Any:
        """The entry, or the default where it is missing or null."""
        value = self.values.get(key)
        if value is None:
            return default
        if type(value) is not kind:
            raise self.unsupported(key, value, f"a {kind.__name__}")
        return value

    def within(self, key: str) -> "Settings":
        return Settings(self.get(key, dict, {}), f"{self.where}.{key}")

    def group_size(self, default: int) -> Size:
        """Blocks of one row and so many columns; -1 stands for all columns."""
        size = self.get("group_size", int, default)
        if size < 1 and size != -1:
            raise self.unsupported("group_size", size, "-1 and positive numbers")
        return (1, WHOLE if size == -1 else size)

    def block_size(self, key: str, default: list[int]) -> Size:
        size = self.get(key, list, default)
        if len(size) != 2 or not all(type(length) is int and length > 0 for length in size):
            raise self.unsupported(key, size, "two positive numbers")
        return (size[0], size[1])

    def unsupported(self, key: str, value: Any, supported: str) -> ValueError:
        return ValueError(
            f"{self.where} has {key} {value!r}, which cannot be read; supported: {supported}. "
            "Give a checkpoint in one of these forms, or one that is not quantised"
        )


@dataclass(frozen=True)
class Stored:
    """One weight as it lies in the checkpoint: tensors by the part they play."""

    checkpoint: Checkpoint
    name: str  # of the dense weight
    parts: dict[str, str]  # "values" or "packed"; "scale", "zero", ...; and the name of each
    device: torch.device = CPU  # where its tensors are taken to

    def shape(self, part: str, num_dims: int | None = None) -> Shape:
        shape = self.checkpoint.shape(self.parts[part])
        if num_dims is not None and len(shape) != num_dims:
            raise self.broken(part, f"has shape {shape}, not one of {num_dims} dimensions")
        return shape

    def tensor(self, part: str) -> Tensor:
        return self.checkpoint.tensor(self.parts[part]).to(self.device)

    def sized(self, part: str, shape: Shape, dtype: torch.dtype | None = None) -> Tensor:
        """A part that must have this shape, and this type where one is given."""
        tensor = self.tensor(part)
        if tensor.shape != shape:
            raise self.broken(part, f"has shape {tuple(tensor.shape)}, not {shape}")
        if dtype is not None and tensor.dtype != dtype:
            raise self.broken(part, f"is {tensor.dtype}, not {dtype}")
        return tensor

    def per_block(self, part: str, shape: Shape, sizes: Sequence[Size]) -> tuple[Tensor, Size]:
        """A part with one number for each block of a weight of this shape, and the size of the blocks, of `sizes`."""
        tensor = self.tensor(part)
        known = [(rows or shape[-2], columns or shape[-1]) for rows, columns in sizes]
        for rows, columns in known:
            grid = (*shape[:-2], math.ceil(shape[-2] / rows), math.ceil(shape[-1] / columns))
            if _without_trailing_ones(tensor.shape) == _without_trailing_ones(grid):
                return tensor.reshape(grid), (rows, columns)
        if PER_TENSOR in sizes and tensor.numel() == 1:  # one number for all experts of a stack
            return tensor.reshape([1] * len(shape)), (shape[-2], shape[-1])
        blocks = " or ".join(f"{rows} x {columns}" for rows, columns in known)
        raise self.broken(part, f"has shape {tuple(tensor.shape)}, but {shape} is to be in blocks of {blocks}")

    def groups(self, part: str, num_columns: int, num_groups: int) -> Tensor:
        """A part that says of each column which group it belongs to."""
        groups = self.sized(part, (num_columns,)).long()
        if not 0 <= int(groups.min()) <= int(groups.max()) < num_groups:
            raise self.broken(part, f"names groups {int(groups.min())} to {int(groups.max())} of {num_groups}")
        return groups

    def broken(self, part: str, reason: str) -> ValueError:
        return ValueError(f"{self.checkpoint.path}: {self.parts[part]} {reason}; download or quantise the model again")


@dataclass(frozen=True)
class Blocks:
    """A weight in few bits: its numbers, and the scale and the zero point that each block of them shares."""

    values: Tensor  # [..., N, K]; if they are float32 already, they are worked on in place
    scale: Tensor  # [..., ceil(N / rows), ceil(K / columns)]
    size: Size
    zero: Tensor | None = None  # like scale; None: 0
    groups: Tensor | None = None  # [K]: which block each column belongs to; None: they are in order
    num_bits: int = 8

    def dense(self) -> Tensor:
        if self.groups is not None:  # each column gets the scale of its group
            zero = None if self.zero is None else self.zero[..., self.groups]
            return Blocks(self.values, self.scale[..., self.groups], (self.size[0], 1), zero).dense()
        num_columns, columns = self.values.shape[-1], self.size[1]
        padding = -num_columns % columns
        values = self.values.float()
        if padding:
            values = functional.pad(values, (0, padding))
        values = values.unflatten(-1, (-1, columns))
        if self.zero is not None:
            values -= self._spread(self.zero.float())
        values *= self._spread(_scale_values(self.scale))
        return values.flatten(-2)[..., :num_columns].contiguous()

    def quantised(self) -> Quantised | None:
        """The weight as kernels compute with it, matrices of a stack one below the other; None where they know no such
        form."""
        if self.values.ndim == 3:
            parts = [self._matrix(number).quantised() for number in range(len(self.values))]
            known = [part for part in parts if part is not None]
            return joined(known) if known and len(known) == len(parts) else None
        found = self._numbers()
        num_columns, columns = self.values.shape[-1], self.size[1]
        if found is None or self.values.ndim != 2 or not is_packable(num_columns, columns, found[0]):
            return None
        kind, numbers, middle = found
        scale = self._rows(_scale_values(self.scale) if self.scale.element_size() == 1 else self.scale)
        zero = None if self.zero is None else self._rows(self.zero.float())
        offset = None if zero is None or (zero == middle).all() else (middle - zero) * scale.float()
        if self.groups is None:
            return pack_numbers(kind, numbers, scale, offset)
        order = self.groups.argsort(stable=True)
        if (self.groups.bincount(minlength=scale.shape[1]) != columns).any():
            return None
        return pack_numbers(kind, numbers[:, order], scale, offset, order)

    def _matrix(self, number: int) -> "Blocks":
        """One of a stack; scales may be all of theirs."""

        def own(each: Tensor | None) -> Tensor | None:
            return None if each is None else each[number if len(each) > 1 else 0]

        scale = own(self.scale)
        assert scale is not None
        return replace(self, values=self.values[number], scale=scale, zero=own(self.zero))

    def _numbers(self) -> tuple[Kind, Tensor, int] | None:
        """The numbers of the weight: their kind, one a byte, and what was taken off each of them."""
        values = self.values
        if values.dtype == torch.float8_e4m3fn:
            return Kind.FP8, values.view(torch.uint8), 0
        if values.dtype == torch.int8:
            return Kind.INT8, values.contiguous().view(torch.uint8), 0
        if values.dtype == torch.uint8 and self.num_bits == 4:
            return Kind.INT4, values, 8
        if values.dtype == torch.uint8 and self.num_bits == 8:
            return Kind.INT8, values ^ 128, 128
        return None

    def _rows(self, numbers: Tensor) -> Tensor:
        """A number a block becomes one a row of the block, [N, ceil(K / columns)]."""
        return numbers.repeat_interleave(self.size[0], -2)[..., : self.values.shape[-2], :]

    def _spread(self, numbers: Tensor) -> Tensor:
        """A number a block becomes a number a row of the block, [..., N, ceil(K / columns), 1]."""
        return self._rows(numbers).unsqueeze(-1)


def unpack(words: Tensor, dim: int, length: int, num_bits: int, shifts: Sequence[int] = ()) -> Tensor:
    """Unsigned numbers that lie side by side in int32 words, from the lowest bits up unless `shifts` says otherwise."""
    places = torch.tensor(shifts or range(0, 32, num_bits), dtype=torch.int32, device=words.device)
    numbers = (words.movedim(dim, -1).unsqueeze(-1) >> places).bitwise_and_((1 << num_bits) - 1)
    return numbers.to(torch.uint8).flatten(-2)[..., :length].movedim(-1, dim)


def num_words(length: int, num_bits: int) -> int:
    return math.ceil(length * num_bits / 32)


def _scale_values(scale: Tensor) -> Tensor:
    """Scales in bytes are exponents: 2 ** (byte - 127)."""
    return (scale.view(torch.float8_e8m0fnu) if scale.dtype == torch.uint8 else scale).float()


def _without_trailing_ones(shape: Sequence[int]) -> list[int]:
    """A scale of [N] is as good as one of [N, 1], but one of [1, N] is not."""
    kept = list(shape)
    while kept and kept[-1] == 1:
        kept.pop()
    return kept
