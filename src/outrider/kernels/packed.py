"""A float32 matrix in a smaller form that gives back the very same bits, so that less memory is read for every token.
Checkpoints are rarely float32 at heart: they come from bfloat16, or from 4- or 8-bit blocks with scales."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from outrider.kernels.quantised import Kind, Quantised, scales, unpack_words

BFLOAT16, AFFINE4, SCALED8, BLOCKS, TILES, FLOAT16, SCALED_FP8 = 1, 2, 3, 4, 5, 6, 7  # as in unpack.c
HALVES = {torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
BLOCK = 32
WHOLE_ROW = 0  # a group of as many numbers as a row has
TILE_ROWS = 16  # as in tiles.c
# by the type of a GGUF file's blocks: numbers of a row, bytes of sixteen rows of them (unit_bytes of tiles.c), and
# where among these the half-precision scales lie
TILE_UNITS = {
    2: (32, 288, slice(256, 288)),  # Q4_0
    3: (32, 320, slice(256, 320)),  # Q4_1
    6: (32, 352, slice(320, 352)),  # Q5_0
    7: (32, 384, slice(320, 384)),  # Q5_1
    8: (32, 544, slice(512, 544)),  # Q8_0
    12: (256, 2368, slice(2048, 2112)),  # Q4_K
    13: (256, 2880, slice(2560, 2624)),  # Q5_K
    14: (256, 3392, slice(3072, 3104)),  # Q6_K
}
PART_BYTES = 32  # of the table of a matrix's parts
PROBE_ROWS = 16  # enough to see that a matrix has no such form, as most of the time
CHUNK_ROWS = 4096


@dataclass(frozen=True)
class Blocks:
    """Rows as a GGUF file stores them."""

    data: Tensor  # [N, bytes of a row] uint8
    type_number: int  # the file's number of the blocks' type
    row_len: int  # floats of a row


@dataclass(frozen=True)
class Tiles:
    """The same numbers and scales, sixteen rows side by side: for dot products in whole numbers (tiles.c)."""

    data: Tensor  # [tiles, bytes of a tile] uint8
    type_number: int
    row_len: int
    num_rows: int
    skipped: int = 0  # rows of the first tile that do not count

    @staticmethod
    def tile_bytes(type_number: int, row_len: int) -> int:
        unit, num_bytes, _ = TILE_UNITS[type_number]
        return row_len // unit * num_bytes

    def rows_from(self, first: int) -> Tiles:
        passed, skipped = divmod(self.skipped + first, TILE_ROWS)
        return replace(self, data=self.data[passed:], num_rows=self.num_rows - first, skipped=skipped)


@dataclass(frozen=True)
class Packed:
    kind: int
    # 16 bits [N, K] int16; two weights a byte [N, K / 2] uint8; [N, K] int8 or uint8; or where each part is [parts, 4]
    # int64: address, first row after it, type, and of BLOCKS the bytes of a row, of TILES its `skipped`
    data: Tensor
    scales: Tensor | None = None  # of every group along K: scale and offset [N, G, 2], or scale [N, G]
    parts: tuple[Blocks, ...] | tuple[Tiles, ...] = ()  # one below the other: all there is of the weight
    group: int = BLOCK  # numbers that share a scale: 32, 64, 128, ..., or WHOLE_ROW

    @property
    def num_bytes(self) -> int:
        tensors = [self.data, *([] if self.scales is None else [self.scales]), *(part.data for part in self.parts)]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    @property
    def shift(self) -> int:
        """2 ** shift blocks are a group."""
        return 31 if self.group == WHOLE_ROW else (self.group // BLOCK).bit_length() - 1

    def rows(self, first: int, end: int) -> Packed:
        """Some of its rows, where it has no parts."""
        assert not self.parts
        return replace(self, data=self.data[first:end], scales=None if self.scales is None else self.scales[first:end])

    def rows_from(self, first: int) -> Packed:
        """Without the first rows."""
        if not self.parts:
            return self.rows(first, len(self.data))
        blocks, tiles, passed = [], [], 0
        for part in self.parts:
            num_rows = part.num_rows if isinstance(part, Tiles) else len(part.data)
            without = max(first - passed, 0)
            passed += num_rows
            if without >= num_rows:
                continue
            if isinstance(part, Tiles):
                tiles.append(part.rows_from(without))
            else:
                blocks.append(replace(part, data=part.data[without:]))
        return pack_tiles(tiles) if tiles else pack_blocks(blocks)


@dataclass(frozen=True)
class PackedStack:
    """[E, N, K]: as many matrices of one kind, kept one below the other."""

    matrix: Packed  # [E * N, K]
    shape: tuple[int, int, int]

    @property
    def num_bytes(self) -> int:
        return self.matrix.num_bytes

    def __getitem__(self, number: int) -> Packed:
        return self.matrix.rows(number * self.shape[1], (number + 1) * self.shape[1])


def pack_halves(weight: Tensor) -> Packed:
    """A matrix [N, K] of 16 bits as it is."""
    return Packed(HALVES[weight.dtype], weight.view(torch.int16))


def pack_quantised(weight: Quantised) -> Packed | None:
    """A matrix in few bits as GPUs have it, in a form for CPUs that stands for the same numbers; None: it has none."""
    if weight.kind is Kind.FP4:  # whose scales are powers of two
        return pack_halves(weight.dense(torch.bfloat16))
    num_rows, num_columns, group = len(weight.data), weight.num_columns, weight.group
    if weight.order is not None or num_columns % BLOCK or group % BLOCK:
        return None
    numbers = unpack_words(weight.data, weight.kind.num_parts, weight.part)[:, :num_columns]
    if group == num_columns:
        group, repeats = WHOLE_ROW, 1
    else:
        shared = group & -group  # the largest power of two that divides it
        group, repeats = shared, group // shared
    scale = _by_group(scales(weight), weight, repeats)
    if weight.kind in (Kind.INT4, Kind.UINT4):
        offset = torch.zeros_like(scale) if weight.offset is None else _by_group(weight.offset, weight, repeats)
        if weight.kind is Kind.INT4:
            offset = offset - 8 * scale
        low, high = numbers.unflatten(1, (-1, BLOCK)).chunk(2, dim=2)
        data = (low | high << 4).reshape(num_rows, -1)
        return Packed(AFFINE4, data, torch.stack([scale, offset], 2).contiguous(), group=group)
    if weight.offset is not None:
        return None
    kind = SCALED8 if weight.kind is Kind.INT8 else SCALED_FP8
    numbers = numbers.contiguous()
    return Packed(kind, numbers.view(torch.int8) if kind == SCALED8 else numbers, scale.contiguous(), group=group)


def _by_group(values: Tensor, weight: Quantised, repeats: int) -> Tensor:
    """[G, N], one for each group -> [N, G * repeats]."""
    num_groups = weight.num_columns // weight.group
    return values[:num_groups].T.float().repeat_interleave(repeats, dim=1)


def pack_blocks(parts: Sequence[Blocks]) -> Packed:
    """A matrix that stays as the file has it; its parts may be of several types."""
    table, end = [], 0
    for part in parts:
        end += len(part.data)
        table.append((part.data.data_ptr(), end, part.type_number, part.data.shape[1]))
    return Packed(BLOCKS, torch.tensor(table, dtype=torch.int64, device="cpu"), parts=tuple(parts))


def pack_tiles(parts: Sequence[Tiles]) -> Packed:
    """A matrix in tiles: what it is multiplied by is rounded to 8 bits first."""
    table, end = [], 0
    for part in parts:
        end += part.num_rows
        table.append((part.data.data_ptr(), end, part.type_number, part.skipped))
    return Packed(TILES, torch.tensor(table, dtype=torch.int64, device="cpu"), parts=tuple(parts))


def pack(weight: Tensor, *, halves_only: bool = False) -> Packed | None:
    """The smaller form of a float32 matrix [N, K], or None where there is none that is exact. `halves_only`: none whose
    numbers would have to be unpacked."""
    bfloat16 = _pack_halves(weight, torch.bfloat16)
    if bfloat16 is not None:
        return bfloat16
    for kind, pack_part in ((AFFINE4, _pack_affine), (SCALED8, _pack_scaled)):
        if not halves_only and weight.shape[1] % BLOCK == 0 and pack_part(weight[:PROBE_ROWS]) is not None:
            parts = [pack_part(part) for part in weight.split(CHUNK_ROWS)]
            done = [part for part in parts if part is not None]
            if len(done) == len(parts):
                return Packed(kind, torch.cat([part[0] for part in done]), torch.cat([part[1] for part in done]))
    return _pack_halves(weight, torch.float16)


def _pack_halves(weight: Tensor, dtype: torch.dtype) -> Packed | None:
    if not _is_exact(weight[:PROBE_ROWS], dtype):
        return None
    halves = torch.empty(weight.shape, dtype=dtype, device="cpu")
    for part, out in zip(weight.split(CHUNK_ROWS), halves.split(CHUNK_ROWS), strict=True):
        if not _is_exact(part, dtype):
            return None
        out.copy_(part)
    return pack_halves(halves)


def _is_exact(weight: Tensor, dtype: torch.dtype) -> bool:
    return torch.equal(weight.to(dtype).float(), weight)


def _pack_affine(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """Every block as offset + scale * (0..15), if that gives the same floats: as Q4_1 files and their kin store them.

    The smallest weight of a block is its offset, the largest is 15 scales above; scales are half-precision numbers,
    so the division, which float32 rounds, still tells which one it was.
    """
    blocks = weight.reshape(-1, BLOCK)
    offset = blocks.amin(1, keepdim=True)
    scale = ((blocks.amax(1, keepdim=True) - offset) / 15).half().float()
    levels = ((blocks - offset) / scale.clamp(min=1e-30)).round_().clamp_(0, 15)
    if not torch.equal(levels * scale + offset, blocks):
        return None
    low, high = levels.to(torch.uint8).split(BLOCK // 2, dim=1)
    num_rows = len(weight)
    return (low | (high << 4)).view(num_rows, -1), torch.cat([scale, offset], dim=1).view(num_rows, -1, 2)


def _pack_scaled(weight: Tensor) -> tuple[Tensor, Tensor] | None:
    """Every block as scale * (-127..127), as Q8_0 files store them; the largest weight is 127 scales."""
    blocks = weight.reshape(-1, BLOCK)
    scale = (blocks.abs().amax(1, keepdim=True) / 127).half().float()
    levels = (blocks / scale.clamp(min=1e-30)).round_().clamp_(-127, 127)
    if not torch.equal(levels * scale, blocks):
        return None
    return levels.to(torch.int8).view(len(weight), -1), scale.view(len(weight), -1)
