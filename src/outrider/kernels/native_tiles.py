"""Quantised matrices laid out for dot products in whole numbers (tiles.c), from the blocks of a GGUF file."""

from __future__ import annotations

import struct

import torch

from outrider.kernels.native import _address, _native
from outrider.kernels.packed import TILE_ROWS, Blocks, Tiles

_TILE = struct.Struct("@2q 7q")  # tile_work of tiles.c


def empty_tiles(type_number: int, num_rows: int, row_len: int) -> Tiles:
    """Empty tiles of a matrix [num_rows, row_len]; numbers are or-ed into them."""
    num_tiles = -(-num_rows // TILE_ROWS)
    size = Tiles.tile_bytes(type_number, row_len)
    return Tiles(torch.zeros(num_tiles, size, dtype=torch.uint8, device="cpu"), type_number, row_len, num_rows)


def write_tiles(tiles: Tiles, blocks: Blocks, first_row: int = 0, num_heads: int = 0) -> None:
    """Rows of the matrix from first_row on. With num_heads, they lie in the interleaved pairs of rotary dimensions, and
    come to lie in halves."""
    num_rows, row_bytes = blocks.data.shape
    assert blocks.type_number == tiles.type_number, (blocks.type_number, tiles.type_number)
    assert blocks.row_len == tiles.row_len, (blocks.row_len, tiles.row_len)
    assert first_row + num_rows <= tiles.num_rows, (first_row, num_rows, tiles.num_rows)
    assert num_heads == 0 or num_rows % (2 * num_heads) == 0, (num_rows, num_heads)
    addresses = _address(blocks.data, torch.uint8), _address(tiles.data, torch.uint8)
    sizes = blocks.type_number, num_rows, blocks.row_len, row_bytes, first_row, num_heads, torch.get_num_threads()
    _native().tile(_TILE.pack(*addresses, *sizes))
