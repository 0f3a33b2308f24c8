"""GGUF models whose matrices are multiplied in whole numbers: what they say, with and without drafts."""

from pathlib import Path

import pytest
import torch
from gguf_blocks import QUANTISED, UNIT, rounded
from gguf_files import tiny_model, write_model
from torch import Tensor

from outrider import LLM, SamplingParams
from outrider.checkpoints.gguf import GgufCheckpoint
from outrider.kernels import native, native_library
from outrider.kernels.packed import TILES, Packed, Tiles
from outrider.layers.attention import AttentionShape
from outrider.layers.packing import held_bytes, packable

pytestmark = pytest.mark.skipif(native_library.library() is None, reason="no C compiler, so no native kernels")
PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [40, 7], list(range(30))]
NESTED = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
Said = list[tuple[tuple[int, ...], object]]


def said(llm: LLM, prompts: list[list[int]] = PROMPTS) -> Said:
    params = SamplingParams(temperature=0.8, seed=1, max_tokens=12, logprobs=2, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params)
    return [(tuple(each.outputs[0].token_ids), each.outputs[0].logprobs) for each in outputs]


def written(path: Path, types: tuple[str, ...], family: str = "llama", **options: object) -> Path:
    sizes = NESTED if any(name.endswith("_K") for name in types) else {}
    return write_model(path, tiny_model(family, **sizes, **options), family, types)


@pytest.mark.parametrize("types", [*((name,) for name in QUANTISED.values()), ("Q4_K", "Q8_0", "Q6_K")], ids=str)
def test_drafts_change_nothing(tmp_path: Path, types: tuple[str, ...]) -> None:
    """Nor does a float draft model beside it, nor being alone: to the last bit of every probability."""
    path = written(tmp_path / "model.gguf", types, tie_word_embeddings=types == ("Q5_0",))
    with LLM(path, None, max_model_len=64, cpu_activations="int8") as llm:
        expected = said(llm)
        assert all(layer.packed.kind == TILES for layer in packable(llm.target) if layer is not llm.target.embed)
        assert llm.budget.weight_bytes == held_bytes(llm.target)
        assert [said(llm, prompts=[prompt])[0] for prompt in PROMPTS] == expected
    for settings in ({"method": "ngram"}, {"method": "draft_model", "model": str(path), "num_speculative_tokens": 3}):
        with LLM(path, settings, max_model_len=64, cpu_activations="int8") as llm:
            assert said(llm) == expected


def slow_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, packed: Packed | None = None) -> Tensor:
    """As the definition has it: the input in 8 bits, by the dequantised rows."""
    assert packed is not None
    parts = []
    for part in packed.parts:
        assert not isinstance(part, Tiles)
        floats = torch.empty(len(part.data), part.row_len)
        native.dequantise(part, floats)
        parts.append(rounded(x, UNIT[part.type_number]) @ floats.double().T)
    out = torch.cat(parts, 1).float()
    return out if bias is None else out + bias


@pytest.mark.parametrize(("family", "types"), [("qwen2", ("Q4_0", "Q5_1")), ("llama", ("Q4_K", "Q6_K", "Q5_K"))])
def test_a_whole_model_says_what_the_definition_says(
    tmp_path: Path, family: str, types: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """But for where the last bits of floats decide to which step a number is rounded."""
    path = written(tmp_path / "model.gguf", types, family)
    with LLM(path, None, max_model_len=64, cpu_activations="int8", kv_cache_dtype="float16") as llm:
        found = first_token(llm)
    monkeypatch.setattr("outrider.layers.packing.SMALL_MODEL", 0)
    monkeypatch.setattr(AttentionShape, "is_plain", False)
    with LLM(path, None, max_model_len=64, cpu_activations="float32", kv_cache_dtype="float16") as llm:
        floats = first_token(llm)
        monkeypatch.setattr(native, "linear", slow_linear)
        expected = first_token(llm)
    assert agreement(found, expected) > 0.6
    assert agreement(floats, expected) < 0.1


def first_token(llm: LLM) -> list[dict[int, float]]:
    """Log-probabilities of what follows each of many prompts of one token."""
    params = SamplingParams(temperature=0.0, max_tokens=1, logprobs=20)
    outputs = llm.generate([[token] for token in range(40)], params)
    return [{token: each.logprob for token, each in output.outputs[0].logprobs[0].items()} for output in outputs]


def agreement(one: list[dict[int, float]], other: list[dict[int, float]]) -> float:
    """For which share of the prompts they are the same but for the last bits."""
    same = [
        a.keys() == b.keys() and all(abs(a[token] - b[token]) < 1e-3 for token in a)
        for a, b in zip(one, other, strict=True)
    ]
    return sum(same) / len(same)


def test_what_cannot_be_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", ("Q4_0",))
    with pytest.raises(ValueError, match="unknown cpu_activations 'int4'; known: auto, int8, float32"):
        LLM(path, None, cpu_activations="int4")
    with pytest.raises(ValueError, match="for quantised GGUF files: leave it out"):
        LLM(None, None, cpu_activations="int8")


def test_a_scale_that_is_no_number_is_refused_by_name(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", ("Q6_K",))
    checkpoint = GgufCheckpoint(path)
    place = checkpoint._entry("model.layers.1.mlp.down_proj.weight").offset + 5 * 210 + 208
    checkpoint.close()
    content = bytearray(path.read_bytes())
    content[place : place + 2] = b"\x00\x7e"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"tensor model\.layers\.1\.mlp\.down_proj\.weight holds scales .* download"):
        LLM(path, None, max_model_len=64, cpu_activations="int8")


def test_memory_is_planned_for_tiles(tmp_path: Path) -> None:
    path = written(tmp_path / "model.gguf", ("Q4_K",))
    checkpoint = GgufCheckpoint(path)
    with LLM(path, None, max_model_len=64, cpu_activations="int8") as llm:
        held = llm.budget.weight_bytes
    assert held <= checkpoint.held_bytes(tiled=True) <= 1.06 * checkpoint.held_bytes(tiled=False)
    checkpoint.close()
