"""The Triton experts against the reference, and each promise of theirs: tiles hold every pair once, rows keep their
bits whatever their company."""

from __future__ import annotations

import pytest
import torch
from test_triton import CUDA, DEVICE, DTYPES, check, random
from torch import Tensor

pytest.importorskip("triton")

from outrider.kernels.activation import Activation, ClampedSwish, relu2, silu_mul
from outrider.kernels.gpu import few_experts, router
from outrider.kernels.gpu import moe as gpu_moe
from outrider.kernels.moe import ExpertWeights, experts_reference, softmax_top, softmax_top_reference
from outrider.kernels.norm import Normed, rms_norm_reference


def make_weights(
    num_experts: int, hidden: int, inner: int, dtype: torch.dtype, *, gated: bool = True, bias: bool = False
) -> ExpertWeights:
    width = 2 * inner if gated else inner
    up = random(num_experts, width, hidden, dtype=dtype) / hidden**0.5
    down = random(num_experts, hidden, inner, dtype=dtype, seed=1) / inner**0.5
    biases = (
        (random(num_experts, width, dtype=dtype), random(num_experts, hidden, dtype=dtype)) if bias else (None, None)
    )
    return ExpertWeights(up, down, *biases)


def route(num_rows: int, num_experts: int, num_chosen: int) -> tuple[Tensor, Tensor]:
    return softmax_top(random(num_rows, num_experts, seed=7), num_chosen, renormalise=True)


CASES = [
    # rows, experts, chosen, hidden, inner, activation, gated, bias
    (1, 5, 2, 64, 48, silu_mul, True, False),
    (7, 6, 3, 100, 33, silu_mul, True, True),
    (21, 4, 4, 72, 136, relu2, False, True),
    (5, 9, 1, 40, 24, ClampedSwish(1.7, 2.0), True, True),
    (130, 3, 2, 48, 40, silu_mul, True, False),  # tiles of more than 16 rows
]
CUDA_CASES = [
    (3, 512, 16, 256, 96, silu_mul, True, False),
    (2500, 60, 4, 512, 176, silu_mul, True, True),
    (1700, 16, 6, 256, 200, relu2, False, False),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "num_experts", "chosen", "hidden", "inner", "activation", "gated", "bias"),
    CASES + (CUDA_CASES if CUDA else []),
)
@torch.no_grad()
def test_experts(
    rows: int, num_experts: int, chosen: int, hidden: int, inner: int, activation: Activation, gated: bool, bias: bool,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    weights = make_weights(num_experts, hidden, inner, dtype, gated=gated, bias=bias)
    x = random(rows, hidden, dtype=dtype)
    ids, shares = route(rows, num_experts, chosen)
    wanted = experts_reference(x, ids, shares, weights, activation)
    found = gpu_moe.experts(x, ids, shares, weights, activation)
    check(found, wanted, dtype, 4)
    if few_experts.is_for(rows, chosen):
        check(few_experts.experts(x, ids, shares, weights, activation), wanted, dtype, 4)


FEW_CASES = [
    # rows, experts, chosen, hidden, inner, activation, gated, bias, normed
    (1, 4, 3, 600, 20, silu_mul, True, True, False),  # rows in pieces, the last of them not full
    (6, 7, 2, 264, 24, silu_mul, True, False, True),
    (8, 3, 3, 20, 300, relu2, False, True, False),
    (2, 2, 1, 2064, 8, torch.tanh, False, False, True),  # larger pieces
    (3, 20, 10, 24, 520, silu_mul, True, False, False),  # several experts a warp
    (8, 60, 6, 24, 40, silu_mul, True, True, False),  # more experts than programs of a column
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("rows", "num_experts", "chosen", "hidden", "inner", "activation", "gated", "bias", "normed"), FEW_CASES
)
@torch.no_grad()
def test_few_rows(
    rows: int, num_experts: int, chosen: int, hidden: int, inner: int, activation: Activation, gated: bool, bias: bool,
    normed: bool, dtype: torch.dtype,
) -> None:  # fmt: skip
    weights = make_weights(num_experts, hidden, inner, dtype, gated=gated, bias=bias)
    x, residual = random(rows, hidden + 8, dtype=dtype)[:, :hidden], random(rows, hidden, dtype=dtype, seed=5)
    ids, shares = route(rows, num_experts, chosen)
    given = Normed(x, random(hidden, seed=3), 1e-5, 0.5, True) if normed else x
    plain = rms_norm_reference(x, random(hidden, seed=3), 1e-5, offset=0.5, wide=True) if normed else x
    wanted = experts_reference(plain, ids, shares, weights, activation) + residual
    found = few_experts.experts(given, ids, shares, weights, activation, residual)
    check(found, wanted, dtype, 8)
    for own in [slice(row, row + count) for count in (1, 2, 5) for row in range(0, rows - count + 1, count)]:
        mine = Normed(x[own], random(hidden, seed=3), 1e-5, 0.5, True) if normed else x[own]
        again = few_experts.experts(mine, ids[own], shares[own], weights, activation, residual[own])
        check(again, wanted[own], dtype, 8)
        # bits do not depend on the company; who is alone, or one of three, is computed in another way
        if len(again) > 1 and (len(again) > few_experts.MAX_APART) == (rows > few_experts.MAX_APART):
            assert torch.equal(again, found[own])


@pytest.mark.parametrize(("rows", "num_experts", "count"), [(1, 8, 2), (5, 60, 6), (3, 128, 8), (2, 5, 5)])
@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_best_experts(rows: int, num_experts: int, count: int, renormalise: bool, dtype: torch.dtype) -> None:
    logits = random(rows, num_experts, seed=3).to(dtype)
    logits[:, 1] = logits[:, 0]  # of equals the first
    ids, shares = router.softmax_top(logits, count, renormalise=renormalise)
    wanted_ids, wanted = softmax_top_reference(logits, count, renormalise=renormalise)
    torch.testing.assert_close(shares, wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(logits.gather(1, ids.long()), logits.gather(1, wanted_ids))
    assert ((ids == 0).any(1) | ~(ids == 1).any(1)).all()
    alike, _ = router.softmax_top(torch.zeros_like(logits), count, renormalise=renormalise)
    assert torch.equal(alike.cpu(), torch.arange(count, dtype=torch.int32).expand(rows, -1))


@pytest.mark.parametrize(
    ("rows", "num_experts", "is_normed", "wide"), [(1, 8, False, True), (5, 30, True, True), (3, 33, False, False)]
)
@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_routes_in_one_launch(rows: int, num_experts: int, is_normed: bool, wide: bool, dtype: torch.dtype) -> None:
    x, weight = random(rows, 72, dtype=dtype), random(num_experts, 72, dtype=dtype, seed=1)
    bias = None if is_normed else random(num_experts, dtype=dtype, seed=2)
    scale, counter = random(72, seed=3), torch.zeros(1, dtype=torch.int32, device=DEVICE)
    given = Normed(x, scale, 1e-5, 0.5, True) if is_normed else x
    plain = rms_norm_reference(x.float(), scale, 1e-5, offset=0.5, wide=True) if is_normed else x.float()
    logits = plain @ weight.float().T + (0.0 if bias is None else bias.float())
    logits = logits if wide else logits.to(dtype).float()
    wanted_ids, wanted = softmax_top_reference(logits, 3, renormalise=True)
    assert router.is_for(given, weight)
    for _ in range(2):
        ids, shares = router.route(given, weight, bias, 3, counter, renormalise=True, wide=wide)
        close = 1e-4 if dtype is torch.float32 else 5e-2
        torch.testing.assert_close(shares, wanted, rtol=close, atol=close)
        torch.testing.assert_close(logits.gather(1, ids.long()), logits.gather(1, wanted_ids), rtol=close, atol=close)
        assert not counter.any()


@pytest.mark.parametrize("rubbish", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_hold_rubbish_choose_experts_that_exist(rubbish: float) -> None:
    logits = random(3, 6, seed=3)
    logits[1], logits[2, 2:4] = rubbish, rubbish
    ids, _ = router.softmax_top(logits, 4, renormalise=True)
    assert ((ids >= 0) & (ids < 6)).all()
    assert torch.equal(ids[0], softmax_top_reference(logits[:1], 4, renormalise=True)[0][0].int())


@torch.no_grad()
def test_no_rows_and_strided_rows() -> None:
    weights = make_weights(4, 32, 16, torch.float32)
    ids, shares = route(6, 4, 2)
    x = random(6, 64)[:, ::2]
    assert gpu_moe.experts(x[:0], ids[:0], shares[:0], weights, silu_mul).shape == (0, 32)
    check(
        gpu_moe.experts(x, ids, shares, weights, silu_mul),
        experts_reference(x, ids, shares, weights, silu_mul),
        x.dtype,
    )


@pytest.mark.parametrize("rows", [1, 6, 50, 400])
@pytest.mark.parametrize("crowd", ["even", "one", "last", "first and last"])
def test_tiles_hold_every_pair_once(rows: int, crowd: str) -> None:
    num_experts, chosen = 11, 3
    ids = torch.randint(0, num_experts, (rows, chosen), generator=torch.Generator().manual_seed(rows)).to(DEVICE)
    if crowd == "one":
        ids[:] = 4
    elif crowd == "last":
        ids[:] = num_experts - 1
    elif crowd == "first and last":
        ids = ids % 2 * (num_experts - 1)
    tiles = gpu_moe.group(ids, num_experts)
    assert len(tiles.experts) <= -(-rows * chosen // tiles.block_m) + min(num_experts, rows * chosen)
    seen = []
    for expert, pairs in zip(tiles.experts.tolist(), tiles.pairs.tolist(), strict=True):
        if expert >= 0:
            inside = [pair for pair in pairs if pair >= 0]
            assert inside
            assert pairs == inside + [-1] * (tiles.block_m - len(inside))
            assert all(ids.flatten()[pair] == expert for pair in inside)
            seen += inside
    assert sorted(seen) == list(range(rows * chosen))


@pytest.mark.parametrize("dtype", DTYPES)
@torch.no_grad()
def test_rows_keep_their_bits(dtype: torch.dtype) -> None:
    """Interpreted, a product's bits are numpy's, which knows no such promise across shapes: there, nearly."""
    num_experts, chosen = 6, 3
    weights = make_weights(num_experts, 96, 40, dtype, bias=True)
    x = random(1200, 96, dtype=dtype)
    ids, shares = route(1200, num_experts, chosen)
    few = gpu_moe.experts(x[:9], ids[:9], shares[:9], weights, silu_mul)
    for row in range(0, 9, 1 if CUDA else 4):
        alone = gpu_moe.experts(x[row : row + 1], ids[row : row + 1], shares[row : row + 1], weights, silu_mul)
        assert torch.equal(alone[0], few[row]) or (
            not CUDA and torch.allclose(alone[0], few[row], rtol=1e-5, atol=1e-6)
        )
    for count in (40, 90, 300, 1200) if CUDA else ():  # every size of tile
        many = gpu_moe.experts(x[:count], ids[:count], shares[:count], weights, silu_mul)
        assert torch.equal(many[:9], few), count


@pytest.mark.skipif(not CUDA, reason="graphs are CUDA's")
@torch.no_grad()
def test_in_a_graph() -> None:
    """Captured with one routing, played with another."""
    weights = make_weights(8, 128, 64, torch.bfloat16)
    x = random(5, 128, dtype=torch.bfloat16)
    ids, shares = route(5, 8, 2)
    gpu_moe.experts(x, ids, shares, weights, silu_mul)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gpu_moe.experts(x, ids, shares, weights, silu_mul)
    ids.copy_((ids + 3) % 8)
    graph.replay()
    assert torch.equal(out, gpu_moe.experts(x, ids, shares, weights, silu_mul))
