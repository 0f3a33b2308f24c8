"""Attention over pages in fp8 against its torch reference: on a GPU where there is one, else interpreted. Queries have
16 bits here, for which pages are read in words of two numbers; wider ones are in test_triton.py."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch

CUDA = torch.cuda.is_available()
triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402
from test_triton import DEVICE, batch_of, keys_of, random  # noqa: E402

from outrider.kernels import attention, rope  # noqa: E402
from outrider.kernels.gpu import attention as gpu_attention  # noqa: E402
from outrider.kernels.gpu import attention_work, page_bits  # noqa: E402
from outrider.types import Batch  # noqa: E402

FP8 = torch.float8_e4m3fn
DTYPES = [torch.float16, torch.bfloat16] if CUDA else [torch.float16]  # an interpreter has no products of bfloat16
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 8e-3}  # what is stored in the end has so many bits


@triton.jit
def _all_words(words, even, odd, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    lower, upper = page_bits.halves(tl.load(words + place))
    tl.store(even + place, lower)
    tl.store(odd + place, upper)


def test_every_word_is_its_two_numbers() -> None:
    words = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=DEVICE)
    even, odd = (torch.empty(2**16, dtype=torch.float16, device=DEVICE) for _ in range(2))
    _all_words[(16,)](words, even, odd, BLOCK=4096)
    for found, numbers in zip((even, odd), words.view(torch.uint8).view(-1, 2).T, strict=True):
        is_number = (numbers & 127) != 127  # an interpreter knows no others
        wanted = numbers.contiguous().view(FP8).to(torch.float16)
        assert found.view(torch.int16)[is_number].equal(wanted.view(torch.int16)[is_number])


class Case(NamedTuple):
    heads: int = 4
    kv_heads: int = 2
    dim: int = 64
    value_dim: int = 64
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    rows: tuple[int, ...] = (1, 6, 3)
    starts: tuple[int, ...] = (150, 3, 0)


CASES = [
    Case(),
    Case(dim=128, value_dim=128, sinks=True, window=7),
    Case(dim=256, value_dim=256, softcap=3.0),
    Case(dim=72, value_dim=72, window=5),  # keys in two pieces, values not the whole of a power of two
    Case(dim=72, value_dim=72, rows=(1,), starts=(3,)),  # up to the end of the last page
    Case(dim=64, value_dim=80, sinks=True),
    Case(heads=16, dim=128, value_dim=128, rows=(1, 3), starts=(40, 2)),  # 32 lanes
    Case(dim=24, value_dim=24, window=5),  # too small for words, as all that follow
    Case(dim=17, value_dim=33, heads=2),
    Case(heads=16, rows=(1, 3), starts=(40, 2)),
    Case(rows=(20, 1), starts=(3, 70), softcap=3.0),  # a prompt, beside a single row
    Case(dim=256, value_dim=256, rows=(17,), starts=(30,)),
]


def pages_of(batch: Batch, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """Pages of which nobody but the requests has anything that is a number."""
    num_pages = int(batch.page_table.max()) + 1
    found = []
    for dim, seed in ((case.dim, 0), (case.value_dim, 5)):
        pages = torch.full((num_pages, batch.page_size, case.kv_heads, dim), float("nan"), device=DEVICE)
        for request, (start, count) in enumerate(zip(case.starts, case.rows, strict=True)):
            place = torch.arange(start + count, device=DEVICE)
            at = batch.page_table[request, place // batch.page_size].long(), place % batch.page_size
            pages[at] = random(start + count, case.kv_heads, dim, seed=seed + request)
        found.append(pages.to(FP8))
    return found[0], found[1]


def close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    assert found.dtype is dtype
    torch.testing.assert_close(found.float(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [None, 3])
@pytest.mark.parametrize("case", CASES)
def test_pages_in_fp8(case: Case, parts: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of any size, after any text; what lies in pages behind the last key, or in front of windows, is not seen."""
    monkeypatch.setattr(attention_work, "LEAST_KEYS", 16)
    batch = batch_of(list(case.rows), list(case.starts), 4, torch.float32)
    q, pages = random(sum(case.rows), case.heads, case.dim, dtype=dtype), pages_of(batch, case)
    sinks = random(case.heads, dtype=dtype) if case.sinks else None
    scales = rope.PageScales(key=0.25, value=4.0)
    options = attention.AttentionOptions(case.dim**-0.5, case.window, case.softcap, scales=scales)
    wanted = reference(q, pages, batch, options, sinks)
    found = gpu_attention.paged_attention(
        q, pages, keys_of(batch), options.scale * scales.key, window=case.window, softcap=case.softcap, sinks=sinks,
        value_scale=scales.value, parts=parts,
    )  # fmt: skip
    close(found / 4, wanted / 4, dtype)


def reference(
    q: torch.Tensor, pages: tuple[torch.Tensor, ...], batch: Batch, options: attention.AttentionOptions,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    wide = pages[0].float().nan_to_num(0.0), pages[1].float().nan_to_num(0.0)
    return attention.paged_attention_reference(
        q.float(), wide, batch, options, None if sinks is None else sinks.float()
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("dim", "value_dim"), [(80, 64), (64, 64), (576, 512)])
def test_latents_in_fp8(dim: int, value_dim: int, dtype: torch.dtype) -> None:
    """A key's first numbers are its value."""
    case = Case(heads=3, kv_heads=1, dim=dim, value_dim=dim, rows=(1, 2), starts=(70, 5))
    batch = batch_of(list(case.rows), list(case.starts), 4, torch.float32)
    latents = pages_of(batch, case)[0]
    pages = latents, latents[..., :value_dim]
    q = random(sum(case.rows), case.heads, dim, dtype=dtype)
    wanted = reference(q, pages, batch, attention.AttentionOptions(0.05))
    close(gpu_attention.paged_attention(q, pages, keys_of(batch), 0.05), wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_see_nothing(dtype: torch.dtype) -> None:
    """A first token whose own key does not count: no page is read for it, and a sink changes nothing."""
    case = Case(rows=(1, 1), starts=(0, 20))
    batch = batch_of([1, 1], [0, 20], 4, torch.float32)
    batch.first_key = 1
    keys, values = pages_of(batch, case)
    q, sinks = random(2, case.heads, case.dim, dtype=dtype), random(case.heads, dtype=dtype)
    wanted = reference(q, (keys, values), batch, attention.AttentionOptions(0.1), sinks)
    found = gpu_attention.paged_attention(q, (keys, values), keys_of(batch), 0.1, sinks=sinks)
    assert not found[0].any()
    close(found, wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_many_small_shares_count(dtype: torch.dtype) -> None:
    """2,000 keys with 2^-26 of the first key's share each, which has a value of zero: float16 alone would lose them."""
    batch = batch_of([1], [2000], 16, torch.float32)
    keys, values = (torch.zeros(127, 16, 1, 64, device=DEVICE) for _ in range(2))
    keys[batch.page_table[0, 0].long(), 0, 0, 0] = 13.0
    values += 256.0
    values[batch.page_table[0, 0].long(), 0] = 0.0
    q = torch.zeros(1, 1, 64, dtype=dtype, device=DEVICE)
    q[..., 0] = 2.0
    pages = keys.to(FP8), values.to(FP8)
    scale = 0.6931471805599453  # so that 26 is 2^26
    wanted = reference(q, pages, batch, attention.AttentionOptions(scale))
    found = gpu_attention.paged_attention(q, pages, keys_of(batch), scale)
    torch.testing.assert_close(found.float(), wanted, rtol=2e-2, atol=0.0)
    assert 0 < float(wanted.max()) < 0.01


def test_queries_that_float16_does_not_hold() -> None:
    """They become the largest that it holds: a score that no model has is the largest all the same."""
    if not CUDA:
        pytest.skip("an interpreter has no products of bfloat16")
    batch = batch_of([1], [20], 4, torch.float32)
    case = Case(heads=2, kv_heads=1, rows=(1,), starts=(20,))
    pages = pages_of(batch, case)
    q = random(1, 2, case.dim, dtype=torch.bfloat16) * 1e9
    found = gpu_attention.paged_attention(q, pages, keys_of(batch), 1.0)
    assert found.isfinite().all()
