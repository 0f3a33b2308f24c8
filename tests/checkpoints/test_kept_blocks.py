"""Quantised GGUF weights that stay as they are in the file: the same bits, in less memory."""

from pathlib import Path

import pytest
import torch
from gguf_files import tiny_model, write_model

from outrider import LLM, SamplingParams
from outrider.checkpoints.gguf import GgufCheckpoint
from outrider.kernels import native, native_library
from outrider.kernels.packed import BLOCKS, TILES
from outrider.layers import packing
from outrider.layers.packing import held_bytes, packable

needs_compiler = pytest.mark.skipif(native_library.library() is None, reason="no C compiler, so no native kernels")
PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [40, 7], list(range(30))]
TYPES = ("Q8_0", "Q4_0", "Q5_1")  # by turns: the parts of a joint projection differ


@needs_compiler
def test_memory_is_planned_for_what_will_be_held(tmp_path: Path) -> None:
    model = tiny_model("llama", tie_word_embeddings=False)
    plain = GgufCheckpoint(write_model(tmp_path / "plain.gguf", model, "llama", ("F16",)))
    num_elements = sum(parameter.numel() for parameter in model.parameters())
    assert plain.held_bytes(tiled=False) == num_elements * 4
    quantised = GgufCheckpoint(write_model(tmp_path / "quantised.gguf", model, "llama", ("Q8_0",)))
    vectors = sum(parameter.numel() for parameter in model.parameters() if parameter.dim() == 1)
    tables = 32 * sum(parameter.dim() > 1 for parameter in model.parameters())
    assert quantised.held_bytes(tiled=False) == (num_elements - vectors) // 32 * 34 + vectors * 4 + tables


def answers(path: Path, speculative: dict | None) -> tuple[list[tuple[tuple[int, ...], object]], LLM]:
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=12, logprobs=2, ignore_eos=True)
    llm = LLM(path, speculative, max_model_len=64, cpu_activations="float32")
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], params)
    completions = [output.outputs[0] for output in outputs]
    return [(tuple(each.token_ids), each.logprobs) for each in completions], llm


@needs_compiler
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_blocks_say_the_same_as_floats(
    tmp_path: Path, family: str, tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_model(tmp_path / "model.gguf", tiny_model(family, tie_word_embeddings=tied), family, TYPES)
    expected, dense = answers(path, None)
    assert all(layer.packed is None for layer in packable(dense.target)), "too small to be worth it"
    monkeypatch.setattr(packing, "SMALL_MODEL", 0)
    draft_model = {"method": "draft_model", "model": str(path), "num_speculative_tokens": 3}
    for speculative in (None, {"method": "ngram"}, draft_model):
        found, llm = answers(path, speculative)
        assert found == expected
        forms = [layer.packed for layer in packable(llm.target)]
        assert all(form is not None and form.kind == BLOCKS for form in forms)
        assert held_bytes(llm.target) < held_bytes(dense.target) / 2
        assert llm.budget.weight_bytes == held_bytes(llm.target, *([llm.drafter] if llm.drafter is not None else []))
        llm.close()
    dense.close()


@needs_compiler
def test_what_is_no_block_stays_floats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A projection that has floats among its parts, files of floats, other precisions."""
    monkeypatch.setattr(packing, "SMALL_MODEL", 0)
    model = tiny_model("qwen2", tie_word_embeddings=False)
    mixed = write_model(tmp_path / "mixed.gguf", model, "qwen2", ("Q8_0", "F32"))
    with LLM(mixed, None, max_model_len=64, cpu_activations="float32") as llm:
        forms = [layer.packed is not None and layer.packed.kind == BLOCKS for layer in packable(llm.target)]
        assert any(forms)
        assert not all(forms)
        assert all(p.isfinite().all() for layer in packable(llm.target) if layer.packed is None for p in [layer.weight])
    with pytest.raises(ValueError, match=r"bfloat16 on a CPU would widen every weight .* leave dtype out"):
        LLM(mixed, None, max_model_len=64, dtype="bfloat16")


@needs_compiler
def test_a_weight_without_memory_cannot_be_used_by_mistake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "SMALL_MODEL", 0)
    path = write_model(tmp_path / "model.gguf", tiny_model("qwen2", tie_word_embeddings=True), "qwen2", TYPES)
    with LLM(path, None, max_model_len=64) as llm:
        assert llm.target.head.packed.kind == TILES, "the default"
        weight = llm.target.head.weight
        assert weight.shape == (48, 32)
        assert weight.isnan().all()
        with torch.inference_mode(), pytest.raises(AssertionError):
            native.linear(torch.ones(1, 32), weight)
