"""Matrices in few bits against what they stand for: on a GPU where there is one, else interpreted on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

CUDA = torch.cuda.is_available()
pytest.importorskip("triton")

from outrider.kernels.gpu import quantised as gpu  # noqa: E402
from outrider.kernels.gpu import sliced, wide, widen  # noqa: E402
from outrider.kernels.quantised import (  # noqa: E402
    FP4_VALUES,
    Kind,
    Quantised,
    dense_reference,
    gathered,
    is_packable,
    joined,
    pack_numbers,
    pack_words,
    quantise,
    spread,
    unpack_words,
)

DEVICE = "cuda" if CUDA else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if CUDA else [torch.float32]


def random_weight(
    kind: Kind, num_rows: int, num_groups: int, group: int, *, has_offset: bool, is_ordered: bool, seed: int = 0
) -> Quantised:
    generator = torch.Generator().manual_seed(seed)
    num_columns = num_groups * group
    numbers = torch.randint(256 if kind.num_bits == 8 else 16, (num_rows, num_columns), generator=generator)
    if kind is Kind.FP8:
        numbers[numbers & 127 == 127] = 0  # no number
    scale = torch.rand(num_rows, num_groups, generator=generator) * 0.1 + 0.01
    offset = torch.randn(num_rows, num_groups, generator=generator).to(DEVICE) if has_offset else None
    order = torch.randperm(num_columns, generator=generator).to(DEVICE) if is_ordered else None
    return pack_numbers(kind, numbers.to(DEVICE, torch.uint8), scale.to(DEVICE, torch.bfloat16), offset, order)


@given(
    kind=st.sampled_from(Kind),
    num_rows=st.sampled_from([2, 34, 66]),
    shape=st.sampled_from([(1, 128), (9, 128), (3, 64), (5, 32), (1, 360), (3, 192), (2, 256), (8, 16)]),
    num_inputs=st.sampled_from([1, 3, 17, 70]),
    flags=st.tuples(*[st.booleans()] * 5),
    split=st.sampled_from([0, 0, 1, 2, 3]),
    dtype=st.sampled_from(DTYPES),
)
@settings(max_examples=60 if CUDA else 25, deadline=None)
def test_products_are_those_of_the_dense_matrix(
    kind: Kind,
    num_rows: int,
    shape: tuple[int, int],
    num_inputs: int,
    flags: tuple[bool, bool, bool, bool, bool],
    split: int,
    dtype: torch.dtype,
) -> None:
    """split: in how many parts warps that work together add up; 0: as it comes."""
    has_offset, is_ordered, has_bias, has_residual, is_gated = flags
    if not is_packable(shape[0] * shape[1], shape[1], kind):
        return
    weight = random_weight(kind, num_rows, *shape, has_offset=has_offset, is_ordered=is_ordered)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(num_inputs, shape[0] * shape[1], generator=generator).to(DEVICE, dtype)
    bias = torch.randn(num_rows, generator=generator).to(DEVICE, dtype) if has_bias else None
    width = num_rows // 2 if is_gated else num_rows
    residual = torch.randn(num_inputs, width, generator=generator).to(DEVICE, dtype) if has_residual else None
    wanted = x.float() @ dense_reference(weight, torch.float32).T
    if bias is not None:
        wanted += bias.float()
    if is_gated:
        gate, up = wanted.chunk(2, -1)
        wanted = torch.nn.functional.silu(gate) * up
    if residual is not None:
        wanted += residual.float()
    if split:
        found = wide.linear(x, weight, bias, residual, gated=is_gated, tile=wide.Tile(64, 3, 4, split))
    else:
        found = gpu.linear(x, weight, bias, residual, gated=is_gated)
    close = 2e-4 if dtype is torch.float32 else 4e-2
    torch.testing.assert_close(found.float(), wanted, rtol=close, atol=close * float(wanted.abs().amax()))
    if not CUDA:  # the interpreter multiplies with a library whose bits depend on the number of rows
        return
    several = gpu.linear(x, weight, bias, residual, gated=is_gated, exact=True)
    alone = gpu.linear(x[:1], weight, bias, None if residual is None else residual[:1], gated=is_gated, exact=True)
    assert torch.equal(alone, several[:1])


@pytest.mark.parametrize("num_inputs", [1, 9, 40])
@pytest.mark.parametrize("inner", [72, 512, 640])
def test_dense_matrices_are_sliced_too(num_inputs: int, inner: int) -> None:
    generator = torch.Generator().manual_seed(0)
    dtype = DTYPES[-1]
    x = torch.randn(num_inputs, inner, generator=generator).to(DEVICE, dtype)
    weight = torch.randn(34, inner, generator=generator).to(DEVICE, dtype)
    residual = torch.randn(num_inputs, 34, generator=generator).to(DEVICE, dtype)
    found = sliced.linear(
        x, weight, widen.DENSE, residual=residual, part=widen.DENSE_PART, group=0, gated=False, exact=False, out=None
    )
    wanted = x.float() @ weight.float().T + residual.float()
    close = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found.float(), wanted, rtol=close, atol=close * float(wanted.abs().amax()))


@pytest.mark.parametrize("kind", Kind)
@pytest.mark.parametrize(("has_offset", "is_ordered"), [(False, False), (True, True)])
@pytest.mark.parametrize("shape", [(3, 128), (5, 32), (1, 200)])
def test_widened_at_once(kind: Kind, has_offset: bool, is_ordered: bool, shape: tuple[int, int]) -> None:
    if not is_packable(shape[0] * shape[1], shape[1], kind):
        pytest.skip("no such form")
    weight = random_weight(kind, 5, *shape, has_offset=has_offset, is_ordered=is_ordered)
    wanted = dense_reference(weight, torch.float32)
    found = gpu.dense(weight, torch.float32)
    if has_offset:  # a GPU rounds once where the reference rounds twice
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(found, wanted)


def test_bits_of_fp4_lie_where_a_mask_finds_them() -> None:
    words = torch.arange(-(2**15), 2**15).to(torch.int16)
    assert torch.equal(gathered(spread(words)), words)
    bits = spread(words).int() & 0xFFFF
    last = bits << 1 & 0x8000 | bits >> 5 & 0x0100 | bits >> 4 & 0x00C0
    values = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)])
    for place, found in enumerate([bits & 0x81C0, bits << 3 & 0x81C0, bits << 6 & 0x81C0, last]):
        wide = found.to(torch.int16).view(torch.bfloat16).float() * 2.0**126
        assert torch.equal(wide, values[(words.int() >> 4 * place & 15).long()])


@given(st.integers(1, 4), st.integers(1, 300), st.sampled_from([16, 32, 64]), st.sampled_from([2, 4]))
def test_words_come_apart(num_rows: int, num_columns: int, part: int, num_parts: int) -> None:
    num_bits = 16 // num_parts
    numbers = torch.randint(2**num_bits, (num_rows, num_columns), dtype=torch.uint8)
    words = pack_words(numbers, num_parts, part)
    across = pack_words(numbers.T.contiguous().T, num_parts, part)  # as some checkpoints store them
    assert torch.equal(across, words)
    assert across.is_contiguous()
    assert words.shape == (num_rows, -(-num_columns // (part * num_parts)) * part)
    apart = unpack_words(words, num_parts, part)
    assert torch.equal(apart[:, :num_columns], numbers)
    assert not apart[:, num_columns:].any()
    assert torch.equal(words[:, 0].int() & (2**num_bits - 1), numbers[:, 0].int())
    if num_columns > part:
        assert torch.equal(words[:, 0].int() >> num_bits & (2**num_bits - 1), numbers[:, part].int())


def test_all_numbers_of_four_bits() -> None:
    numbers = torch.arange(16, dtype=torch.uint8).repeat(8)[None]
    ones = torch.ones(1, 1)
    fp4 = dense_reference(pack_numbers(Kind.FP4, numbers, ones), torch.float32)[0, :16]
    assert fp4.tolist() == [*FP4_VALUES, *(-value for value in FP4_VALUES)]
    int4 = dense_reference(pack_numbers(Kind.INT4, numbers, ones), torch.float32)[0, :16]
    assert int4.tolist() == list(range(-8, 8))


@pytest.mark.parametrize(("kind", "close"), [(Kind.INT4, 0.08), (Kind.FP8, 0.035)])
def test_quantised_at_load_is_near(kind: Kind, close: float) -> None:
    weight = torch.randn(32, 256, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    found = quantise(weight, kind)
    assert found is not None
    assert found.num_bytes < weight.numel() * (0.6 if kind is Kind.INT4 else 1.1)
    dense = found.dense(torch.float32)
    assert torch.equal(dense[3], weight[3])
    assert (dense - weight).norm() / weight.norm() < close * 1.5
    again = quantise(dense, kind)
    assert again is not None
    torch.testing.assert_close(again.dense(torch.float32), dense, rtol=0.08, atol=0.08)
    assert quantise(weight[:, :200], Kind.INT4) is None


def test_parts_one_below_the_other() -> None:
    options = {"has_offset": True, "is_ordered": True}
    first = random_weight(Kind.UINT4, 3, 2, 64, **options)
    assert first.offset is not None
    second = replace(first, data=first.data.flip(0), scale=first.scale.flip(1), offset=first.offset.flip(1))
    both = joined([first, second])
    assert both is not None
    dense = [each.dense(torch.float32) for each in (first, second)]
    assert torch.equal(both.dense(torch.float32), torch.cat(dense))
    assert torch.equal(both.rows_from(3).dense(torch.float32), dense[1])
    other = random_weight(Kind.UINT4, 3, 2, 64, **options, seed=1)
    assert joined([first, other]) is None  # another order
    assert joined([first, random_weight(Kind.UINT4, 3, 4, 32, **options)]) is None
