"""Dot products in whole numbers: against the dequantised matrix, a row alone as in company, on older processors too."""

from pathlib import Path

import pytest
import torch
from gguf_blocks import QUANTISED, UNIT, floats_of, random_blocks, rounded
from hypothesis import given, settings
from hypothesis import strategies as st
from older_processors import MARCHES, use_older_processor
from torch import Tensor

from outrider.kernels import native, native_library
from outrider.kernels.native_tiles import empty_tiles, write_tiles
from outrider.kernels.packed import TILE_ROWS, Blocks, Packed, pack_tiles

pytestmark = pytest.mark.skipif(native_library.library() is None, reason="no C compiler, so no native kernels")


def tiled(*parts: Blocks) -> Packed:
    made = []
    for part in parts:
        made.append(empty_tiles(part.type_number, len(part.data), part.row_len))
        write_tiles(made[-1], part)
    return pack_tiles(made)


def dots(x: Tensor, packed: Packed, num_rows: int, bias: Tensor | None = None) -> Tensor:
    return native.linear(x, torch.empty(1, 1).expand(num_rows, x.shape[1]), bias, packed)


@settings(max_examples=80, deadline=None, derandomize=True)
@given(
    number=st.sampled_from(list(QUANTISED)),
    num_inputs=st.integers(1, 40),
    num_rows=st.integers(1, 70),
    num_units=st.integers(1, 5),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 1000),
)
def test_what_the_dequantised_matrix_says_of_the_rounded_input(
    number: int, num_inputs: int, num_rows: int, num_units: int, threads: int, seed: int
) -> None:
    row_len = UNIT[number] * num_units
    blocks = random_blocks(number, num_rows, row_len, seed)
    packed, floats = tiled(blocks), floats_of(blocks)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_inputs, row_len, generator=generator) * 10 ** torch.randint(-3, 3, (num_inputs, 1)).float()
    x[0, : UNIT[number]] = 0.0  # a unit without any
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        found = dots(x, packed, num_rows)
        alone = torch.cat([dots(row[None], packed, num_rows) for row in x])
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, alone), "a row depends on its company"
    near = rounded(x, UNIT[number])
    most = near.abs() @ floats.double().abs().T + 1e-9
    assert ((found - near @ floats.double().T).abs() / most).max() < 2e-6
    chosen = torch.randint(0, num_rows, (5,), generator=generator)
    assert torch.equal(native.look_up(floats, packed, chosen), floats[chosen]), "rows come back as they were"


@pytest.mark.parametrize("first", [0, 3, 16, 40, 41, 60])
def test_parts_of_several_types_and_rows_left_out(first: int) -> None:
    """A joint projection whose tensors were quantised differently; and a part of it that begins within a tile."""
    parts = [random_blocks(number, num_rows, 512, number) for number, num_rows in ((12, 40), (8, 3), (14, 33), (6, 16))]
    floats = torch.cat([floats_of(part) for part in parts])
    x, bias = torch.randn(7, 512), torch.randn(92)
    whole = dots(x, tiled(*parts), 92, bias)
    nested, small = rounded(x, 256) @ floats.double().T, rounded(x, 32) @ floats.double().T
    expected = torch.cat([nested[:, :40], small[:, 40:43], nested[:, 43:76], small[:, 76:]], 1) + bias
    assert torch.allclose(whole.double(), expected, atol=1e-4)
    left = tiled(*parts).rows_from(first)
    assert torch.equal(dots(x, left, 92 - first, bias[first:].clone()), whole[:, first:])
    assert torch.equal(native.look_up(floats[first:], left, torch.arange(92 - first)), floats[first:])


def test_heads_in_pairs_come_to_lie_in_halves() -> None:
    blocks = random_blocks(3, 48, 64, 1)
    tiles = empty_tiles(3, 48, 64)
    write_tiles(tiles, blocks, num_heads=3)
    expected = floats_of(blocks).view(3, 8, 2, 64).transpose(1, 2).reshape(48, 64)
    assert torch.equal(native.dense(expected, pack_tiles([tiles])), expected)


def test_extremes_do_not_overflow() -> None:
    """Every number as large as its type has it, against an input of the largest steps."""
    for number in QUANTISED:
        for byte in (0, 0x80, 0xFF, 0x7F):
            blocks = random_blocks(number, TILE_ROWS, 1024, 0)
            kept = blocks.data.clone()
            blocks.data.fill_(byte)
            name, size = QUANTISED[number], blocks.data.shape[1] // (1024 // UNIT[number])
            scales = slice(208, 210) if name == "Q6_K" else slice(0, 4 if name[-1] in "1K" else 2)
            blocks.data.view(-1, size)[:, scales] = kept.view(-1, size)[:, scales]
            floats, x = floats_of(blocks).double(), torch.ones(2, 1024)
            x[1] = -1
            assert torch.allclose(
                dots(x, tiled(blocks), TILE_ROWS).double(), x.double() @ floats.T, rtol=1e-5, atol=1e-4
            )


@pytest.mark.parametrize("march", MARCHES)
def test_older_processors_say_the_same(march: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """AVX2 to the last bit; without fused multiply-adds, sums are rounded twice."""
    x = torch.randn(5, 1024, generator=torch.Generator().manual_seed(0))
    parts = [random_blocks(number, 21, 1024, number) for number in QUANTISED]
    packed = tiled(*parts)
    expected = dots(x, packed, 21 * len(parts))
    use_older_processor(march, tmp_path, monkeypatch)
    found = dots(x, tiled(*parts), 21 * len(parts))
    assert (
        torch.equal(found, expected) if march == "x86-64-v3" else torch.allclose(found, expected, rtol=1e-5, atol=1e-4)
    )
