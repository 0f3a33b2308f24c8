"""Whole models on Triton kernels, interpreted: what a GPU computes, recorded rounds and all, where there is none."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from samples import Oracle, drafter_settings, guide

from outrider import LLM, SamplingParams
from outrider.engine import graphs
from outrider.kernels import dispatch
from outrider.kernels.gpu import attention_work, lone_rows
from outrider.layers import norm
from outrider.llm import total_speculation

PARAMS = SamplingParams(max_tokens=5, temperature=0.8, seed=4, ignore_eos=True)
PROMPT = [5, 6, 7, 8, 9, 5, 6]
PAIRS = [
    ("llama", "eagle3", 4),  # with layers, as few as have one of each kind
    ("gpt_oss", "oracle", 2),
    ("gemma3", "oracle", 2),
    ("nemotron_h", "oracle", 6),
    ("deepseek_v3", "oracle", 2),
]


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize(("family", "method", "num_layers"), PAIRS)
def test_models_on_interpreted_kernels(
    family: str,
    method: str,
    num_layers: int,
    target_path: Callable[..., Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    path = target_path(family, num_hidden_layers=num_layers)
    options: dict[str, Any] = {"max_model_len": 48, "device": "cpu", "dtype": "float32"}
    options |= {"page_size": 4, "snapshot_interval": 4}
    with LLM(path, None, enforce_eager=True, **options) as llm:
        plain = llm.generate([PROMPT], PARAMS)[0].outputs[0].token_ids
    Oracle.truth = [PROMPT + plain]
    monkeypatch.setattr(Oracle, "taps", (1, 2))
    monkeypatch.setattr(dispatch.native_library, "library", lambda: None)
    monkeypatch.setattr(dispatch, "is_home", lambda x: True)
    monkeypatch.setattr(attention_work, "WANTED_PROGRAMS", 4)  # an interpreter has no use for many
    monkeypatch.setattr(graphs, "NUM_ROWS", (8, 64))  # nor for rows that only fill up
    if family in ("llama", "deepseek_v3"):
        monkeypatch.setattr(norm, "MOST_NUMBERS", 2**20)  # products norm their own rows
    rows: set[int] = set()
    attend = lone_rows.attend_rows
    if family == "gemma3":  # rows of a verification by the kernel for few
        monkeypatch.setattr(lone_rows, "SEVERAL", dict.fromkeys(range(1024), lone_rows.Rows(16, 4)))
        monkeypatch.setattr(lone_rows, "attend_rows", lambda *a, **k: rows.add(a[2].max_rows) or attend(*a, **k))
    with LLM(path, drafter_settings(method, tmp_path, target_path, family), **options) as llm:
        assert llm.drafter is not None
        guide(llm.drafter, Oracle.truth, llm.target.vocab_size, skill=0.8)
        outputs = llm.generate([PROMPT], PARAMS)
        assert llm.engine.num_recorded_rounds > 0
        if llm.engine.cache.recurrent:
            (again,) = llm.generate([[*PROMPT, *plain[:3]]], replace(PARAMS, max_tokens=2))
            assert again.num_cached_tokens == 8
            assert again.outputs[0].token_ids == plain[3:]
    assert outputs[0].outputs[0].token_ids == plain
    assert total_speculation(outputs).accepted > 0
    assert family != "gemma3" or max(rows) > 1


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("family", ["gemma3", "gpt_oss", "deepseek_v3"])
def test_single_rows_by_their_own_kernel(
    family: str, target_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Several requests at once, which begin and end at different times, with norms, windows, sinks, latents."""
    sizes = {} if family == "deepseek_v3" else {"head_dim": 16}
    path = target_path(family, num_hidden_layers=2, **sizes)
    options: dict[str, Any] = {"max_model_len": 48, "device": "cpu", "dtype": "float32", "page_size": 4}
    prompts = [PROMPT, [7], PROMPT * 2]
    params = [replace(PARAMS, max_tokens=count) for count in (5, 7, 3)]
    with LLM(path, None, enforce_eager=True, **options) as llm:
        plain = [each.outputs[0].token_ids for each in llm.generate(prompts, params)]
    monkeypatch.setattr(dispatch.native_library, "library", lambda: None)
    monkeypatch.setattr(dispatch, "is_home", lambda x: True)
    monkeypatch.setattr(attention_work, "WANTED_PROGRAMS", 4)
    monkeypatch.setattr(graphs, "NUM_ROWS", (8, 64))
    monkeypatch.setattr(lone_rows, "CHOSEN", dict.fromkeys(range(1024), lone_rows.Rows(16, 4, slices=2)))
    launches, attend = [], lone_rows.attend_rows
    monkeypatch.setattr(lone_rows, "attend_rows", lambda *a, **k: launches.append(1) or attend(*a, **k))
    with LLM(path, None, **options) as llm:
        found = [each.outputs[0].token_ids for each in llm.generate(prompts, params)]
        assert llm.engine.num_recorded_rounds > 0
    assert found == plain
    assert len(launches) >= 2
