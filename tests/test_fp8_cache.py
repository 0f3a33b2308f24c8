"""Keys and values in 8 bits, as on a GPU, on interpreted Triton kernels: half the memory, and drafts change nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_models import quantise_model
from safetensors.torch import save_file
from samples import drafter_settings, guide

from outrider import LLM, SamplingParams
from outrider.kernels.rope import PageScales, rounded
from outrider.layers.attention import SelfAttention
from outrider.layers.cached import cached_layers
from outrider.llm import total_speculation

PARAMS = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
PROMPT = [11, 3, 8, 30]
OPTIONS: dict[str, Any] = {"max_model_len": 48, "device": "cpu", "dtype": "float32", "page_size": 4}


@pytest.mark.usefixtures("interpreted")
def test_drafts_change_nothing(tmp_path: Path, target_path: Callable[..., Path]) -> None:
    path = target_path("llama", num_hidden_layers=2)
    with LLM(path, None, kv_cache_dtype="fp8", **OPTIONS) as llm:
        assert all(layer.pages[0].dtype is torch.float8_e4m3fn for layer in cached_layers(llm.target))  # type: ignore[index]
        plain = llm.generate([PROMPT], PARAMS)[0].outputs[0].token_ids
        small = llm.engine.cache.layers[0].bytes_per_token(4)
    with LLM(path, None, **OPTIONS) as llm:
        assert llm.engine.cache.layers[0].bytes_per_token(4) == 4 * small
    settings = drafter_settings("eagle3", tmp_path, target_path, "llama")
    settings |= {"num_speculative_tokens": 2, "adaptive": False, "kv_cache_dtype": "fp8", "taps": [0, 1, 2]}
    with LLM(path, settings, max_num_seqs=1, kv_cache_dtype="fp8", **OPTIONS) as llm:
        assert llm.drafter is not None
        assert all(layer.pages[0].dtype is torch.float8_e4m3fn for layer in cached_layers(llm.drafter))  # type: ignore[index]
        guide(llm.drafter, [PROMPT + plain], llm.target.vocab_size, skill=1.0)
        outputs = llm.generate([PROMPT], PARAMS)
    assert outputs[0].outputs[0].token_ids == plain
    made = total_speculation(outputs)
    assert made.drafted > made.accepted > 0


@pytest.mark.usefixtures("interpreted")
def test_latents_are_kept_in_eight_bits_too(target_path: Callable[..., Path]) -> None:
    with LLM(target_path("deepseek_v2"), {"method": "ngram"}, kv_cache_dtype="fp8", **OPTIONS) as llm:
        assert all(layer.pages[0].dtype is torch.float8_e4m3fn for layer in cached_layers(llm.target))  # type: ignore[index]
        assert len(llm.generate([PROMPT], SamplingParams(max_tokens=1))[0].outputs[0].token_ids) == 1


def test_what_is_too_large_is_the_largest() -> None:
    x = torch.tensor([1e4, -1e4, 0.3])
    assert rounded(x, torch.float8_e4m3fn).float().tolist() == [448.0, -448.0, 0.3125]
    assert rounded(x, torch.float32).equal(x)


def scaled_model(path: Path, key: torch.Tensor, value: torch.Tensor) -> Path:
    """A tiny fp8 checkpoint with scales for the keys and values of its first layer."""
    quantised, _ = quantise_model(path, "int8")
    file = quantised / "scales.safetensors"
    names = {f"model.layers.0.self_attn.{kind}_scale": scale for kind, scale in (("k", key), ("v", value))}
    save_file(names, file)
    index = json.loads((quantised / "model.safetensors.index.json").read_text())
    index["weight_map"] |= dict.fromkeys(names, file.name)
    (quantised / "model.safetensors.index.json").write_text(json.dumps(index))
    return quantised


@pytest.mark.usefixtures("interpreted")
def test_scales_of_the_checkpoint(tmp_path: Path) -> None:
    """What is kept is the number divided by its scale. Without 8 bits in pages, scales mean nothing."""
    plain = scaled_model(tmp_path / "a", torch.tensor(1.0), torch.tensor([1.0]))
    scaled = scaled_model(tmp_path / "b", torch.tensor(0.25), torch.tensor([2.0]))
    kept = []
    for path in (plain, scaled):
        with LLM(path, None, kv_cache_dtype="fp8", **OPTIONS) as llm:
            llm.generate([PROMPT], SamplingParams(max_tokens=1))
            first, second = cached_layers(llm.target)
            assert isinstance(first, SelfAttention)
            assert isinstance(second, SelfAttention)
            assert second.options.scales == PageScales()
            assert first.pages is not None
            kept.append([pages.float().abs().max() for pages in first.pages])
    assert first.options.scales == PageScales(0.25, 2.0)
    assert [new / old for old, new in zip(*kept, strict=True)] == pytest.approx([4.0, 0.5], rel=0.1)
    with LLM(scaled, None, **OPTIONS) as llm:
        assert cached_layers(llm.target)[0].options.scales == PageScales()  # type: ignore[union-attr]


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("scale", [torch.tensor(0.0), torch.tensor([1.0, 2.0]), torch.tensor(float("inf"))])
def test_scales_that_cannot_be(scale: torch.Tensor, tmp_path: Path) -> None:
    path = scaled_model(tmp_path / "a", scale, torch.tensor(1.0))
    with pytest.raises(ValueError, match=r"self_attn\.k_scale must be one number above 0, .*leave kv_cache_dtype out"):
        LLM(path, None, kv_cache_dtype="fp8", **OPTIONS)


def test_it_is_for_gpus(target_path: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="kv_cache_dtype fp8 is for GPUs"):
        LLM(target_path(), None, kv_cache_dtype="fp8", **OPTIONS)
    with pytest.raises(ValueError, match="unknown kv_cache_dtype 'int3'; known: auto, fp8, "):
        LLM(target_path(), None, kv_cache_dtype="int3", **OPTIONS)
