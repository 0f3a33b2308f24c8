"""Packed weights give back the very same bits, or are not used."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.kernels import native, native_library
from outrider.kernels.packed import AFFINE4, BFLOAT16, SCALED8, Packed, pack

needs_native = pytest.mark.skipif(native_library.library() is None, reason="no C compiler, so no native kernels")


def make(kind: int, num_rows: int, depth: int, seed: int) -> torch.Tensor:
    """A float32 matrix that came from this form, as a GGUF or bfloat16 checkpoint gives it."""
    generator = torch.Generator().manual_seed(seed)
    if kind == BFLOAT16:
        return torch.randn(num_rows, depth, generator=generator).bfloat16().float()
    shape = (num_rows * depth // 32, 32)
    scale = (torch.rand(shape[0], 1, generator=generator) * 0.02 + 1e-4).half().float()
    if kind == SCALED8:
        levels = torch.randint(-127, 128, shape, generator=generator).float()
        levels[:, 0] = 127.0
        return (levels * scale).view(num_rows, depth)
    levels = torch.randint(0, 16, shape, generator=generator).float()
    levels[:, 3], levels[:, 7] = 0.0, 15.0
    offset = -torch.rand(shape[0], 1, generator=generator).half().float()
    return (levels * scale + offset).view(num_rows, depth)


def unpack(packed: Packed) -> torch.Tensor:
    """The obvious way back."""
    if packed.kind == BFLOAT16:
        return (packed.data.to(torch.int32) << 16).view(torch.float32)
    assert packed.scales is not None
    num_rows = len(packed.data)
    if packed.kind == SCALED8:
        return (packed.data.view(num_rows, -1, 32).float() * packed.scales[..., None]).view(num_rows, -1)
    pairs = packed.data.view(num_rows, -1, 16)
    levels = torch.cat([pairs & 15, pairs >> 4], dim=-1).float()
    return (levels * packed.scales[..., :1] + packed.scales[..., 1:]).view(num_rows, -1)


@pytest.mark.parametrize("kind", [BFLOAT16, AFFINE4, SCALED8])
def test_packing_loses_nothing(kind: int) -> None:
    weight = make(kind, 70, 96, 1)
    packed = pack(weight)
    assert packed is not None
    assert packed.kind == kind
    assert torch.equal(unpack(packed), weight)


def test_what_has_no_smaller_form_is_left_alone() -> None:
    generator = torch.Generator().manual_seed(0)
    assert pack(torch.randn(40, 64, generator=generator)) is None
    for kind in (BFLOAT16, AFFINE4, SCALED8):  # one weight off by one bit, beyond the rows that are probed first
        weight = make(kind, 40, 64, 2)
        weight[39, 63] = torch.nextafter(weight[39, 63], torch.tensor(9.0))
        assert pack(weight) is None


@needs_native
@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from([BFLOAT16, AFFINE4, SCALED8]),
    num_rows=st.integers(1, 70),
    num_outputs=st.integers(1, 120),
    blocks=st.integers(1, 70),
    threads=st.sampled_from([1, 2]),
    seed=st.integers(0, 1000),
)
def test_the_same_bits_as_the_plain_weights(
    kind: int, num_rows: int, num_outputs: int, blocks: int, threads: int, seed: int
) -> None:
    weight = make(kind, num_outputs, 32 * blocks, seed)
    x = torch.randn(num_rows, 32 * blocks, generator=torch.Generator().manual_seed(seed))
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        packed = pack(weight)
        assert packed is not None
        assert torch.equal(native.linear(x, weight, None, packed), native.linear(x, weight))
    finally:
        torch.set_num_threads(before)
