"""A mixture's experts in one native call: the bits of expert after expert."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.kernels import native_library
from outrider.kernels.activation import gelu_tanh_mul, silu_mul
from outrider.kernels.moe import ExpertWeights, experts, experts_reference


@pytest.mark.skipif(native_library.library() is None, reason="no C compiler, so no native kernels")
@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    num_rows=st.integers(1, 33),
    num_experts=st.integers(1, 9),
    share=st.floats(0.1, 1.0),
    sizes=st.tuples(st.integers(1, 40), st.integers(1, 40)),
    bias=st.booleans(),
    gelu=st.booleans(),
    seed=st.integers(0, 100),
)
def test_the_same_bits_as_expert_after_expert(
    num_rows: int, num_experts: int, share: float, sizes: tuple[int, int], bias: bool, gelu: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    hidden, inner = sizes
    ids = torch.rand(num_rows, num_experts).topk(max(1, int(share * num_experts))).indices
    up, down = torch.randn(num_experts, 2 * inner, hidden), torch.randn(num_experts, hidden, inner)
    biases = (torch.randn(num_experts, 2 * inner), torch.randn(num_experts, hidden)) if bias else (None, None)
    given = torch.randn(num_rows, hidden), ids, torch.rand(ids.shape), ExpertWeights(up, down, *biases)
    activation = gelu_tanh_mul if gelu else silu_mul
    with torch.inference_mode():
        assert torch.equal(experts(*given, activation), experts_reference(*given, activation))
