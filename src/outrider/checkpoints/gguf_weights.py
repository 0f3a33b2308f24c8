"""The values of a GGUF file's tensors: quantised blocks are expanded by the native kernels, all processors at
work, straight into the memory that wants them. Without a C compiler, the `gguf` package expands them, more slowly."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from types import ModuleType

import torch
from torch import Tensor

from outrider.checkpoints.gguf_file import TensorEntry
from outrider.host_memory import Arena, give_back
from outrider.kernels import native, native_library
from outrider.kernels.native_tiles import write_tiles
from outrider.kernels.packed import TILE_ROWS, Blocks, Tiles

PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
CHUNK = (
    8 * 2**20
)  # elements that are read at a time: so much of the file, and of what is changed on its way, is in memory


def check_readable(entries: list[TensorEntry]) -> None:
    """Complains now, rather than halfway through the weights, where nothing can expand these tensors."""
    if any(entry.type_name not in PLAIN_TYPES for entry in entries) and native_library.library() is None:
        import_gguf()


def import_gguf() -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise ValueError("quantised GGUF files need a C compiler, or the gguf package: pip install gguf") from error
    return gguf


def empty_for(entry: TensorEntry) -> Tensor:
    """Memory for a copy of a tensor: plain types as stored, quantised ones in float32."""
    return torch.empty(entry.shape, dtype=PLAIN_TYPES.get(entry.type_name, torch.float32), device="cpu")


def read_tensor(memory: mmap.mmap, entry: TensorEntry) -> Tensor:
    """A copy of the tensor: plain types as stored, quantised ones in float32."""
    out = empty_for(entry)
    read_into(memory, entry, out)
    return out


def read_into(memory: mmap.mmap, entry: TensorEntry, out: Tensor, num_heads: int = 0) -> None:
    """Fills a dense tensor of the same shape, of any device and dtype. With num_heads, the rows of every head lie in
    interleaved pairs, and come to lie in halves."""
    rows = out.view(-1, entry.shape[-1])
    straight = out.is_cpu and out.dtype is torch.float32
    for part, stored in _stretches(memory, entry, rows, whole=num_heads > 0):
        if entry.type_name in PLAIN_TYPES:
            part.copy_(in_halves(stored.view(PLAIN_TYPES[entry.type_name]), num_heads))
        elif native_library.library() is None:
            part.copy_(in_halves(_expand_slowly(stored, entry), num_heads))
        else:
            expanded = part if straight else torch.empty(part.shape, dtype=torch.float32, device="cpu")
            native.dequantise(Blocks(stored, entry.type_number, part.shape[1]), expanded, num_heads)
            if not straight:
                part.copy_(expanded)


def read_blocks(memory: mmap.mmap, entry: TensorEntry, num_heads: int, arena: Arena) -> Blocks:
    """A copy of a quantised matrix as it is stored, but for the order of rows."""
    data = arena.take(entry.shape[0], entry.row_bytes)
    for part, stored in _stretches(memory, entry, data, whole=num_heads > 0):
        part.copy_(in_halves(stored, num_heads))
    return Blocks(data, entry.type_number, entry.shape[1])


def read_tiles(memory: mmap.mmap, entry: TensorEntry, num_heads: int, arena: Arena) -> Tiles:
    """The blocks of a matrix, laid out for dot products in whole numbers."""
    num_rows, row_len = entry.shape
    data = arena.take(-(-num_rows // TILE_ROWS), Tiles.tile_bytes(entry.type_number, row_len))
    tiles = Tiles(data, entry.type_number, row_len, num_rows)
    first = 0
    for part, stored in _stretches(memory, entry, torch.empty(num_rows, 0), whole=num_heads > 0):
        write_tiles(tiles, Blocks(stored, entry.type_number, row_len), first, num_heads)
        first += len(part)
    return tiles


def _stretches(memory: mmap.mmap, entry: TensorEntry, rows: Tensor, *, whole: bool) -> Iterator[tuple[Tensor, Tensor]]:
    """Some rows of the destination, and what the file has for them (uint8), one stretch after the other. The file's
    memory is given back in between, and must not be held on to: the file could not be closed."""
    step = len(rows) if whole else max(CHUNK // entry.shape[-1], 1)
    for first in range(0, len(rows), step):
        part = rows[first : first + step]
        offset, num_bytes = entry.offset + first * entry.row_bytes, len(part) * entry.row_bytes
        stored = torch.frombuffer(memory, dtype=torch.uint8, count=num_bytes, offset=offset)
        yield part, stored.view(len(part), -1)
        del stored
        give_back(memory, offset, num_bytes)


def in_halves(rows: Tensor, num_heads: int) -> Tensor:
    """Rows of heads in interleaved pairs, as (all first ones, all second ones) of every head."""
    if not num_heads:
        return rows
    pairs = rows.view(num_heads, len(rows) // num_heads // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(rows.shape)


def _expand_slowly(stored: Tensor, entry: TensorEntry) -> Tensor:
    gguf = import_gguf()
    return torch.from_numpy(gguf.quants.dequantize(stored.numpy(), gguf.GGMLQuantizationType(entry.type_number)))
