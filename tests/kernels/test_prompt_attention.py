"""Attention of prompts as Hopper computes it: its kernel's own code, with Gluon's words in numpy, and compiled."""

from __future__ import annotations

import pytest
import torch
from test_triton import CUDA, DEVICE, batch_of, keys_of, random

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from gluon_words import Kernel

from outrider.kernels import attention
from outrider.kernels.gpu import attention as gpu_attention
from outrider.kernels.gpu import attention_work, prompt_attention, prompt_warps

LOG2_E = 1.4426950408889634
CASES = [
    # heads, kv heads, D, page size, window, softcap, sinks
    (8, 2, 128, 16, 0, 0.0, False),
    (4, 4, 64, 8, 0, 3.0, True),
    (8, 1, 64, 32, 90, 0.0, True),
    (4, 2, 128, 16, 300, 2.0, False),
]


@pytest.fixture
def anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a small Hopper."""
    kernel = Kernel("_attend_prompts", prompt_warps, prompt_attention)
    monkeypatch.setattr(prompt_attention, "num_processors", lambda device: 7)
    monkeypatch.setattr(prompt_attention, "SPARED", 3)
    monkeypatch.setattr(prompt_attention, "_attend_prompts", kernel)
    monkeypatch.setattr(gpu_attention, "on_hopper", lambda name, device: prompt_attention)


@pytest.mark.skipif(CUDA, reason="words in numpy know no device")
@pytest.mark.usefixtures("anywhere")
@pytest.mark.parametrize("wanted", [1, 400])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page_size", "window", "softcap", "sinks"), CASES)
def test_prompts(
    heads: int, kv_heads: int, dim: int, page_size: int, window: int, softcap: float, sinks: bool, wanted: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Prompts of all lengths after texts of all lengths, in one launch, with whole blocks of keys and without; whoever
    has few rows is left out. Many programs: keys are shared among several of them, which put their parts together."""
    monkeypatch.setattr(attention_work, "WANTED_PROGRAMS", wanted)
    rows, starts = [100, 3, 33, 17, 256, 64], [0, 50, 95, 700, 129, 192]
    batch, kind = batch_of(rows, starts, page_size, torch.float16), torch.float16
    size = int(batch.page_table.max()) + 1, page_size, kv_heads, dim
    q = random(sum(rows), 2, heads, dim, dtype=kind)[:, 1]  # lies beside something else
    pages = random(*size, dtype=kind), random(*size, dtype=kind, seed=5)
    sink = random(heads, dtype=kind) if sinks else None
    options = attention.AttentionOptions(dim**-0.5, window, softcap)
    expected = attention.paged_attention_reference(q, pages, batch, options, sink)
    keys, forms = keys_of(batch), (attention_work.Form((17, 256), 128, 128), attention_work.Form((1, 16), 16, 64))
    lists = [attention_work.work_for(keys, heads // kv_heads, kv_heads, form, window, None) for form in forms]
    (work, _), (beside, _) = lists
    for _ in range(2):  # counters are as they were
        out = torch.full_like(expected, 9.0)
        prompt_attention.attend(
            q, pages, keys, work, beside, out, options.scale * LOG2_E, window=window, softcap=softcap * LOG2_E,
            sinks=sink, value_scale=2.0,
        )  # fmt: skip
        few = (batch.request == 1).to(DEVICE)
        torch.testing.assert_close(out[~few], 2 * expected[~few], rtol=4e-3, atol=4e-3)
        assert (out[few] == 9).all()
    assert not any(each.any() for name, each in keys.memo.items() if name[0] == "prompt attention")


@pytest.mark.skipif(CUDA, reason="words in numpy know no device")
@pytest.mark.usefixtures("anywhere")
def test_prompts_beside_others() -> None:
    """In a pass with single rows and drafts, which have another kernel."""
    compare([40, 1, 130, 6], [10, 200, 0, 30], torch.float16, 4e-3)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA or torch.cuda.get_device_capability()[0] != 9, reason="no Hopper")
@pytest.mark.parametrize(("dim", "window", "softcap", "sinks"), [(128, 0, 0.0, False), (64, 90, 3.0, True)])
def test_prompts_on_hopper(dim: int, window: int, softcap: float, sinks: bool) -> None:
    rows, starts = [100, 3, 33, 17, 1256, 1, 64], [0, 50, 95, 7000, 129, 400, 192]
    for _ in range(3):  # several programs put their parts together, in any order
        compare(rows, starts, torch.bfloat16, 2e-2, 8, 2, dim, window, softcap, sinks)


def compare(
    rows: list[int], starts: list[int], kind: torch.dtype, tolerance: float, heads: int = 4, kv_heads: int = 2,
    dim: int = 64, window: int = 0, softcap: float = 0.0, sinks: bool = False,
) -> None:  # fmt: skip
    batch = batch_of(rows, starts, 16, kind)
    size = int(batch.page_table.max()) + 1, 16, kv_heads, dim
    q, pages = random(sum(rows), heads, dim, dtype=kind), (random(*size, dtype=kind), random(*size, dtype=kind, seed=5))
    assert prompt_attention.fits(q, pages, keys_of(batch))
    sink = random(heads, dtype=kind) if sinks else None
    options = attention.AttentionOptions(dim**-0.5, window, softcap)
    expected = attention.paged_attention_reference(q, pages, batch, options, sink)
    out = gpu_attention.paged_attention(
        q, pages, keys_of(batch), options.scale, window=window, softcap=softcap, sinks=sink
    )
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)


def test_what_does_not_fit() -> None:
    """Everything else stays with the other kernel."""
    batch, kind = batch_of([20], [0], 16, torch.float16), torch.float16
    keys, size = keys_of(batch), (3, 16, 2, 64)
    q, pages = random(20, 8, 64, dtype=kind), (random(*size, dtype=kind), random(*size, dtype=kind))
    assert prompt_attention.fits(q, pages, keys)
    assert not prompt_attention.fits(q, pages, keys_of(batch, batch.indices))
    assert not prompt_attention.fits(q[:, :6].contiguous(), pages, keys)  # three heads to a key head
    assert not prompt_attention.fits(q[..., :48], (pages[0][..., :48], pages[1][..., :48]), keys)
    assert not prompt_attention.fits(q.float(), (pages[0].float(), pages[1].float()), keys)
    assert not prompt_attention.fits(q, (pages[0].to(torch.float8_e4m3fn), pages[1].to(torch.float8_e4m3fn)), keys)
    assert not prompt_attention.fits(q, pages, keys_of(batch_of([20], [0], 4, kind)))  # rows of a page
    assert not prompt_attention.fits(random(20 * 8 * 64 + 1, dtype=kind)[1:].view(20, 8, 64), pages, keys)
