"""Sums that several programs share, put together by the last of them: on a GPU where there is one, else interpreted."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from test_triton import CUDA
from test_triton_quantised import DEVICE, DTYPES, random_weight

pytest.importorskip("triton")

import triton
import triton.language as tl

from outrider.kernels.gpu import product_parts, wide
from outrider.kernels.gpu.product_parts import counters_for, is_last, place_of, put_together
from outrider.kernels.gpu.wide import Tile
from outrider.kernels.quantised import Kind, dense_reference


@pytest.fixture(autouse=True)
def nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of sums that another launch has made."""
    empty = torch.empty

    def filled(*size: Any, **options: Any) -> torch.Tensor:
        made = empty(*size, **options)
        return made.fill_(float("nan")) if made.is_floating_point() else made

    monkeypatch.setattr(torch, "empty", filled)


@triton.jit
def _shared(values, order, sums, counters, out, num_rows, num_columns, PARTS: tl.constexpr):
    """Parts are given to programs in some order."""
    part = tl.load(order + tl.program_id(0))
    row, column = tl.arange(0, 8)[None, :], tl.arange(0, 16)[:, None]
    fits = (row < num_rows) & (column < num_columns)
    at = place_of(row, column, num_columns)
    first = part.to(tl.int64) * num_rows * num_columns
    own = tl.load(values + first + at, mask=fits, other=0.0)
    tl.store(sums + first + at, own, mask=fits)
    if is_last(counters, PARTS):
        total = put_together(own, part, sums, row, column, fits, num_rows, num_columns, PARTS)
        tl.store(out + at, total, mask=fits)


def test_sums_do_not_depend_on_who_is_last() -> None:
    values = torch.randn(4, 5, 13, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    wanted = ((values[0] + values[1]) + values[2]) + values[3]
    assert not torch.equal(((values[3] + values[2]) + values[1]) + values[0], wanted)
    counters = counters_for(values.device, 1)
    assert counters is not None
    for order in permutations(range(4)):
        sums, out = torch.empty(4, 5, 13, device=DEVICE), torch.empty(5, 13, device=DEVICE)
        _shared[(4,)](values, torch.tensor(order, device=DEVICE), sums, counters, out, 5, 13, PARTS=4)
        assert torch.equal(out, wanted), order
        assert not counters.any()


@pytest.mark.parametrize("split", [2, 3, 4, 8])
@pytest.mark.parametrize("rows", [1, 16, 40, 64, 70])
def test_products_in_one_launch_and_in_two(rows: int, split: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the same bits, every time; and counters are as they were."""
    dtype, generator = DTYPES[-1], torch.Generator().manual_seed(rows)
    weight = random_weight(Kind.INT4, 130, 9, 128, has_offset=split == 3, is_ordered=False)
    x = torch.randn(rows, 9 * 128, generator=generator).to(DEVICE, dtype)
    bias = torch.randn(130, generator=generator).to(DEVICE, dtype)
    residual = torch.randn(rows, 260, generator=generator).to(DEVICE, dtype)[:, 130:]
    wanted = x.float() @ dense_reference(weight, torch.float32).T + bias.float() + residual.float()
    two = wide.linear(x, weight, bias, residual, tile=Tile(64, 3, 4, split, joined=False))
    close = 4e-2 if CUDA else 2e-4
    torch.testing.assert_close(two.float(), wanted, rtol=close, atol=close * float(wanted.abs().amax()))
    launches: list[object] = []
    monkeypatch.setattr(wide, "_add_up", launches)
    for _ in range(3):
        out = torch.empty(rows, 130, dtype=dtype, device=DEVICE)
        assert torch.equal(wide.linear(x, weight, bias, residual, out=out, tile=Tile(64, 3, 4, split)), two)
        counters = counters_for(x.device, 3)
        assert counters is not None
        assert not counters.any()


def test_without_counters_there_are_two_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = random_weight(Kind.UINT4, 66, 4, 128, has_offset=True, is_ordered=True)
    x = torch.randn(33, 512, device=DEVICE).to(DTYPES[-1])
    two = wide.linear(x, weight, tile=Tile(64, 3, 4, 2, joined=False))
    monkeypatch.setattr(product_parts, "MAX_COUNTERS", 1)
    assert counters_for(x.device, 2) is None
    assert torch.equal(wide.linear(x, weight, tile=Tile(64, 3, 4, 2)), two)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="nothing is recorded")
def test_recordings_count_as_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters are not made within a recording; those that are there may be used by one, time after time."""
    weight = random_weight(Kind.INT4, 130, 8, 128, has_offset=False, is_ordered=False)
    x = torch.randn(40, 1024, device=DEVICE).to(torch.bfloat16)
    wanted = wide.linear(x, weight, tile=Tile(64, 3, 4, 4, joined=False))
    assert torch.equal(wide.linear(x, weight, tile=Tile(64, 3, 4, 4)), wanted)
    for made in ({}, dict(product_parts._made)):
        monkeypatch.setattr(product_parts, "_made", made)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = [wide.linear(x, weight, tile=Tile(64, 3, 4, 4)) for _ in range(3)]
        for _ in range(4):
            graph.replay()
            assert all(torch.equal(each, wanted) for each in found)
        assert not any(bool(each.any()) for each in made.values())
