"""Whole models whose matrices stay in few bits, as on a GPU, on interpreted Triton kernels: they say what their dense
numbers say, alone and with a drafter, and take no more memory than they need."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import tiny_model, write_model
from quantised_models import quantise_model
from quantised_packing import WAYS
from safetensors.torch import load_file, save_file
from samples import drafter_settings, guide

from outrider import LLM, SamplingParams
from outrider.kernels.quantised import Kind, Quantised
from outrider.layers.linear import Linear
from outrider.layers.packing import held_bytes, round_matrices
from outrider.llm import total_speculation

PARAMS = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
FEW = SamplingParams(max_tokens=3, temperature=0, ignore_eos=True)
PROMPT = [5, 6, 7, 8, 9]
OPTIONS: dict[str, Any] = {"max_model_len": 48, "device": "cpu", "dtype": "float32", "page_size": 4}


def said(path: Path, **options: Any) -> list[int]:
    with LLM(path, None, **OPTIONS, **options) as llm:
        return llm.generate([PROMPT], PARAMS)[0].outputs[0].token_ids


def matrices(llm: LLM) -> list[Linear]:
    return [layer for layer in llm.target.modules() if isinstance(layer, Linear)]


@pytest.mark.parametrize("way", WAYS)
def test_a_quantised_file_stays_quantised(way: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    quantised, dense = quantise_model(tmp_path, way)
    wanted = said(dense)
    request.getfixturevalue("interpreted")
    with LLM(quantised, None, **OPTIONS) as llm:
        kept = [layer for layer in matrices(llm) if isinstance(layer.packed, Quantised)]
        assert len(kept) == len(matrices(llm))
        assert all(layer.weight.untyped_storage().nbytes() <= 8 for layer in kept)
        floats = sum(4 * parameter.numel() for parameter in llm.target.parameters())
        assert llm.budget.weight_bytes == held_bytes(llm.target) < 0.8 * floats
        assert llm.generate([PROMPT], FEW)[0].outputs[0].token_ids == wanted[: FEW.max_tokens]


def test_a_gguf_file_stays_quantised(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Of the mixed types that most files have."""
    sizes = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64, "num_hidden_layers": 1}
    model = tiny_model("llama", **sizes, tie_word_embeddings=False)
    path = write_model(tmp_path / "model.gguf", model, "llama", ("Q4_K", "Q6_K", "Q8_0"))
    wanted = said(path, cpu_activations="float32")
    request.getfixturevalue("interpreted")
    with LLM(path, None, **OPTIONS) as llm:
        assert all(isinstance(layer.packed, Quantised) for layer in matrices(llm))
        assert isinstance(llm.target.head.packed, Quantised)
        assert llm.budget.weight_bytes == held_bytes(llm.target)
        assert llm.generate([PROMPT], FEW)[0].outputs[0].token_ids == wanted[: FEW.max_tokens]


@pytest.mark.usefixtures("recording")
def test_drafts_for_a_quantised_target(
    tmp_path: Path, target_path: Callable[..., Path], request: pytest.FixtureRequest
) -> None:
    quantised, dense = quantise_model(tmp_path, "packed")
    plain = said(dense)
    request.getfixturevalue("interpreted")
    settings = {
        **drafter_settings("eagle3", tmp_path, target_path, "llama"),
        "taps": [0, 1, 2],
        "num_speculative_tokens": 2,
    }
    settings["quantization"] = "fp8"
    with LLM(quantised, settings, max_num_seqs=1, **OPTIONS) as llm:
        assert llm.drafter is not None
        assert all(isinstance(each.packed, Quantised) for each in llm.drafter.modules() if isinstance(each, Linear))
        guide(llm.drafter, [PROMPT + plain], llm.target.vocab_size, skill=0.8)
        outputs = llm.generate([PROMPT], PARAMS)
        assert llm.engine.num_recorded_rounds > 0
    assert outputs[0].outputs[0].token_ids == plain
    made = total_speculation(outputs)
    assert made.accepted > 0
    assert made.drafted > made.accepted


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize("kind", ["int4", "fp8"])
def test_rounded_as_it_is_loaded(kind: str, target_path: Callable[..., Path]) -> None:
    with LLM(target_path(), None, quantization=kind, **OPTIONS) as llm, LLM(target_path(), None, **OPTIONS) as dense:
        assert all(isinstance(layer.packed, Quantised) for layer in matrices(llm))
        assert isinstance(llm.target.head.packed, Quantised)
        assert llm.budget.weight_bytes < dense.budget.weight_bytes * 0.7
        for ours, theirs in zip(matrices(llm), matrices(dense), strict=True):
            assert isinstance(ours.packed, Quantised)
            distance = (ours.packed.dense(torch.float32) - theirs.weight).norm() / theirs.weight.norm()
            assert 0 < distance < (0.15 if kind == "int4" else 0.05)
        assert len(llm.generate([PROMPT], FEW)[0].outputs[0].token_ids) == FEW.max_tokens


@pytest.mark.usefixtures("interpreted")
def test_the_head_may_stay_as_it_is(target_path: Callable[..., Path]) -> None:
    with LLM(target_path(), None, **OPTIONS) as llm:
        round_matrices(llm.target, Kind.INT4, head=False)
        assert all(isinstance(layer.packed, Quantised) for layer in matrices(llm))
        assert llm.target.head.packed is None


def test_rounding_is_refused_where_there_are_no_kernels(target_path: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match="quantization int4 is for GPUs"):
        LLM(target_path(), None, quantization="int4", **OPTIONS)
    with pytest.raises(ValueError, match="not quantised, and can be rounded to fp8 or int4, not awq"):
        LLM(target_path(), None, quantization="awq", **OPTIONS)


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("part", "value"), [("_scale_inv", float("nan")), ("", 0x7F)])
def test_what_is_no_number_is_refused(part: str, value: float, tmp_path: Path) -> None:
    quantised, _ = quantise_model(tmp_path, "fp8")
    name = f"model.layers.1.mlp.down_proj.weight{part}"
    (shard,) = [path for path in quantised.glob("*.safetensors") if name in load_file(path)]
    tensors = load_file(shard)
    tensor = tensors[name] if part else tensors[name].view(torch.uint8)
    tensor[1, 1] = value
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"tensor model.layers.1.mlp.down_proj.weight holds NaN"):
        LLM(quantised, None, **OPTIONS)
