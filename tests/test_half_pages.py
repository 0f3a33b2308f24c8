"""Keys and values in half precision, on a CPU: half the memory, and drafts change nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import tiny_model, write_model
from samples import drafter_settings, guide, sample_target

from outrider import LLM, SamplingParams
from outrider.kernels import native_library
from outrider.layers.cached import cached_layers
from outrider.layers.shared_attention import SharedAttention
from outrider.llm import total_speculation
from outrider.models.base import Target

PROMPTS = [list(range(20, 41)), [7, 8, 9], list(range(60, 75))]
SMALL: dict[str, Any] = {"max_model_len": 64, "page_size": 4, "device": "cpu", "dtype": "float32"}
PARAMS = SamplingParams(temperature=0.8, seed=1, max_tokens=12, logprobs=2, ignore_eos=True)
PAIRS = [
    ("llama3", "eagle3"),
    ("qwen3", "p_eagle"),
    ("gemma3", "dflash"),
    ("gemma4", "gemma4_assistant"),
    ("gpt_oss", "dspark"),
    ("deepseek_v3", "mtp"),
    ("nemotron_h", "eagle"),
    ("step3p5", "mtp"),
    ("qwen2", "draft_model"),
]
needs_compiler = pytest.mark.skipif(native_library.library() is None, reason="no C compiler, so no native kernels")
Said = list[tuple[tuple[int, ...], object]]


def said(llm: LLM) -> Said:
    outputs = llm.generate(PROMPTS, PARAMS)
    return [(tuple(each.outputs[0].token_ids), each.outputs[0].logprobs) for each in outputs]


def of_prompts(llm: LLM) -> torch.Tensor:
    """How likely the tokens of the prompts are."""
    outputs = llm.generate(PROMPTS, SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0))
    found = [
        place[token].logprob
        for prompt, output in zip(PROMPTS, outputs, strict=True)
        for token, place in zip(prompt[1:], output.prompt_logprobs[1:], strict=True)  # type: ignore[index]
    ]
    return torch.tensor(found)


def page_dtypes(model: Any) -> set[torch.dtype]:
    return {layer.pages[0].dtype for layer in cached_layers(model)}  # type: ignore[index]


@pytest.mark.parametrize(("family", "method"), PAIRS)
def test_drafts_change_nothing(family: str, method: str, target_path: Callable[..., Path], tmp_path: Path) -> None:
    """To the last bit of every probability, with drafters that keep theirs in half precision too; and the target is
    nearly the one with floats, but not the same."""
    path = sample_target(method, tmp_path, target_path, family)
    with LLM(path, None, **SMALL) as llm:
        assert page_dtypes(llm.target) == {torch.float32}
        page_bytes, floats = llm.budget.page_bytes, of_prompts(llm)
    with LLM(path, None, kv_cache_dtype="float16", **SMALL) as llm:
        assert page_dtypes(llm.target) == {torch.float16}
        assert 2 * llm.budget.page_bytes == page_bytes
        halves, expected = of_prompts(llm), said(llm)
    assert not halves.equal(floats)
    torch.testing.assert_close(halves, floats, atol=0.02, rtol=0)
    settings = drafter_settings(method, tmp_path, target_path, family) | {"num_speculative_tokens": 3}
    settings |= {"adaptive": False, "force": True, "kv_cache_dtype": "float16"}
    with LLM(path, settings, kv_cache_dtype="float16", **SMALL) as llm:
        assert llm.drafter is not None
        assert page_dtypes(llm.drafter) <= {torch.float16}
        texts = [prompt + list(ids) for prompt, (ids, _) in zip(PROMPTS, expected, strict=True)]
        guide(llm.drafter, texts, llm.target.vocab_size)
        assert said(llm) == expected
        outputs = llm.generate(PROMPTS, PARAMS)  # from pages that are there
        assert [tuple(each.outputs[0].token_ids) for each in outputs] == [ids for ids, _ in expected]
    made = total_speculation(outputs)
    assert made.drafted > made.accepted > 0


@needs_compiler
@pytest.mark.parametrize("family", ["llama3", "gemma4", "deepseek_v3"])
def test_torch_keeps_the_same_numbers(
    family: str, target_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a compiler."""
    with LLM(target_path(family), None, kv_cache_dtype="float16", **SMALL) as llm:
        expected = of_prompts(llm)
    monkeypatch.setattr(native_library, "library", lambda: None)
    with LLM(target_path(family), None, kv_cache_dtype="float16", **SMALL) as llm:
        assert page_dtypes(llm.target) == {torch.float16}
        torch.testing.assert_close(of_prompts(llm), expected, atol=2e-3, rtol=0)


@needs_compiler
def test_gguf_files_keep_halves_unless_told(tmp_path: Path) -> None:
    """As other engines do; a drafter that is no such file keeps what it is computed in."""
    path = write_model(tmp_path / "model.gguf", tiny_model("llama"), "llama", ("Q8_0",))
    options: dict[str, Any] = {"max_model_len": 64, "cpu_activations": "int8"}
    drafter = {"method": "draft_model", "model": str(path)}
    with LLM(path, drafter, **options) as llm:
        assert page_dtypes(llm.target) == page_dtypes(llm.drafter) == {torch.float16}
    with LLM(path, {**drafter, "kv_cache_dtype": "float32"}, kv_cache_dtype="float32", **options) as llm:
        assert page_dtypes(llm.target) == page_dtypes(llm.drafter) == {torch.float32}
    with LLM(path, None, max_model_len=64) as llm:  # too small to be multiplied in whole numbers
        assert page_dtypes(llm.target) == {torch.float32}


def test_layers_that_share_pages_read_halves(target_path: Callable[..., Path]) -> None:
    with LLM(target_path("gemma4"), None, kv_cache_dtype="float16", **SMALL) as llm:
        assert isinstance(llm.target, Target)
        shared = [module for module in llm.target.modules() if isinstance(module, SharedAttention)]
        assert shared
        assert all(module.source[0].pages[0].dtype is torch.float16 for module in shared)  # type: ignore[index]


def test_what_cannot_be_kept_is_refused(target_path: Callable[..., Path]) -> None:
    path = target_path()
    with pytest.raises(ValueError, match=r"kv_cache_dtype bfloat16: on a CPU, .* are float32, .* or float16"):
        LLM(path, None, kv_cache_dtype="bfloat16", **SMALL)
    with pytest.raises(ValueError, match="unknown kv_cache_dtype 'int3'; known: auto, fp8, float16, float32, bfloat16"):
        LLM(path, {"method": "ngram", "kv_cache_dtype": "int3"}, **SMALL)


@pytest.mark.usefixtures("interpreted")
def test_a_gpu_keeps_what_it_computes_in(target_path: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=r"kv_cache_dtype float16: on a GPU, .* are float32, .* or fp8"):
        LLM(target_path(), None, kv_cache_dtype="float16", **SMALL)
