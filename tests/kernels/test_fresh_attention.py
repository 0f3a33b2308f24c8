"""Attention of single rows in one launch, against norm, turn and write, and then attention over the pages."""

from __future__ import annotations

import pytest
import torch
from test_triton import DEVICE, DTYPES, batch_of, check, keys_of, random

pytest.importorskip("triton")

from outrider.kernels import attention
from outrider.kernels.gpu import attention_work, fresh_attention
from outrider.kernels.norm import rms_norm_reference
from outrider.kernels.rope import UNSCALED, HeadNorms, PageScales, rope_write_reference

PAGE_SIZE = 4
SHAPES = [
    # heads, kv heads, D, R / 2, window, softcap, sinks, norm: offset and wide
    (4, 2, 16, 8, 0, 0.0, False, None),
    (3, 1, 64, 16, 5, 0.0, True, (0.0, False)),
    (8, 8, 32, 0, 0, 3.0, False, (1.0, True)),
    (40, 2, 16, 8, 7, 0.0, True, None),  # more heads than a block has lanes
]


def fresh_rows(
    num_rows: int, heads: int, kv_heads: int, dim: int, half: int, dtype: torch.dtype, locations: torch.Tensor
) -> fresh_attention.Fresh:
    qkv = random(num_rows, heads + 2 * kv_heads, dim, dtype=dtype)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    cos, sin = random(num_rows, half), random(num_rows, half, seed=2)
    return fresh_attention.Fresh(q, k, v, cos, sin, locations, None, UNSCALED)


@pytest.fixture(autouse=True)
def enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fresh_attention, "ENABLED", True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("wanted_programs", [1, 40])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "half", "window", "softcap", "sinks", "norm"), SHAPES)
def test_fresh_rows(
    heads: int, kv_heads: int, dim: int, half: int, window: int, softcap: float, sinks: bool,
    norm: tuple[float, bool] | None, wanted_programs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A first token, one at the border of a block, and long texts, in one part and in many."""
    monkeypatch.setattr(attention_work, "WANTED_PROGRAMS", wanted_programs)
    monkeypatch.setattr(attention_work, "LEAST_KEYS", 16)
    batch = batch_of([1] * 5, [0, 150, 32, 3, 64], PAGE_SIZE, dtype)
    batch.first_key = 1 if window else 0
    fresh = fresh_rows(5, heads, kv_heads, dim, half, dtype, batch.write_locations)
    q, k = fresh.q, fresh.k
    if norm is not None:
        norms = HeadNorms(random(dim, dtype=dtype), random(dim, dtype=dtype, seed=9), 1e-5, *norm)
        fresh = fresh_attention.Fresh(
            q, k, fresh.v, fresh.cos, fresh.sin, fresh.locations, norms=norms, scales=UNSCALED
        )
        q, k = (
            rms_norm_reference(x, weight, 1e-5, offset=norm[0], wide=norm[1])
            for x, weight in ((q, norms.q), (k, norms.k))
        )
    num_pages = int(batch.page_table.max()) + 1
    ours = tuple(random(num_pages, PAGE_SIZE, kv_heads, dim, dtype=dtype, seed=seed) for seed in (3, 5))
    theirs = tuple(each.clone() for each in ours)
    sink = random(heads, dtype=dtype) if sinks else None
    turned = rope_write_reference(q, k, fresh.v, (fresh.cos, fresh.sin), theirs, batch.write_locations)
    options = attention.AttentionOptions(dim**-0.5, window, softcap)
    wanted = attention.paged_attention_reference(turned, theirs, batch, options, sink)
    keys = keys_of(batch)
    assert fresh_attention.fits(fresh, keys)
    found = fresh_attention.attend_fresh(fresh, ours, keys, options.scale, window=window, softcap=softcap, sinks=sink)
    check(found, wanted, dtype)
    for mine, other in zip(ours, theirs, strict=True):
        check(mine, other, dtype)


def test_pages_of_eight_bits() -> None:
    """The newest key and value count as what their pages hold of them."""
    batch = batch_of([1, 1], [0, 6], PAGE_SIZE, torch.float32)
    scales = PageScales(key=2.0**-12, value=1024.0)
    numbers = torch.tensor([-3.0, -1.5, 0.5, 2.0, 448.0], device=DEVICE)
    k, v = (numbers[torch.arange(64, device=DEVICE) % 5].view(2, 2, 16) * each for each in (scales.key, scales.value))
    q, cos, sin = random(2, 4, 16), torch.ones(2, 8, device=DEVICE), torch.zeros(2, 8, device=DEVICE)
    ours, theirs = (
        tuple(torch.ones(9, PAGE_SIZE, 2, 16, device=DEVICE).to(torch.float8_e4m3fn) for _ in "kv") for _ in "ab"
    )
    turned = rope_write_reference(q, k, v, (cos, sin), theirs, batch.write_locations, scales)
    wanted = attention.paged_attention_reference(turned, theirs, batch, attention.AttentionOptions(9.0, scales=scales))
    fresh = fresh_attention.Fresh(q, k, v, cos, sin, batch.write_locations, None, scales)
    found = fresh_attention.attend_fresh(fresh, ours, keys_of(batch), 9 * scales.key)
    check(found, wanted, torch.float32, 1e4)
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.view(torch.uint8).equal(other.view(torch.uint8))


def test_what_does_not_fit() -> None:
    batch = batch_of([1, 1], [0, 6], PAGE_SIZE, torch.float32)
    fresh = fresh_rows(2, 4, 2, 16, 8, torch.float32, batch.write_locations)
    assert fresh_attention.fits(fresh, keys_of(batch))
    assert not fresh_attention.fits(fresh_rows(2, 4, 2, 24, 8, torch.float32, batch.write_locations), keys_of(batch))
    assert not fresh_attention.fits(fresh, keys_of(batch_of([2, 1], [0, 6], PAGE_SIZE, torch.float32)))
    assert not fresh_attention.fits(fresh, keys_of(batch, batch.indices))
