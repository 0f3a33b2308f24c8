"""Products that norm their rows on the way against norm, then product: linears and experts, dense and in few bits."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_triton_quantised import random_weight

CUDA = torch.cuda.is_available()
pytest.importorskip("triton")

from outrider.kernels.activation import Activation, gelu_tanh_mul, silu_mul  # noqa: E402
from outrider.kernels.gpu import few_experts, gates, norm, normed  # noqa: E402
from outrider.kernels.moe import ExpertWeights, experts_reference  # noqa: E402
from outrider.kernels.norm import Normed, rms_norm_reference  # noqa: E402
from outrider.kernels.quantised import Kind, QuantisedStack, quantise  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if CUDA else [torch.float32]


def rows_of(num_rows: int, width: int, dtype: torch.dtype) -> Normed:
    generator = torch.Generator().manual_seed(4)
    x = (torch.randn(num_rows, width, generator=generator) * torch.rand(num_rows, 1, generator=generator) * 9).to(dtype)
    weight = torch.rand(width, generator=generator) + 0.5
    return Normed(x.to(DEVICE), weight.to(DEVICE), 1e-5, 0.25, wide=True)


def dense_rows(x: Normed) -> torch.Tensor:
    return rms_norm_reference(x.x.float(), x.weight, x.eps, offset=x.offset, wide=True)


def check(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    tolerance = 2e-5 if dtype is torch.float32 else 2e-2
    assert (found.float() - wanted).abs().max() <= tolerance * wanted.abs().max().clamp(min=0.01)


@given(
    kind=st.sampled_from([None, *Kind]),
    shape=st.sampled_from([(1, 40), (9, 128), (3, 64), (5, 32), (1, 360), (36, 32)]),
    num_rows=st.sampled_from([1, 5, 8]),
    num_outputs=st.sampled_from([2, 34, 70]),
    activation=st.sampled_from([None, silu_mul, gelu_tanh_mul]),
    flags=st.tuples(st.booleans(), st.booleans()),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=60 if CUDA else 12, deadline=None)
@torch.no_grad()
def test_linears(
    kind: Kind | None,
    shape: tuple[int, int],
    num_rows: int,
    num_outputs: int,
    activation: Activation | None,
    flags: tuple[bool, bool],
    dtype: torch.dtype,
) -> None:
    has_offset, has_bias = flags
    width = shape[0] * shape[1]
    generator = torch.Generator().manual_seed(1)
    if kind is None:
        weight = torch.randn(num_outputs, width, generator=generator).to(DEVICE, dtype)
        dense = weight.float()
    else:
        weight = random_weight(kind, num_outputs, *shape, has_offset=has_offset, is_ordered=False)
        dense = weight.dense(torch.float32)
    bias = torch.randn(num_outputs, generator=generator).to(DEVICE, dtype) if has_bias else None
    x = rows_of(num_rows, width, dtype)
    wanted = dense_rows(x) @ dense.T
    wanted = wanted if bias is None else wanted + bias.float()
    assert normed.is_for(x, weight) == (kind is None)
    found = normed.linear(x, weight, bias, activation)
    check(found, wanted if activation is None else activation(wanted), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", [None, Kind.INT4, Kind.FP4])
@torch.no_grad()
def test_experts(kind: Kind | None, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    up = torch.randn(5, 96, 160, generator=generator).to(DEVICE) / 160**0.5
    down = torch.randn(5, 160, 48, generator=generator).to(DEVICE) / 48**0.5
    weights = ExpertWeights(up.to(dtype), down.to(dtype))
    if kind is not None:
        rounded = quantise(up, kind)
        assert rounded is not None
        weights = ExpertWeights(QuantisedStack(rounded, 5), down.to(dtype))
    x = rows_of(4, 160, dtype)
    ids = torch.tensor([[0, 3], [3, 1], [4, 0], [2, 3]], dtype=torch.int32, device=DEVICE)
    shares = torch.rand(4, 2, generator=generator).to(DEVICE)
    dense = weights.widened(torch.float32)
    wanted = experts_reference(
        dense_rows(x), ids, shares, ExpertWeights(dense.up.float(), dense.down.float()), silu_mul  # type: ignore[union-attr]
    )  # fmt: skip
    check(few_experts.experts(x, ids, shares, weights, silu_mul), wanted, dtype)


@torch.no_grad()
def test_a_norm_that_adds_a_residual() -> None:
    x = rows_of(3, 70, torch.float32)
    residual = torch.randn(3, 140, generator=torch.Generator().manual_seed(0)).to(DEVICE)[:, ::2]
    found = norm.rms_norm(x.x, x.weight, x.eps, offset=x.offset, wide=True, residual=residual)
    torch.testing.assert_close(found, residual + dense_rows(x))


def test_gates_are_those_of_the_activations() -> None:
    assert gates.gate_of(torch.tanh)[0] == gates.NONE
    assert not gates.has_two(gates.NONE)
