"""EAGLE-3 against the slow reference, for every option, over generations with accepted and rejected drafts."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import eagle3_reference as slow
import pytest
import tiny
import torch
from safetensors.torch import save_file

from outrider import LLM, SamplingParams

TAPS = [1, 2, 4]
# name: (options of the tensors, keys of config.json, number of taps, hidden size, draft vocabulary)
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "reduced_vocabulary": {"draft_vocab": 96},
    "fc_norm": {"fc_norm": True, "norm_output": True},
    "norm_before_fc": {"norm_before_fc": True},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_output": {"norm_output": True},
    "two_layers": {"num_layers": 2},
    "own_embedding_other_size": {"own_embedding": True, "hidden": 32},
    "shared_head": {"own_head": False},
    "one_tap": {"taps": [3]},
    "five_taps_with_embedding": {"taps": [0, 1, 2, 3, 4]},
    "qwen3_norms_and_biases": {"head_norm": True, "attention_bias": True},
    "logit_scale": {"logit_scale": 0.5, "draft_vocab": 128},
    "last_hidden_alone": {"use_aux_hidden_state": False, "taps": [4]},
}


def make(directory: Path, options: dict[str, Any]) -> tuple[Path, slow.Head]:
    hidden, draft_vocab = options.get("hidden", 64), options.get("draft_vocab", tiny.VOCAB)
    taps = options.get("taps", TAPS)
    extras = {key: value for key, value in options.items() if key not in ("hidden", "draft_vocab")}
    tensors = tiny.eagle3_tensors(hidden, 64, len(taps), draft_vocab, **extras)
    if options.get("use_aux_hidden_state") is False:
        del tensors["fc.weight"]
    flags = ("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual", "logit_scale", "use_aux_hidden_state")
    config = {key: options[key] for key in (*flags, "attention_bias") if key in options}
    path = tiny.save_eagle3(
        directory,
        tensors,
        hidden=hidden,
        draft_vocab=draft_vocab,
        num_hidden_layers=options.get("num_layers", 1),
        eagle_aux_hidden_state_layer_ids=taps,
        target_hidden_size=64,
        **config,
    )
    head = slow.Head(tensors, num_layers=options.get("num_layers", 1), use_taps="use_aux_hidden_state" not in options)
    settings = {key: options[key] for key in flags[:5] if key in options}
    return path, replace(head, **settings)


def target_streams(family: str, tokens: list[int], taps: list[int], *, post_norm: bool = False) -> torch.Tensor:
    """[n, k, H] from transformers."""
    model = tiny.reference(family)
    with torch.no_grad():
        states = model(input_ids=torch.tensor([tokens]), output_hidden_states=True).hidden_states
    streams = [*states[:-1], None]  # the last one of transformers comes after the final norm
    kept: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: kept.append(args[0]))
    with torch.no_grad():
        model(input_ids=torch.tensor([tokens]))
    hook.remove()
    streams[-1] = states[-1] if post_norm else kept[0]
    return torch.stack([streams[tap][0] for tap in taps], dim=1)


@pytest.mark.parametrize("name", OPTIONS)
def test_drafts_equal_the_slow_reference(name: str, target_path: Callable[..., Path], tmp_path: Path) -> None:
    options = OPTIONS[name]
    path, head = make(tmp_path / "head", options)
    weights = tiny.reference("llama")
    embed = head.tensors.get("embed_tokens.weight", weights.model.embed_tokens.weight.detach())
    lm_head = head.tensors.get("lm_head.weight", weights.lm_head.weight.detach())
    prompts = [[7, 8, 9, 10, 11, 12, 13], [50, 60, 70]]
    params = SamplingParams(max_tokens=70, temperature=0, ignore_eos=True, trace=True)
    settings = {"method": "eagle3", "model": str(path), "num_speculative_tokens": 3}
    with LLM(target_path("llama"), settings, max_model_len=160, page_size=4) as llm:
        outputs = llm.generate(prompts, params)
    rejected = 0
    for prompt, output in zip(prompts, outputs, strict=True):
        completion = output.outputs[0]
        tokens = prompt + completion.token_ids
        streams = target_streams("llama", tokens, options.get("taps", TAPS), post_norm=not head.use_taps)
        length = len(prompt) + 1  # the first token comes from the prompt's own pass
        for entry in completion.trace or []:
            expected, _ = slow.draft(head, tokens[:length], streams[: length - 1], embed, lm_head, len(entry["draft"]))
            assert entry["draft"] == expected, f"{name}: after {length} tokens"
            rejected += entry["accepted"] < len(entry["draft"])
            length += entry["accepted"] + 1
        assert length >= len(prompt) + 60, "the run must pass the head's max_position_embeddings of 64"
    assert rejected > 10


def dialects(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]]:
    """The same head as each community would publish it."""
    flat = tiny.eagle3_config(draft_vocab=96, fc_norm=True, norm_output=True)
    del flat["eagle_aux_hidden_state_layer_ids"]
    layer_keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "rms_norm_eps")
    layer = {key: flat[key] for key in (*layer_keys, "num_key_value_heads", "rope_theta", "vocab_size")}
    midlayer = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    aux = ["aux_norm_low", "aux_norm_mid", "aux_norm_high"]
    old_norms = {
        name.replace("fc_norm.", "") if "fc_norm" not in name else f"{aux[int(name.split('.')[1])]}.weight": tensor
        for name, tensor in midlayer.items()
    }
    return {
        "yuhuili": (midlayer, {**flat, "eagle_aux_hidden_state_layer_ids": TAPS}),
        "with_llama_architecture": (
            midlayer,
            {**flat, "architectures": ["LlamaForCausalLM"], "eagle_aux_hidden_state_layer_ids": TAPS},
        ),
        "model_prefix": (
            {name if name in ("d2t", "t2d", "lm_head.weight") else f"model.{name}": t for name, t in tensors.items()},
            {**flat, "eagle_aux_hidden_state_layer_ids": TAPS},
        ),
        "sglang_aux_norm": (
            old_norms,
            {k: v for k, v in flat.items() if k != "fc_norm"}
            | {"use_aux_norm": True, "eagle_aux_hidden_state_layer_ids": TAPS},
        ),
        "modelopt": (
            tensors,
            {**flat, "eagle_config": {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in TAPS]}},
        ),
        "speculators": (
            tensors,
            {
                "architectures": ["Eagle3DraftModel"],
                "speculators_model_type": "eagle3",
                "transformer_layer_config": {"model_type": "llama", **layer},
                "draft_vocab_size": 96,
                "norm_before_residual": False,
                "fc_norm": True,
                "norm_output": True,
                "eagle_aux_hidden_state_layer_ids": TAPS,
            },
        ),
    }


def test_every_dialect_is_the_same_head(target_path: Callable[..., Path], tmp_path: Path) -> None:
    tensors = tiny.eagle3_tensors(64, 64, 3, 96, fc_norm=True)
    traces = {}
    for name, (stored, config) in dialects(tensors).items():
        directory = tmp_path / name
        directory.mkdir()
        save_file({key: tensor.contiguous() for key, tensor in stored.items()}, directory / "model.safetensors")
        (directory / "config.json").write_text(json.dumps(config))
        with LLM(target_path("llama"), {"model": str(directory)}, max_model_len=128) as llm:
            assert llm.drafter is not None
            assert llm.drafter.taps == tuple(TAPS)
            assert llm.drafter.provenance()["taps"].source != "default"
            params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True, trace=True)
            traces[name] = llm.generate([[3, 4, 5, 6]], params)[0].outputs[0].trace
    assert all(trace == traces["yuhuili"] for trace in traces.values()), traces.keys()


CONFLICTS = {
    "taps given twice": (
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4]}, "eagle_aux_hidden_state_layer_ids": TAPS},
        "twice and they differ",
    ),
    "tap out of range": ({"eagle_aux_hidden_state_layer_ids": [1, 2, 9]}, r"taps \[1, 2, 9\]"),
    "tap count": ({"num_aux_hidden_states": 4}, "num_aux_hidden_states is 4"),
    "fc width": ({"eagle_aux_hidden_state_layer_ids": [1, 2]}, "fc.weight takes 192 inputs"),
    "both norms": ({"fc_norm": True, "norm_before_fc": True}, "exclude each other"),
    "flag differs": ({"norm_before_fc": True, "eagle_config": {"norm_before_fc": False}}, "given twice and differs"),
    "target size": ({"target_hidden_size": 128}, "hidden size 128, this one has 64"),
    "bias": ({"attention_bias": True}, "attention_bias=True, but the tensors say False"),
    "vocabulary without map": ({"draft_vocab_size": 100}, "no d2t tensor"),
    "missing norm": ({"fc_norm": True}, "lacks tensor fc_norm.0.weight"),
    "misshapen": ({"intermediate_size": 100}, "gate_proj.weight"),
}


@pytest.mark.parametrize("name", CONFLICTS)
def test_what_contradicts_itself_is_refused(name: str, target_path: Callable[..., Path], tmp_path: Path) -> None:
    config, message = CONFLICTS[name]
    path = tiny.save_eagle3(tmp_path / "head", tiny.eagle3_tensors(64, 64, 3, tiny.VOCAB), **config)
    with pytest.raises(ValueError, match=message):
        LLM(target_path("llama"), {"method": "eagle3", "model": str(path)}, max_model_len=64)


def test_absolute_ids_in_d2t_are_refused(target_path: Callable[..., Path], tmp_path: Path) -> None:
    tensors = tiny.eagle3_tensors(64, 64, 3, 96)
    tensors["d2t"] = tensors["d2t"] + torch.arange(96)
    path = tiny.save_eagle3(tmp_path / "head", tensors, draft_vocab=96)
    with pytest.raises(ValueError, match="must hold offsets"):
        LLM(target_path("llama"), {"model": str(path)}, max_model_len=64)


def test_surplus_tensor_is_refused(target_path: Callable[..., Path], tmp_path: Path) -> None:
    tensors = tiny.eagle3_tensors(64, 64, 3, tiny.VOCAB) | {"mystery.weight": torch.zeros(3)}
    path = tiny.save_eagle3(tmp_path / "head", tensors)
    with pytest.raises(ValueError, match=r"mystery\.weight"):
        LLM(target_path("llama"), {"model": str(path)}, max_model_len=64)
