"""The values of a GGUF file's tensors: quantised blocks are expanded by the native kernels, all processors at
work, straight into the memory that wants them. Without a C compiler, the `gguf` package expands them, more slowly."""

from __future__ import annotations

import math
import mmap
from types import ModuleType

import torch
from torch import Tensor

from outrider.engine.gguf_file import PLAIN_TYPES, TensorEntry
from outrider.engine.host_memory import give_back, use_large_pages
from outrider.kernels import native
from outrider.kernels.packed import Blocks

CHUNK = 16 * 2**20  # elements that are expanded at a time where they cannot be written straight to where they belong


def check_readable(entries: list[TensorEntry]) -> None:
    """Complains now, rather than halfway through the weights, where nothing can expand these tensors."""
    if any(entry.type_name not in PLAIN_TYPES for entry in entries) and native.library() is None:
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
    step = len(rows) if straight or num_heads else max(CHUNK // rows.shape[1], 1)
    for first in range(0, len(rows), step):
        part = rows[first : first + step]
        begin, end = (_offset(entry, row) for row in (first, first + len(part)))
        stored = torch.frombuffer(memory, dtype=torch.uint8, count=end - begin, offset=begin)
        if entry.type_name in PLAIN_TYPES:
            part.copy_(in_halves(stored.view(PLAIN_TYPES[entry.type_name]).view(part.shape), num_heads))
        elif native.library() is None:
            part.copy_(in_halves(_expand_slowly(stored, entry).view(part.shape), num_heads))
        else:
            expanded = part if straight else torch.empty(part.shape, dtype=torch.float32, device="cpu")
            blocks = stored.view(len(part), -1)
            native.dequantise(Blocks(blocks, entry.type_number, part.shape[1]), expanded, num_heads)
            del blocks
            if not straight:
                part.copy_(expanded)
        del stored  # the file can only be closed when nothing looks at it
        give_back(memory, begin, end - begin)


def read_blocks(memory: mmap.mmap, entry: TensorEntry, num_heads: int = 0) -> Blocks:
    """A copy of a quantised matrix as it is stored, but for the order of rows."""
    num_rows, row_len = entry.shape
    stored = torch.frombuffer(memory, dtype=torch.uint8, count=entry.num_bytes, offset=entry.offset).view(num_rows, -1)
    data = torch.empty(stored.shape, dtype=torch.uint8, device="cpu")
    use_large_pages(data)
    data.copy_(in_halves(stored, num_heads))
    del stored
    give_back(memory, entry.offset, entry.num_bytes)
    return Blocks(data, entry.type_number, row_len)


def in_halves(rows: Tensor, num_heads: int) -> Tensor:
    """Rows of heads in interleaved pairs, as (all first ones, all second ones) of every head."""
    if not num_heads:
        return rows
    pairs = rows.view(num_heads, len(rows) // num_heads // 2, 2, -1)
    return pairs.transpose(1, 2).reshape(rows.shape)


def _offset(entry: TensorEntry, row: int) -> int:
    """Of a row in the file."""
    return entry.offset + entry.num_bytes * row // (math.prod(entry.shape) // entry.shape[-1])


def _expand_slowly(stored: Tensor, entry: TensorEntry) -> Tensor:
    gguf = import_gguf()
    rows = stored.view(-1, entry.row_bytes).numpy()
    return torch.from_numpy(gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(entry.type_number)))
