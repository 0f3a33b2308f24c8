"""Sums that several programs share, put together by the last of them: on a GPU where there is one, else interpreted."""

from __future__ import annotations

from itertools import permutations

import pytest
import torch
from test_triton import CUDA
from test_triton_quantised import DEVICE, random_weight

pytest.importorskip("triton")

import triton
import triton.language as tl

from outrider.kernels.gpu import product_parts
from outrider.kernels.gpu.hopper import on_hopper
from outrider.kernels.gpu.product_parts import counters_for, is_last, place_of, put_together
from outrider.kernels.quantised import Kind


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


def test_without_counters_nothing_is_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(product_parts, "MAX_COUNTERS", 1)
    assert counters_for(torch.device(DEVICE), 1) is not None
    assert counters_for(torch.device(DEVICE), 2) is None


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="nothing is recorded")
def test_recordings_count_as_others_do(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters are not made within a recording; those that are there may be used by one, time after time."""
    held = on_hopper("held", torch.device(DEVICE))
    if held is None:
        pytest.skip("that is for Hopper")
    weight = random_weight(Kind.INT4, 128, 8, 128, has_offset=False, is_ordered=False)
    x = torch.randn(9, 1024, device=DEVICE).to(torch.bfloat16)
    wanted, tile = held.linear(x, weight, tile=held.Tile(4, 4, 1)), held.Tile(4, 4, 1, 4)
    shared = held.linear(x, weight, tile=tile)
    torch.testing.assert_close(shared, wanted, rtol=2e-2, atol=2e-2 * float(wanted.abs().amax()))
    for made, answer in (({}, wanted), (dict(product_parts._made), shared)):
        monkeypatch.setattr(product_parts, "_made", made)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = [held.linear(x, weight, tile=tile) for _ in range(3)]
        for _ in range(4):
            graph.replay()
            assert all(torch.equal(each, answer) for each in found)
        assert not any(bool(each.any()) for each in made.values())
