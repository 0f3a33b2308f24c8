"""Rows of a table by number, in Triton, against torch: to the last bit."""

from __future__ import annotations

import pytest
import torch
from test_triton import DEVICE, DTYPES, random

from outrider.kernels.gpu import take as gpu
from outrider.kernels.take import take_rows_reference

SHAPES = [((7, 24), (5,)), ((40, 1100), (3,)), ((9, 2, 3, 8), (4,)), ((7, 16), (2, 3)), ((5, 8), (0,))]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1.0, 33.25])
@pytest.mark.parametrize(("table_shape", "index_shape"), SHAPES)
def test_take_rows(
    table_shape: tuple[int, ...], index_shape: tuple[int, ...], scale: float, dtype: torch.dtype
) -> None:
    table = random(*table_shape, dtype=dtype)
    index = torch.randint(len(table), index_shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    assert gpu.take_rows(table, index, scale).equal(take_rows_reference(table, index, scale))


def test_an_index_may_be_any_view() -> None:
    table, index = random(9, 24), torch.arange(8, device=DEVICE)
    for view in (index[3:], index[::2], index[1].expand(4), index.int()[1:]):
        assert gpu.take_rows(table, view).equal(take_rows_reference(table, view))
