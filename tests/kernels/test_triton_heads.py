"""Every head's own weight, and queries that are turned into a place of their own, against the references."""

from __future__ import annotations

import pytest
import torch
from test_triton import CUDA, DEVICE, DTYPES, check, random

pytest.importorskip("triton")

from outrider.kernels.gpu import head_linear as gpu
from outrider.kernels.gpu import rope as gpu_rope
from outrider.kernels.head_linear import head_linear_reference
from outrider.kernels.rope import rope_write_reference


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "heads", "inner", "width"), [(1, 3, 128, 40), (7, 2, 24, 33), (70, 2, 100, 64)])
def test_head_linear(rows: int, heads: int, inner: int, width: int, dtype: torch.dtype) -> None:
    x = random(rows, heads, inner + 8, dtype=dtype)[..., 3 : 3 + inner]
    weight = random(heads, inner, width, dtype=dtype, seed=1).transpose(1, 2) / inner**0.5
    out = torch.full((rows, heads, width + 5), 9.0, dtype=dtype, device=DEVICE)
    found = gpu.head_linear(x, weight, out[..., 2 : 2 + width])
    check(found, head_linear_reference(x.contiguous(), weight.contiguous()), dtype, 4)
    assert (out[..., :2] == 9).all()
    assert (out[..., 2 + width :] == 9).all()
    if CUDA:
        alone = gpu.head_linear(x[:1], weight, torch.empty_like(found[:1]))
        assert torch.equal(alone, found[:1])


@pytest.mark.parametrize("dtype", DTYPES)
def test_queries_turn_into_a_place(dtype: torch.dtype) -> None:
    q, k, v = random(5, 3, 8, dtype=dtype), random(5, 1, 8, dtype=dtype, seed=1), random(5, 1, 6, dtype=dtype, seed=2)
    angle = random(5, 4, seed=3)
    locations = torch.tensor([1, 0, 5, 4, 2], device=DEVICE)
    pages = [(torch.zeros(2, 4, 1, 8, dtype=dtype, device=DEVICE), torch.zeros(2, 4, 1, 6, dtype=dtype, device=DEVICE))]
    pages.append((pages[0][0].clone(), pages[0][1].clone()))
    out = torch.zeros(5, 3, 14, dtype=dtype, device=DEVICE)
    rotary = (angle.cos(), angle.sin())
    found = gpu_rope.rope_write(q, k, v, rotary, pages[0], locations, out=out[..., 6:])
    check(found, rope_write_reference(q, k, v, rotary, pages[1], locations), dtype)
    assert not out[..., :6].any()
    for ours, theirs in zip(*pages, strict=True):
        check(ours, theirs, dtype)


@pytest.mark.parametrize("rubbish", [torch.nan, torch.inf, -torch.inf])
def test_pages_hold_numbers_only(rubbish: float) -> None:
    """Whoever is given the page next multiplies what is left in it by 0."""
    q, k, v = random(3, 2, 16), random(3, 1, 16, seed=1), random(3, 1, 16, seed=2)
    k[1], v[1, 0, 3] = rubbish, rubbish
    pages = tuple(torch.full((4, 2, 1, 16), 7.0, device=DEVICE) for _ in range(2))
    turn = torch.ones(3, 8, device=DEVICE), torch.zeros(3, 8, device=DEVICE)
    gpu_rope.rope_write(q, k, v, turn, pages, torch.tensor([2, 5, 6], device=DEVICE))
    keys, values = (each.flatten(0, 1) for each in pages)
    assert keys[5].eq(0).all()
    assert values[5, 0, 3] == 0
    check(values[5, 0, 4:], v[1, 0, 4:], torch.float32)
    check(keys[[2, 6]], k[[0, 2]], torch.float32)
