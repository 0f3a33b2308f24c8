"""Experts in few bits against what they stand for: odd sizes, borders of groups, zero points, few rows and many."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

CUDA = torch.cuda.is_available()
pytest.importorskip("triton")

from outrider.kernels.activation import Activation, ClampedSilu, ClampedSwish, gelu_tanh_mul, relu2, silu_mul  # noqa: E402
from outrider.kernels.gpu import few_experts, gates, moe  # noqa: E402
from outrider.kernels.moe import ExpertWeights, experts_reference, softmax_top_reference  # noqa: E402
from outrider.kernels.quantised import Kind, QuantisedStack, dense_reference, pack_numbers, quantise  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if CUDA else [torch.float32]
ACTIVATIONS: list[Activation] = [silu_mul, gelu_tanh_mul, relu2, ClampedSwish(1.7, 1.0), ClampedSilu(0.8), torch.tanh]


def random_stack(
    kind: Kind, count: int, num_rows: int, num_columns: int, group: int, *, has_offset: bool, seed: int
) -> QuantisedStack:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(256 if kind.num_bits == 8 else 16, (count * num_rows, num_columns), generator=generator)
    if kind is Kind.FP8:
        numbers[numbers & 127 == 127] = 0  # no number
    size = (count * num_rows, num_columns // group)
    spread = {Kind.FP8: 200.0, Kind.INT8: 70.0}.get(kind, 4.0)
    scale = (torch.rand(size, generator=generator) + 0.5) / spread / num_columns**0.5
    if kind is Kind.FP4 and group == 32:
        scale = torch.randint(122, 125, size, generator=generator).to(torch.uint8)
        scale[0, 0] = 0
    offset = torch.randn(size, generator=generator).to(DEVICE) / num_columns**0.5 if has_offset else None
    return QuantisedStack(pack_numbers(kind, numbers.to(DEVICE, torch.uint8), scale.to(DEVICE), offset), count)


@given(
    kind=st.sampled_from(Kind),
    sizes=st.sampled_from([(64, 32, 32), (32, 96, 32), (128, 64, 64), (160, 32, 32), (40, 24, 0)]),
    num_rows=st.sampled_from([1, 3, 8, 17] if CUDA else [1, 3, 5, 9]),
    routing=st.sampled_from([(4, 1), (5, 3)]),
    activation=st.sampled_from(ACTIVATIONS),
    flags=st.tuples(*[st.booleans()] * 3),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=60 if CUDA else 6, deadline=None)
@torch.no_grad()
def test_experts_in_few_bits(
    kind: Kind,
    sizes: tuple[int, int, int],
    num_rows: int,
    routing: tuple[int, int],
    activation: Activation,
    flags: tuple[bool, bool, bool],
    dtype: torch.dtype,
) -> None:
    has_offset, has_bias, has_residual = flags
    (hidden, inner, group), (count, chosen) = sizes, routing
    width = 2 * inner if gates.has_two(gates.gate_of(activation)[0]) else inner
    has_offset = has_offset and kind is not Kind.FP4
    up = random_stack(kind, count, width, hidden, group or hidden, has_offset=has_offset, seed=1)
    down = random_stack(kind, count, hidden, inner, group or inner, has_offset=has_offset, seed=2)
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(num_rows, hidden, generator=generator).to(DEVICE, dtype)
    residual = torch.randn(num_rows, hidden, generator=generator).to(DEVICE, dtype) if has_residual else None
    biases = [torch.randn(count, size, generator=generator).to(DEVICE, dtype) for size in (width, hidden)]
    logits = torch.randn(num_rows, count, generator=generator).to(DEVICE)
    ids, shares = softmax_top_reference(logits, chosen, renormalise=True)
    dense = ExpertWeights(
        dense_reference(up.matrix, torch.float32).view(up.shape),
        dense_reference(down.matrix, torch.float32).view(down.shape),
        *([bias.float() for bias in biases] if has_bias else ()),
    )
    wanted = experts_reference(x.float(), ids, shares, dense, activation)
    weights = ExpertWeights(up, down, *(biases if has_bias else ()))
    found = moe.experts(x, ids.int(), shares, weights, activation)
    tolerance = 2e-5 if dtype is torch.float32 else 3e-2
    assert (found.float() - wanted).abs().max() <= tolerance * wanted.abs().max().clamp(min=0.01)
    if few_experts.is_for(num_rows, chosen):
        found = few_experts.experts(x, ids.int(), shares, weights, activation, residual)
        wanted = wanted if residual is None else wanted + residual.float()
        assert (found.float() - wanted).abs().max() <= tolerance * wanted.abs().max().clamp(min=0.01)


@torch.no_grad()
def test_many_rows_of_an_expert_are_computed_with_it_widened(monkeypatch: pytest.MonkeyPatch) -> None:
    up = random_stack(Kind.INT4, 2, 64, 64, 32, has_offset=True, seed=1)
    down = random_stack(Kind.FP4, 2, 64, 32, 32, has_offset=False, seed=2)
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    ids, shares = torch.zeros(40, 1, dtype=torch.int32, device=DEVICE), torch.ones(40, 1, device=DEVICE)
    kept = moe.experts(x, ids, shares, ExpertWeights(up, down), silu_mul)
    monkeypatch.setattr(moe, "WIDENED", 16)
    widened = moe.experts(x, ids, shares, ExpertWeights(up, down), silu_mul)
    torch.testing.assert_close(widened, kept, rtol=1e-5, atol=1e-5)
    monkeypatch.setattr(QuantisedStack, "dense", None)  # exact mode has no use for it
    assert torch.equal(moe.experts(x, ids, shares, ExpertWeights(up, down), silu_mul, exact=True), kept)


@pytest.mark.parametrize("kind", [Kind.FP4, Kind.INT4, Kind.FP8])
def test_a_stack_is_rounded_matrix_by_matrix(kind: Kind) -> None:
    weight = torch.randn(3, 16, 128, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    found = quantise(weight, kind)
    assert found is not None
    stack = QuantisedStack(found, 3)
    assert stack.shape == weight.shape
    distance = (stack.dense(torch.float32) - weight).norm() / weight.norm()
    assert 0 < distance < {Kind.FP8: 0.05, Kind.INT4: 0.15, Kind.FP4: 0.2}[kind]
    if kind is Kind.FP4:
        assert stack.num_bytes * 8 == 4.25 * weight.numel()
