"""Every Triton kernel against its torch reference: on a GPU where there is one, else interpreted on the CPU."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

CUDA = torch.cuda.is_available()
pytest.importorskip("triton")

from outrider.drafters import parallel  # noqa: E402
from outrider.drafters.base import SHARPNESS  # noqa: E402
from outrider.kernels import activation, attention, dispatch, linear, norm, penalties, rope, sampling  # noqa: E402
from outrider.kernels.gpu import activation as gpu_activation  # noqa: E402
from outrider.kernels.gpu import attention as gpu_attention  # noqa: E402
from outrider.kernels.gpu import attention_work, gates  # noqa: E402
from outrider.kernels.gpu import filter as gpu_filter  # noqa: E402
from outrider.kernels.gpu import linear as gpu_linear  # noqa: E402
from outrider.kernels.gpu import norm as gpu_norm  # noqa: E402
from outrider.kernels.gpu import penalties as gpu_penalties  # noqa: E402
from outrider.kernels.gpu import rope as gpu_rope  # noqa: E402
from outrider.kernels.gpu import sampling as gpu_sampling  # noqa: E402
from outrider.kernels.norm import rms_norm_reference  # noqa: E402
from outrider.types import Batch  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
DTYPES = [torch.float32, torch.bfloat16] if CUDA else [torch.float32]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def check(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype, factor: float = 1.0) -> None:
    torch.testing.assert_close(found.float(), wanted.float(), rtol=TOLERANCE[dtype], atol=factor * TOLERANCE[dtype])


def batch_of(rows: list[int], starts: list[int], page_size: int, dtype: torch.dtype) -> Batch:
    """Requests with so many rows after so many earlier tokens, their pages scattered."""
    total = sum(rows)
    request = torch.repeat_interleave(torch.tensor(rows))
    query_start = torch.tensor([0, *torch.tensor(rows).cumsum(0).tolist()])
    indices = torch.tensor(starts)[request] + torch.arange(total) - query_start[request]
    lengths = [start + count for start, count in zip(starts, rows, strict=True)]
    width = -(-max(lengths) // page_size)
    pages = torch.randperm(len(rows) * width, generator=torch.Generator().manual_seed(1)) + 1
    table = pages.view(len(rows), width).int()
    batch = Batch(
        input_ids=torch.zeros(total, dtype=torch.long),
        positions=indices,
        indices=indices,
        query_start=query_start.int(),
        request=request,
        row_slots=request,
        slots=torch.arange(len(rows)),
        page_table=table,
        write_locations=table[request, indices // page_size].long() * page_size + indices % page_size,
        page_size=page_size,
        max_len=max(lengths),
        max_rows=max(rows),
    )
    for name in (
        "input_ids",
        "positions",
        "indices",
        "query_start",
        "request",
        "slots",
        "page_table",
        "write_locations",
    ):
        setattr(batch, name, getattr(batch, name).to(DEVICE))
    return batch


ATTENTION = [
    # heads, kv heads, D, D_v, window, softcap, sinks
    (4, 2, 16, 16, 0, 0.0, False),
    (3, 1, 64, 64, 5, 0.0, False),
    (4, 4, 24, 24, 0, 3.0, True),
    (8, 2, 48, 32, 7, 0.0, True),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("parts", [None, 1, 6])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "value_dim", "window", "softcap", "sinks"), ATTENTION)
def test_attention(
    heads: int, kv_heads: int, dim: int, value_dim: int, window: int, softcap: float, sinks: bool,
    parts: int | None, dtype: torch.dtype,
) -> None:  # fmt: skip
    page_size = 4
    batch = batch_of([1, 6, 3], [150, 3, 0], page_size, dtype)
    num_pages = int(batch.page_table.max()) + 1
    q = random(10, heads, dim, dtype=dtype)
    pages = (
        random(num_pages, page_size, kv_heads, dim, dtype=dtype),
        random(num_pages, page_size, kv_heads, value_dim, dtype=dtype, seed=5),
    )
    sink = random(heads, dtype=dtype) if sinks else None
    options = attention.AttentionOptions(dim**-0.5, window, softcap)
    wanted = attention.paged_attention_reference(q, pages, batch, options, sink)
    found = gpu_attention.paged_attention(
        q, pages, keys_of(batch), options.scale, window=window, softcap=softcap, sinks=sink, parts=parts
    )
    check(found, wanted, dtype)


def keys_of(batch: Batch, last_key: torch.Tensor | None = None) -> attention_work.Keys:
    return attention_work.Keys(
        batch.page_table,
        batch.query_start,
        batch.indices,
        last_key,
        batch.first_key,
        batch.page_size,
        batch.max_rows,
        {},
    )


@pytest.mark.parametrize("window", [0, 11])
@pytest.mark.parametrize("wanted", [1, 12, 400])
def test_attention_shares_out_work(wanted: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt, drafts, a single row after a long text, empty seats and rows that only fill up, in one pass; several
    layers share the list. Every row is in the list as often as its keys have parts, once each."""
    monkeypatch.setattr(attention_work, "WANTED_PROGRAMS", wanted)
    monkeypatch.setattr(attention_work, "LEAST_KEYS", 16)
    rows, filling = [40, 3, 0, 1, 0], 5
    batch = batch_of(rows, [7, 30, 1, 150, 1], 4, torch.float32)
    total = sum(rows)
    for name in ("indices", "request"):
        more = torch.full((filling,), 0 if name == "indices" else len(rows) - 1, device=DEVICE)
        setattr(batch, name, torch.cat([getattr(batch, name), more]))
    pages = (random(300, 4, 2, 16), random(300, 4, 2, 16, seed=5))
    keys, options = keys_of(batch), attention.AttentionOptions(0.3, window)
    for layer in range(2):
        q = random(total + filling, 6, 16, seed=layer)
        expected = attention.paged_attention_reference(q, pages, batch, options)
        found = gpu_attention.paged_attention(q, pages, keys, 0.3, window=window)
        check(found[:total], expected[:total], torch.float32)
    many, few = keys.memo.values()
    assert not many.counters.any(), "whoever puts parts together leaves the counter as it was"
    assert not few.counters.any()
    assert {request for request, _ in parts_of(many)} == {0}, "prompts have a launch of their own"
    assert {request for request, _ in parts_of(few)} == {1, 3}
    longest = parts_of(few)[3, 0]
    assert (longest > 1) is (wanted > 1 and not window)


def test_pages_of_eight_bits_are_scaled() -> None:
    """Keys and values are divided by their scales where they are written, and are themselves again where they are
    read. All of them are numbers that 8 bits can hold, after the division alone."""
    batch = batch_of([3, 1], [0, 6], 4, torch.float32)
    scales = rope.PageScales(key=2.0**-12, value=1024.0)
    numbers = torch.tensor([-3.0, -1.5, 0.5, 2.0, 448.0], device=DEVICE)
    k, v = (
        numbers[torch.arange(128, device=DEVICE) % 5].view(4, 2, 16) * scale for scale in (scales.key, scales.value)
    )
    q, turn = random(4, 4, 16), (torch.ones(4, 8, device=DEVICE), torch.zeros(4, 8, device=DEVICE))
    found, wanted = ([torch.zeros(9, 4, 2, 16, device=DEVICE).to(torch.float8_e4m3fn) for _ in "kv"] for _ in "ab")
    gpu_rope.rope_write(q, k, v, turn, tuple(found), batch.write_locations, scales=scales)
    rope.rope_write_reference(q, k, v, turn, tuple(wanted), batch.write_locations, scales)
    for mine, other, scale, given in zip(found, wanted, (scales.key, scales.value), (k, v), strict=True):
        assert mine.view(torch.uint8).equal(other.view(torch.uint8))
        assert (mine.float().flatten(0, 1)[batch.write_locations] * scale).equal(given)
    expected = attention.paged_attention_reference(
        q, tuple(found), batch, attention.AttentionOptions(9.0, scales=scales)
    )
    dense = [each.float() * scale for each, scale in zip(found, (scales.key, scales.value), strict=True)]
    check(expected, attention.paged_attention_reference(q, tuple(dense), batch, attention.AttentionOptions(9.0)),
          torch.float32, 1e4)  # fmt: skip
    got = gpu_attention.paged_attention(q, tuple(found), keys_of(batch), 9 * scales.key, value_scale=scales.value)
    check(got, expected, torch.float32, 1e4)
    assert float(expected.abs().max()) > 1e4


def parts_of(work: attention_work.WorkList) -> dict[tuple[int, int], int]:
    """Of each request and block of its rows, in how many parts its keys are read."""
    items = [item for item in work.items.tolist() if item[0] >= 0]
    blocks = {(request, block): parts for request, _, _, block, _, parts, *_ in items}
    assert len(items) == sum(blocks.values())
    return blocks


@pytest.mark.parametrize("rows", [[17, 16], [40, 1, 20, 3], [64], [16, 9]])
@pytest.mark.parametrize(("heads", "dim"), [(2, 16), (12, 256)])
def test_attention_of_prompts_beside_single_rows(rows: list[int], heads: int, dim: int) -> None:
    """Whatever a request has of rows, it is in one of the launches."""
    batch = batch_of(rows, [5 * number for number in range(len(rows))], 4, torch.float32)
    q, pages = random(sum(rows), heads, dim), (random(60, 4, 2, dim), random(60, 4, 2, dim, seed=5))
    wanted = attention.paged_attention_reference(q, pages, batch, attention.AttentionOptions(0.1))
    check(gpu_attention.paged_attention(q, pages, keys_of(batch), 0.1), wanted, torch.float32)


@pytest.mark.parametrize("first_key", [0, 1])
def test_attention_both_ways(first_key: int) -> None:
    batch = batch_of([4, 4], [9, 70], 4, torch.float32)
    batch.first_key = first_key
    batch.last_key = torch.tensor([12] * 4 + [73] * 4, device=DEVICE)
    q = random(8, 2, 16)
    pages = (random(100, 4, 1, 16), random(100, 4, 1, 16, seed=5))
    options = attention.AttentionOptions(0.3, bidirectional=True)
    wanted = attention.paged_attention_reference(q, pages, batch, options)
    found = gpu_attention.paged_attention(q, pages, keys_of(batch, batch.last_key), 0.3)
    check(found, wanted, torch.float32)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_of_windows_that_begin_alike(causal: bool) -> None:
    """A row's index says where its window begins, and the last key, where it ends."""
    batch = batch_of([4, 4], [9, 70], 4, torch.float32)
    last = batch.indices if causal else torch.tensor([12] * 4 + [73] * 4, device=DEVICE)
    batch.indices = torch.tensor([9] * 4 + [70] * 4, device=DEVICE)
    batch.last_key = last
    q = random(8, 2, 16)
    pages = (random(100, 4, 1, 16), random(100, 4, 1, 16, seed=5))
    wanted = attention.paged_attention_reference(
        q, pages, batch, attention.AttentionOptions(0.3, window=6, bidirectional=True)
    )
    found = gpu_attention.paged_attention(q, pages, keys_of(batch, last), 0.3, window=6)
    check(found, wanted, torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "columns", "inner"), [(1, 48, 64), (6, 33, 100), (17, 64, 256), (70, 40, 72)])
def test_linear(rows: int, columns: int, inner: int, dtype: torch.dtype) -> None:
    x, weight, bias = (
        random(rows, inner, dtype=dtype),
        random(columns, inner, dtype=dtype),
        random(columns, dtype=dtype),
    )
    residual = random(rows, columns, dtype=dtype, seed=3)
    check(gpu_linear.linear(x, weight), linear.linear_reference(x, weight), dtype, inner**0.5)
    wanted = linear.linear_reference(x, weight, bias) + residual
    check(gpu_linear.linear(x, weight, bias, residual), wanted, dtype, inner**0.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [5, 66])
def test_gated_linear(rows: int, dtype: torch.dtype) -> None:
    x, weight, bias = random(rows, 96, dtype=dtype), random(2 * 40, 96, dtype=dtype), random(80, dtype=dtype)
    for function in (activation.silu_mul, activation.gelu_tanh_mul):
        wanted = function(linear.linear_reference(x, weight, bias))
        check(gpu_linear.linear(x, weight, bias, gated=gates.on_the_way(function)), wanted, dtype, 10)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("offset", "wide"), [(0.0, False), (1.0, True)])
@pytest.mark.parametrize("shape", [(3, 100), (2, 5, 24)])
def test_norm(shape: tuple[int, ...], offset: float, wide: bool, dtype: torch.dtype) -> None:
    x, weight = random(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., : shape[-1]], random(shape[-1], dtype=dtype)
    for scale in (weight, None):
        wanted = norm.rms_norm_reference(x, scale, 1e-5, offset=offset, wide=wide)
        check(gpu_norm.rms_norm(x, scale, 1e-5, offset=offset, wide=wide), wanted, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("offset", "wide"), [(0.0, False), (1.0, True)])
def test_norm_twice(offset: float, wide: bool, dtype: torch.dtype) -> None:
    x, residual = random(3, 200, dtype=dtype)[:, :100], random(3, 100, dtype=dtype, seed=1)
    first, second = (norm.Normed(x, random(100, dtype=dtype, seed=seed), 1e-5, offset, wide) for seed in (2, 3))
    stream, normed = gpu_norm.normed_twice(first, residual, second)
    wanted = residual + norm.rms_norm_reference(x, first.weight, 1e-5, offset=offset, wide=wide)
    check(stream, wanted, dtype)
    check(normed, norm.rms_norm_reference(stream, second.weight, 1e-5, offset=offset, wide=wide), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_activation(dtype: torch.dtype) -> None:
    x = random(3, 2 * 1100, dtype=dtype)
    check(gpu_activation.silu_mul(x), activation.silu_mul_reference(x), dtype)
    check(gpu_activation.gelu_tanh_mul(x), activation.gelu_tanh_mul_reference(x), dtype)


ROPE_SIZES, ROPE_NORMS = [(16, 8), (24, 4), (48, 24), (16, 0)], [None, (0.0, False), (1.0, True)]
MANY = gpu_rope.MANY_ROWS + 1
ROPE_CASES = [(size, norm, 5) for size in ROPE_SIZES for norm in ROPE_NORMS] + [
    (size, norm, MANY)
    for place, size in enumerate(ROPE_SIZES)
    for norm in (ROPE_NORMS if CUDA else [ROPE_NORMS[place % 3]])  # interpreted, many rows take seconds
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "norm", "num_rows"), ROPE_CASES)
def test_rope_write(size: tuple[int, int], norm: tuple[float, bool] | None, num_rows: int, dtype: torch.dtype) -> None:
    dim, half = size
    heads, kv_heads, page_size = 3, 2, 4
    qkv = random(num_rows, heads + 2 * kv_heads, dim, dtype=dtype)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=1)
    rotary = random(num_rows, half), random(num_rows, half, seed=2)
    locations = torch.randperm(80, generator=torch.Generator().manual_seed(4))[:num_rows].to(DEVICE)

    def pages() -> tuple[torch.Tensor, torch.Tensor]:
        return tuple(torch.zeros(20, page_size, kv_heads, dim, dtype=dtype, device=DEVICE) for _ in range(2))  # type: ignore[return-value]

    ours, theirs = pages(), pages()
    norms = None
    normed = q, k
    if norm is not None:
        norms = rope.HeadNorms(random(dim, dtype=dtype), random(dim, dtype=dtype, seed=9), 1e-5, *norm)
        normed = tuple(
            rms_norm_reference(x, weight, 1e-5, offset=norm[0], wide=norm[1])
            for x, weight in ((q, norms.q), (k, norms.k))
        )  # type: ignore[assignment]
    wanted = rope.rope_write_reference(*normed, v, rotary, theirs, locations)
    check(gpu_rope.rope_write(q, k, v, rotary, ours, locations, norms), wanted, dtype)
    for mine, other in zip(ours, theirs, strict=True):
        check(mine, other, dtype)


@pytest.mark.parametrize("greedy", [True, False])
@pytest.mark.parametrize("reduced", [True, False])
def test_choose(greedy: bool, reduced: bool) -> None:
    rows, width = 40, 5000
    logits = random(rows, width)
    logits[3, 17] = logits[3, 4999] = 30.0  # the first of equals
    ids = torch.randperm(9000, generator=torch.Generator().manual_seed(0))[:width].to(DEVICE) if reduced else None
    temperature = torch.tensor([0.0 if greedy else 0.7, 1.3, 0.0], device=DEVICE)
    seeds = torch.tensor([5, -(2**62), 2**63 - 1], device=DEVICE)
    requests = torch.arange(rows, device=DEVICE) % (1 if greedy else 3)
    positions = torch.arange(rows, device=DEVICE) * 7919
    columns = torch.arange(width, device=DEVICE) if ids is None else ids
    scaled = logits / temperature[requests].clamp(min=1e-5)[:, None]
    for sharpness in (1.0, 1.5):
        drawn = (scaled * sharpness + sampling.gumbel(seeds[requests], positions, columns)).argmax(-1)
        best = torch.where(temperature[requests] <= 1e-5, logits.argmax(-1), drawn)
        wanted = best if ids is None else ids[best]
        options = {"greedy": greedy, "least": 1e-5, "sharpness": sharpness}
        found = gpu_sampling.choose(logits, temperature, seeds, requests, positions, ids, **options)
        assert found.tolist() == wanted.tolist()


@torch.inference_mode()
def test_all_rows_of_one_request_have_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """One request's slot, spread over the rows of its draft, is a view without any length."""
    table = torch.tensor([[2], [0], [1], [0]], device=DEVICE)  # what lies behind the slot is none
    step = SimpleNamespace(
        batch=SimpleNamespace(slots=table[0]),
        depth=5,
        emits=torch.tensor([True], device=DEVICE),
        sampling=SimpleNamespace(
            extra={}, greedy=False, filtered=False,
            temperature=torch.tensor([0.0, 0.0, 3.0], device=DEVICE), seed=torch.tensor([1, 2, 3], device=DEVICE),
        ),
        state=SimpleNamespace(lengths=torch.tensor([0, 0, 7], device=DEVICE)),
    )  # fmt: skip
    logits = random(5, 50)
    found = []
    for home in (False, True):
        monkeypatch.setattr(dispatch, "is_home", lambda x, home=home: home)
        found.append(parallel.draft_at_once(step, 6, logits).tokens.tolist())
    assert found[0] == found[1]
    assert found[0][0][:5] != logits.argmax(-1).tolist(), "nothing was drawn"
    rows = table[0][:, None].expand(-1, 5).flatten()
    places = torch.arange(7, 12, device=DEVICE)
    wanted = sampling.choose(logits, step.sampling, rows, places, sharpness=SHARPNESS)
    assert wanted.tolist() == found[0][0][:5]


WIDE = 9000  # three programs to a row; interpreted, each takes a third of a second
FILTER_CASES = [(width, dtype, coarse) for width in (50, WIDE) for dtype in TOLERANCE for coarse in (False, True)]
if not CUDA:
    FILTER_CASES = [each for each in FILTER_CASES if (each[0] == WIDE) == ((each[1] == torch.float32) == each[2])]


@pytest.mark.parametrize(("width", "dtype", "coarse"), FILTER_CASES)
def test_filter(width: int, dtype: torch.dtype, coarse: bool) -> None:
    """`coarse`: many logits are equal, so that it counts which of them come first."""
    generator = torch.Generator().manual_seed(width)
    rows = 12 if CUDA or width < WIDE else 6
    alone, nothing, greedy = (8, 5, 7) if rows > 8 else (4, 3, 5)  # rows with min_p alone, top_p 0, temperature 0
    logits = 3 * torch.randn(rows, width, generator=generator)
    logits = (logits.round() if coarse else logits).to(dtype).to(DEVICE)
    top_k = torch.randint(1, 60, (rows,), generator=generator)
    top_p, min_p = torch.rand(rows, generator=generator), 0.2 * torch.rand(rows, generator=generator)
    top_k[1::3], top_p[2::4], min_p[::2] = width, 1.0, 0.0  # off
    top_k[alone], top_p[alone], min_p[alone] = width, 1.0, 0.1
    top_p[nothing] = 0.0
    temperature = 0.3 + torch.rand(rows, generator=generator)
    temperature[greedy] = 0.0
    options = [each.to(DEVICE) for each in (temperature, top_k, top_p, min_p)]
    request = torch.arange(rows, device=DEVICE)
    given: Any = SimpleNamespace(top_k=options[1], top_p=options[2].double(), min_p=options[3].double())
    scaled = logits.double() / options[0].clamp(min=1e-5)[:, None]
    kept = sampling.filter_logits(scaled, given, request) > -torch.inf
    kept[greedy] = True  # nothing is cut off
    cut, last = gpu_filter.cuts(logits, options[0], (options[1], options[2], options[3]), request, least=1e-5)
    value, column = logits.float(), torch.arange(width, device=DEVICE)
    found = (value > cut[:, None]) | ((value == cut[:, None]) & (column <= last[:, None]))
    assert found.sum(1).tolist() == kept.sum(1).tolist()
    assert found.equal(kept)
    seeds = torch.arange(rows, device=DEVICE)
    token = gpu_sampling.choose(
        logits, options[0], seeds, request, seeds, None, greedy=False, least=1e-5, cut=(cut, last)
    )
    assert found.gather(1, token[:, None]).all()


def test_penalties() -> None:
    """Tokens that the prompt holds, the answer, or both; texts longer than what one program walks through; rows of the
    same text that end in different places; a slot without any penalty."""
    size, slots = 300, torch.tensor([0, 0, 1, 2, 3, 1], device=DEVICE)
    last = torch.tensor([5, 1400, 900, 1023, 700, 3], device=DEVICE)
    texts = torch.randint(size, (4, 1500), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    options = SimpleNamespace(
        prompt_len=torch.tensor([4, 600, 1, 50], device=DEVICE),
        repetition=torch.tensor([1.3, 1.0, 0.7, 1.0], device=DEVICE),
        presence=torch.tensor([0.0, 0.4, -0.2, 0.0], device=DEVICE),
        frequency=torch.tensor([0.1, 0.0, 0.3, 0.0], device=DEVICE),
    )
    found = random(len(slots), size)
    wanted, before = found.clone(), found.clone()
    gpu_penalties.penalise(found, options, slots, last, texts, 1450)  # type: ignore[arg-type]
    with torch.inference_mode(mode=False), torch.enable_grad():  # where the reference is taken
        penalties.penalise(wanted, options, slots, last, texts, 1450)  # type: ignore[arg-type]
    check(found, wanted, torch.float32, factor=0.1)
    changed = (found != before).any(1).tolist()
    assert changed == [True, True, True, True, False, False]  # no penalty; only the prompt, which presence leaves out


@pytest.mark.parametrize("page_bytes", [1, 2, 4])
@pytest.mark.parametrize("dim", [64, 128, 256, 576])
def test_exact_sums_do_not_depend_on_company(dim: int, page_bytes: int) -> None:
    """Blocks of keys are added up one after the other: their size must not change with who else is there."""

    def forms(num_requests: int, max_rows: int, parts: int | None) -> list[attention_work.Form]:
        keys: Any = SimpleNamespace(page_table=torch.zeros(num_requests, 4), max_rows=max_rows)
        return gpu_attention.forms_for(keys, 4, (dim, dim), max(page_bytes, 2), parts, page_bytes)

    for rows in (1, 6, 300):
        assert all(forms(count, rows, 8) == forms(1, rows, 8) for count in (16, gpu_attention.FEW_REQUESTS + 1, 128))
    depends = dim == 128 and page_bytes == 2
    assert (forms(1, 1, None) != forms(128, 1, None)) == depends, "few requests are read in a form of their own"
