"""Qwen3-MoE and gpt-oss beyond their golden tests: other settings, other spellings, what is refused, strict loading."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from harness import Harness, load_target
from safetensors.torch import load_file, save_file

from outrider.kernels import dispatch
from outrider.kernels.activation import Activation, ClampedSilu, ClampedSwish, sigmoid
from outrider.models.base import targets

PROMPT = torch.randint(3, 250, (40,), generator=torch.Generator().manual_seed(3)).tolist()
Changes = dict[str, Any]


def logits(path: Path, chunk: int = 100) -> torch.Tensor:
    ((found, _),) = Harness(load_target(path)).run([PROMPT], chunk)
    return found


def changed(path: Path, directory: Path, changes: Changes, removed: tuple[str, ...] = ()) -> Path:
    """The same tensors under another config.json."""
    config = json.loads((path / "config.json").read_text())
    for key in removed:
        del config[key]
    (directory / "config.json").write_text(json.dumps({**config, **changes}))
    (directory / "model.safetensors").symlink_to(path / "model.safetensors")
    return directory


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [], "norm_topk_prob": False}),
        ("qwen3_moe", {"decoder_sparse_step": 2, "mlp_only_layers": [1], "num_experts_per_tok": 3}),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 3}),
        ("qwen3_moe", {"attention_bias": True, "tie_word_embeddings": True}),
        ("gpt_oss", {"attention_bias": False, "layer_types": ["full_attention"] * 4}),
        ("gpt_oss", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e5}, "tie_word_embeddings": True}),
        ("gpt_oss", {"num_experts_per_tok": 1}),
    ],
)
def test_other_settings(family: str, settings: Changes, target_path: Callable[..., Path]) -> None:
    with torch.no_grad():
        expected = tiny.reference(family, **settings)(input_ids=torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits(target_path(family, **settings)), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "step3p5"])
def test_a_row_is_the_same_bits_in_any_company(family: str, target_path: Callable[..., Path]) -> None:
    if dispatch.native_library.library() is None:
        pytest.skip("no C compiler, so no native kernels")
    path = target_path(family)
    whole = logits(path)
    assert torch.equal(whole, logits(path, chunk=1))
    assert torch.equal(whole, logits(path, chunk=7))


@pytest.mark.parametrize("activation", [sigmoid, ClampedSilu(0.7), ClampedSwish(1.7, 0.7)])
def test_activations_do_not_see_other_rows(activation: Activation, kernels: str) -> None:
    x = 3 * torch.randn(60, 14, generator=torch.Generator().manual_seed(1))
    with torch.inference_mode():
        whole, rows = activation(x), torch.cat([activation(row.clone()[None]) for row in x])
    torch.testing.assert_close(whole, rows)
    if kernels == "native":
        assert torch.equal(whole, rows)


def test_published_spelling_of_qwen3_moe(target_path: Callable[..., Path], tmp_path: Path) -> None:
    path = target_path("qwen3_moe")
    old = {"num_experts": 4, "rope_theta": 10000.0, "rope_scaling": None, "max_window_layers": 4}
    found = logits(changed(path, tmp_path, old, removed=("num_local_experts", "rope_parameters")))
    assert torch.equal(found, logits(path))


def test_published_spelling_of_gpt_oss(target_path: Callable[..., Path], tmp_path: Path) -> None:
    path = target_path("gpt_oss", swiglu_alpha=1.702, swiglu_limit=7.0)
    rope = json.loads((path / "config.json").read_text())["rope_parameters"]
    old = {"rope_theta": rope.pop("rope_theta"), "rope_scaling": rope, "experts_per_token": 2}
    defaults = ("swiglu_alpha", "swiglu_limit", "layer_types", "rms_norm_eps", "attention_bias")
    found = logits(changed(path, tmp_path, old, removed=("rope_parameters", *defaults)))
    assert torch.equal(found, logits(path))


@pytest.mark.parametrize(
    ("family", "changes", "named"),
    [
        ("qwen3_moe", {"mlp_bias": True}, "mlp_bias"),
        ("qwen3_moe", {"hidden_act": "gelu"}, "hidden_act"),
        ("qwen3_moe", {"num_local_experts": None}, "num_experts"),
        ("qwen3_moe", {"moe_intermediate_size": None}, "moe_intermediate_size"),
        ("gpt_oss", {"rope_parameters": None}, "rope_scaling"),
        ("gpt_oss", {"layer_types": ["chunked_attention"] * 4}, "layer_types"),
        ("gpt_oss", {"num_experts_per_tok": None}, "num_experts_per_tok"),
    ],
)
def test_refused(family: str, changes: Changes, named: str, target_path: Callable[..., Path]) -> None:
    config = json.loads((target_path(family) / "config.json").read_text())
    with pytest.raises(ValueError, match=named):
        targets[tiny.FAMILIES[family].registered].from_config({**config, **changes})


@pytest.mark.parametrize(
    ("family", "name", "shape"),
    [
        ("qwen3_moe", "model.layers.2.mlp.experts.3.up_proj.weight", (32, 63)),
        ("qwen3_moe", "model.layers.2.mlp.experts.1.down_proj.weight", (32, 64)),
        ("qwen3_moe", "model.layers.1.mlp.experts.2.gate_proj.weight", None),
        ("gpt_oss", "model.layers.2.mlp.experts.gate_up_proj", (4, 256, 64)),
        ("gpt_oss", "model.layers.2.mlp.experts.gate_up_proj", (4, 64, 255)),
        ("gpt_oss", "model.layers.2.mlp.experts.gate_up_proj", (4,)),
        ("gpt_oss", "model.layers.1.mlp.experts.gate_up_proj_bias", (4, 128)),
        ("gpt_oss", "model.layers.1.mlp.experts.down_proj", (4, 64, 128)),
        ("gpt_oss", "model.layers.0.mlp.experts.down_proj_bias", None),
        ("gpt_oss", "model.layers.0.mlp.router.bias", (5,)),
        ("gpt_oss", "model.layers.3.self_attn.sinks", (3,)),
    ],
)
def test_a_tensor_that_is_missing_or_misshapen_is_named(
    family: str, name: str, shape: tuple[int, ...] | None, target_path: Callable[..., Path], tmp_path: Path
) -> None:
    path = target_path(family)
    tensors = load_file(path / "model.safetensors")
    del tensors[name]
    if shape is not None:
        tensors[name] = torch.zeros(shape)
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((path / "config.json").read_text())
    with pytest.raises(ValueError, match=name.replace(".", r"\.")):
        load_target(tmp_path)
