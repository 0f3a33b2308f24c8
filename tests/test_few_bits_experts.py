"""Whole mixtures whose experts stay in few bits, as on a GPU, on interpreted Triton kernels: they say what their dense
numbers say, alone and with drafts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from quantised_models import mxfp4_model, quantise_model
from safetensors.torch import load_file, save_file
from samples import Oracle, drafter_settings
from transformers import AutoModelForCausalLM

from outrider import LLM, SamplingParams
from outrider.kernels.quantised import Kind
from outrider.layers.moe import Experts
from outrider.layers.packing import held_bytes
from outrider.llm import total_speculation

PARAMS = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
PROMPT = [5, 6, 7, 8, 9]
OPTIONS: dict[str, Any] = {"max_model_len": 32, "device": "cpu", "dtype": "float32", "page_size": 4}
OPTIONS |= {"max_num_seqs": 1}


def said(path: Path, **options: Any) -> list[int]:
    with LLM(path, None, **OPTIONS, **options) as llm:
        return llm.generate([PROMPT], PARAMS)[0].outputs[0].token_ids


def mixtures(llm: LLM) -> list[Experts]:
    return [layer for layer in llm.target.modules() if isinstance(layer, Experts)]


def said_with_drafts(llm: LLM) -> list[int]:
    outputs = llm.generate([PROMPT], PARAMS)
    assert total_speculation(outputs).accepted > 0
    return outputs[0].outputs[0].token_ids


@pytest.fixture
def oracle(
    tmp_path: Path, target_path: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[[list[int]], dict[str, Any]]:
    """A drafter that is told what will be said."""

    def settings(answer: list[int]) -> dict[str, Any]:
        monkeypatch.setattr(Oracle, "truth", [PROMPT + answer])
        monkeypatch.setattr(Oracle, "taps", (0, 1))
        monkeypatch.setattr(Oracle, "skill", 1.0)
        settings = drafter_settings("oracle", tmp_path, target_path, "llama")
        return {**settings, "num_speculative_tokens": 5, "adaptive": False}

    return settings


def test_mxfp4_stays_mxfp4(
    tmp_path: Path, oracle: Callable[[list[int]], dict[str, Any]], request: pytest.FixtureRequest
) -> None:
    path, _, _ = mxfp4_model(tmp_path / "quantised", swiglu_limit=0.8)
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    wanted = said(path)
    request.getfixturevalue("interpreted")
    with LLM(path, oracle(wanted), enforce_eager=True, **OPTIONS) as llm:
        for number, routed in enumerate(mixtures(llm)):
            up, down = routed.packed[routed.up], routed.packed[routed.down]
            assert up.matrix.kind is down.matrix.kind is Kind.FP4
            source = f"model.layers.{number}.mlp.experts."
            both = theirs[f"{source}gate_up_proj"].mT
            assert torch.equal(up.dense(torch.float32), torch.cat([both[:, 0::2], both[:, 1::2]], 1))
            assert torch.equal(down.dense(torch.float32), theirs[f"{source}down_proj"].mT)
            assert routed.up.untyped_storage().nbytes() == 4
        floats = sum(4 * parameter.numel() for parameter in llm.target.parameters())
        assert llm.budget.weight_bytes == held_bytes(llm.target) < 0.6 * floats
        assert said_with_drafts(llm) == wanted


@pytest.mark.usefixtures("recording")
@pytest.mark.parametrize("way", ["fp8", "packed"])
def test_quantised_experts_stay_quantised(
    way: str,
    tmp_path: Path,
    oracle: Callable[[list[int]], dict[str, Any]],
    request: pytest.FixtureRequest,
) -> None:
    quantised, dense = quantise_model(tmp_path, way, "qwen3_moe")
    wanted = said(dense)
    request.getfixturevalue("interpreted")
    with LLM(quantised, oracle(wanted), enforce_eager=way != "fp8", **OPTIONS) as llm:
        (routed,) = mixtures(llm)
        assert {routed.up, routed.down} == set(routed.packed)
        assert llm.budget.weight_bytes == held_bytes(llm.target)
        assert said_with_drafts(llm) == wanted
        assert (llm.engine.num_recorded_rounds > 0) == (way == "fp8")


@pytest.mark.usefixtures("interpreted")
@pytest.mark.parametrize(("family", "kind"), [("deepseek_v2_lite", "int4")])
def test_experts_are_rounded_as_they_are_loaded(
    family: str, kind: str, target_path: Callable[..., Path], oracle: Callable[[list[int]], dict[str, Any]]
) -> None:
    path = target_path(family, num_hidden_layers=2)
    wanted = said(path, quantization=kind, enforce_eager=True)
    options = {"enforce_eager": True, **OPTIONS}
    with LLM(path, oracle(wanted), quantization=kind, **options) as llm, LLM(path, None, **options) as dense:
        for ours, theirs in zip(mixtures(llm), mixtures(dense), strict=True):
            assert not theirs.packed
            for parameter, other in ((ours.up, theirs.up), (ours.down, theirs.down)):
                distance = (ours.packed[parameter].dense(torch.float32) - other).norm() / other.norm()
                assert 0 < distance < (0.15 if kind == "int4" else 0.05)
        assert llm.budget.weight_bytes < dense.budget.weight_bytes * 0.75
        assert said_with_drafts(llm) == wanted


@pytest.mark.usefixtures("interpreted")
def test_a_scale_that_is_no_number_is_refused(tmp_path: Path) -> None:
    path, _, _ = mxfp4_model(tmp_path / "quantised")
    name = "model.layers.1.mlp.experts.down_proj_scales"
    (shard,) = [shard for shard in path.glob("*.safetensors") if name in load_file(shard)]
    tensors = load_file(shard)
    tensors[name][0, 1, 2] = 255
    save_file(tensors, shard, metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"tensor model.layers.1.mlp.experts.down_proj holds NaN"):
        LLM(path, None, **OPTIONS)
