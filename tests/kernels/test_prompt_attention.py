"""Attention of prompts as Hopper computes it: its kernel's own code, with Gluon's words in numpy, and compiled."""

from __future__ import annotations

import pytest
import torch
from test_triton import DEVICE, batch_of, keys_of, random

pytest.importorskip("triton.experimental.gluon.nvidia.hopper")

from gluon_words import Kernel

from outrider.kernels import attention
from outrider.kernels.gpu import attention_work, prompt_attention, prompt_warps

LOG2_E = 1.4426950408889634
CASES = [
    # heads, kv heads, D, page size, window, softcap, sinks
    (8, 2, 128, 16, 0, 0.0, False),
    (4, 4, 64, 8, 0, 3.0, True),
    (8, 1, 64, 32, 90, 0.0, True),
    (4, 2, 128, 16, 300, 2.0, False),
]


@pytest.mark.parametrize("wanted", [1, 400])
@pytest.mark.parametrize(("heads", "kv_heads", "dim", "page_size", "window", "softcap", "sinks"), CASES)
def test_prompts(
    heads: int, kv_heads: int, dim: int, page_size: int, window: int, softcap: float, sinks: bool, wanted: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Prompts of all lengths after texts of all lengths, in one launch, with whole blocks of keys and without; whoever
    has few rows is left out. Many programs: keys are shared among several of them, which put their parts together."""
    monkeypatch.setattr(attention_work, "WANTED_PROGRAMS", wanted)
    monkeypatch.setattr(prompt_attention, "_processors", lambda device: 7)
    monkeypatch.setattr(prompt_attention, "_attend_prompts", Kernel("_attend_prompts", prompt_warps, prompt_attention))
    rows, starts = [100, 3, 33, 17, 256, 64], [0, 50, 95, 700, 129, 192]
    batch, kind = batch_of(rows, starts, page_size, torch.float16), torch.float16
    size = int(batch.page_table.max()) + 1, page_size, kv_heads, dim
    q = random(sum(rows), 2, heads, dim, dtype=kind)[:, 1]  # lies beside something else
    pages = random(*size, dtype=kind), random(*size, dtype=kind, seed=5)
    sink = random(heads, dtype=kind) if sinks else None
    options = attention.AttentionOptions(dim**-0.5, window, softcap)
    expected = attention.paged_attention_reference(q, pages, batch, options, sink)
    keys, form = keys_of(batch), attention_work.Form((17, 256), 128, 128)
    for _ in range(2):  # counters are as they were
        out = torch.full_like(expected, 9.0)
        prompt_attention.attend(
            q, pages, keys, form, out, options.scale * LOG2_E, window=window, softcap=softcap * LOG2_E, sinks=sink,
            value_scale=2.0,
        )  # fmt: skip
        few = (batch.request == 1).to(DEVICE)
        torch.testing.assert_close(out[~few], 2 * expected[~few], rtol=4e-3, atol=4e-3)
        assert (out[few] == 9).all()
    assert not any(each.any() for name, each in keys.memo.items() if name[0] == "prompt attention")
