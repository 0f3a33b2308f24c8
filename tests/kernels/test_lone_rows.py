"""Attention of single rows by their own kernel, in all of its forms, against the reference."""

from __future__ import annotations

import pytest
import torch
from test_triton import DEVICE, DTYPES, batch_of, check, keys_of, random

pytest.importorskip("triton")

from outrider.kernels import attention
from outrider.kernels.gpu import attention_work, lone_rows
from outrider.kernels.gpu.lone_rows import Rows

PAGE_SIZE = 4
SHAPES = [
    # heads, kv heads, D, D_v, window, softcap, sinks
    (4, 2, 16, 16, 0, 0.0, False),
    (3, 1, 64, 64, 37, 0.0, True),
    (16, 16, 48, 32, 0, 3.0, True),
    (16, 1, 272, 256, 0, 0.0, False),  # several pieces of a key, and a rest
]
FORMS = [Rows(32, 4), Rows(16, 8, slices=2, loop_keys=64), Rows(16, 4, least_keys=1024), Rows(64, 4, ahead=False)]
STARTS = [0, 150, 32, 31, 3, 163, 299]  # a first token, some at the border of a block, long texts


@pytest.mark.parametrize("dtype", DTYPES[-1:])  # a GPU's in 16 bits
@pytest.mark.parametrize("wanted_programs", [1, 60])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "value_dim", "window", "softcap", "sinks"), SHAPES)
def test_lone_rows(
    heads: int, kv_heads: int, dim: int, value_dim: int, window: int, softcap: float, sinks: bool, form: Rows,
    wanted_programs: int, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In one part, in many, and in more than are looked up at once; two layers have the same list."""
    monkeypatch.setattr(attention_work, "WANTED_PROGRAMS", wanted_programs * kv_heads)
    monkeypatch.setitem(lone_rows.CHOSEN, dim, form)
    batch = batch_of([1] * len(STARTS), STARTS, PAGE_SIZE, dtype)
    batch.first_key = 1 if window else 0
    num_pages = int(batch.page_table.max()) + 1
    key_pages, value_pages = (random(num_pages, PAGE_SIZE, kv_heads, dim, dtype=dtype, seed=seed) for seed in (3, 5))
    pages = (key_pages, (key_pages if dim > 256 else value_pages)[..., :value_dim])  # latents are both
    options = attention.AttentionOptions(dim**-0.5, window, softcap)
    keys, sink = keys_of(batch), random(heads, dtype=dtype) if sinks else None
    for layer in range(2):
        q = random(len(STARTS), heads, dim, dtype=dtype, seed=layer)
        assert lone_rows.fits(q, pages, keys)
        found = lone_rows.attend_rows(q, pages, keys, options.scale, window=window, softcap=softcap, sinks=sink)
        check(found, attention.paged_attention_reference(q, pages, batch, options, sink), dtype)
    (work,) = keys.memo.values()
    assert not work.counters.any(), "whoever puts parts together leaves the counter as it was"
    parts = int(work.items[:, 5][work.items[:, 0] == len(STARTS) - 1][0])
    if wanted_programs == 1 or form.least_keys is not None:
        assert parts == 1
    elif form.keys <= 32 and not window:
        assert parts > lone_rows.MOST_PARTS


SEVERAL_SHAPES = [
    *SHAPES[:2],
    (8, 1, 64, 64, 37, 0.0, True),  # more lanes than a program has, the last of them in part
    (16, 1, 272, 256, 0, 0.0, False),
]
SEVERAL_FORMS = [*FORMS, Rows(32, 4, lanes=16)]
SEVERAL = [(1, 0), (6, 150), (2, 31), (5, 30), (3, 0), (6, 27), (4, 299)]  # rows, and keys that are older


@pytest.mark.parametrize("wanted_programs", [1, 60])
@pytest.mark.parametrize("form", SEVERAL_FORMS)
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "value_dim", "window", "softcap", "sinks"), SEVERAL_SHAPES)
def test_several_rows(
    heads: int, kv_heads: int, dim: int, value_dim: int, window: int, softcap: float, sinks: bool, form: Rows,
    wanted_programs: int, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """In one block of lanes, or in several: each row sees the keys before its own; some new ones are in two blocks."""
    monkeypatch.setattr(attention_work, "WANTED_PROGRAMS", wanted_programs * kv_heads)
    monkeypatch.setitem(lone_rows.SEVERAL, dim, form)
    rows, starts, dtype = [each for each, _ in SEVERAL], [start for _, start in SEVERAL], DTYPES[-1]
    batch = batch_of(rows, starts, PAGE_SIZE, dtype)
    batch.first_key = 1 if window else 0
    num_pages = int(batch.page_table.max()) + 1
    key_pages, value_pages = (random(num_pages, PAGE_SIZE, kv_heads, dim, dtype=dtype, seed=seed) for seed in (3, 5))
    pages = (key_pages, (key_pages if dim > 256 else value_pages)[..., :value_dim])  # latents are both
    options = attention.AttentionOptions(dim**-0.5, window, softcap)
    keys, sink = keys_of(batch), random(heads, dtype=dtype) if sinks else None
    for layer in range(2):
        q = random(sum(rows), heads, dim, dtype=dtype, seed=layer)
        assert lone_rows.fits(q, pages, keys)
        found = lone_rows.attend_rows(q, pages, keys, options.scale, window=window, softcap=softcap, sinks=sink)
        check(found, attention.paged_attention_reference(q, pages, batch, options, sink), dtype)
    (work,) = keys.memo.values()
    assert not work.counters.any()


def test_seats_that_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests without a row, and rows that only fill up, beside some that exist."""
    monkeypatch.setitem(lone_rows.CHOSEN, 16, Rows(16, 4))
    rows, dtype = [1, 0, 1, 0], DTYPES[-1]
    batch = batch_of(rows, [40, 1, 9, 1], PAGE_SIZE, dtype)
    for name in ("indices", "request"):
        more = torch.full((3,), 0 if name == "indices" else len(rows) - 1, device=DEVICE)
        setattr(batch, name, torch.cat([getattr(batch, name), more]))
    pages = tuple(random(60, PAGE_SIZE, 2, 16, dtype=dtype, seed=seed) for seed in (3, 5))
    q = random(5, 4, 16, dtype=dtype)
    wanted = attention.paged_attention_reference(q, pages, batch, attention.AttentionOptions(0.3))
    check(lone_rows.attend_rows(q, pages, keys_of(batch), 0.3)[:2], wanted[:2], dtype)


def test_others_are_not_read_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(lone_rows.CHOSEN, 16, Rows(16, 4))
    dtype = DTYPES[-1]
    one, two = (batch_of([rows], [9], PAGE_SIZE, dtype) for rows in (1, 2))
    pages = tuple(random(9, PAGE_SIZE, 2, 16, dtype=dtype) for _ in "kv")
    eight = tuple(each.to(torch.float8_e4m3fn) for each in pages)
    assert lone_rows.fits(random(1, 4, 16, dtype=dtype), pages, keys_of(one))
    assert not lone_rows.fits(random(1, 4, 16, dtype=dtype), pages, keys_of(one, one.indices)), "keys after its own"
    assert not lone_rows.fits(random(2, 4, 16, dtype=dtype), pages, keys_of(two))
    assert not lone_rows.fits(random(1, 4, 16, dtype=dtype), eight, keys_of(one))
    assert not lone_rows.fits(random(1, 34, 16, dtype=dtype), pages, keys_of(one)), "more heads than lanes"
    many = batch_of([1] * 9, [3] * 9, PAGE_SIZE, dtype)
    assert not lone_rows.fits(random(9, 4, 16, dtype=dtype), pages, keys_of(many)), "more rows than it is for"
    monkeypatch.setitem(lone_rows.SEVERAL, 16, Rows(16, 4))
    assert lone_rows.fits(random(2, 128, 16, dtype=dtype), pages, keys_of(two))
    assert not lone_rows.fits(random(2, 130, 16, dtype=dtype), pages, keys_of(two)), "more lanes than it is for"
    monkeypatch.delitem(lone_rows.CHOSEN, 16)
    assert not lone_rows.fits(random(1, 4, 16, dtype=dtype), pages, keys_of(one))
