"""EAGLE-1 heads against the slow reference, for every option and spelling, with accepted and rejected drafts."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import eagle_reference as slow
import pytest
import tiny
import torch
from eagle3_reference import target_streams
from rounds import check_logits, check_rounds
from samples import drafter_settings

from outrider import LLM, SamplingParams

TargetPath = Callable[..., Path]
LAST = {family: tiny.FAMILIES[family].settings.get("num_hidden_layers", 4) for family in ("llama", "qwen3")}
# name: (options of the tensors, keys of config.json, what the reference must know)
OPTIONS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "plain": ({}, {}, {}),
    "biases": ({"fc_bias": True, "attention_bias": True}, {"bias": True, "qkv_bias": True}, {}),
    "two_layers": ({"num_layers": 2}, {"num_hidden_layers": 2}, {"num_layers": 2}),
    "own_embedding_and_head": ({"own_embedding": True, "own_head": True}, {}, {}),
    "norms_fed_back": ({"norms": True}, {"use_last_layernorm": True}, {}),
    "norms_for_the_head_only": ({"norms": True}, {"norm_output": False}, {"feeds_normed": False}),
    "logit_scale": ({}, {"logit_scale": 0.5}, {"logit_scale": 0.5}),
}


def reference(head: slow.EagleHead, family: str = "llama") -> Callable[[list[int], int], Any]:
    weights = tiny.reference(family)
    embed = head.tensors.get("embed_tokens.weight", weights.model.embed_tokens.weight.detach())
    lm_head = head.tensors.get("lm_head.weight", weights.lm_head.weight.detach())

    def expected(text: list[int], count: int) -> tuple[list[int], list[torch.Tensor]]:
        states = target_streams(family, text[:-1], [LAST[family]], post_norm=True)[:, 0]
        return slow.draft(head, text, states, embed, lm_head, count)

    return expected


@pytest.mark.parametrize("name", OPTIONS)
def test_drafts_equal_the_slow_reference(name: str, target_path: TargetPath, tmp_path: Path) -> None:
    options, config, known = OPTIONS[name]
    tensors = tiny.eagle_tensors(**options)
    settings = {"method": "eagle", "model": str(tiny.save_eagle(tmp_path, tensors, **config))}
    expected = reference(slow.EagleHead(tensors, **known))
    check_rounds(target_path("llama"), settings, expected)
    check_logits(target_path("llama"), settings, expected)


def dialects(tensors: dict[str, torch.Tensor]) -> dict[str, tuple[dict[str, torch.Tensor], dict[str, Any]]]:
    """The same head, with all norms, as each community would publish it."""

    def renamed(**prefixes: str) -> dict[str, torch.Tensor]:
        spelt = {}
        for name, tensor in tensors.items():
            found = next((old for old in prefixes if name.startswith(old.replace("__", "."))), None)
            spelt[name if found is None else prefixes[found] + name.removeprefix(found.replace("__", "."))] = tensor
        return spelt

    flat = tiny.eagle_config()
    layer = {key: flat.pop(key) for key in list(flat) if key not in ("architectures", "bias")}
    speculators = {
        "architectures": ["EagleSpeculator"],
        "speculators_model_type": "eagle",
        "transformer_layer_config": layer,
        "layernorms": True,
        "fusion_bias": False,
        "norm_output": True,
    }
    first = renamed(embedding_norm="embedding_layernorm", fc="fusion_fc", norm="pre_lm_head_layernorm")
    return {
        "original": (
            renamed(
                embedding_norm="embed_layernorm",
                norm="lm_head_layernorm",
                layers__0__input_layernorm="hidden_layernorm",
            ),
            tiny.eagle_config(norm_output=True),
        ),
        "prefixed": (
            {f"model.{name}": tensor for name, tensor in tensors.items()},
            tiny.eagle_config(architectures=["LlamaForCausalLMEagle"]),
        ),
        "modelopt": (
            renamed(layers__0__="midlayer."),
            tiny.eagle_config(
                architectures=["LlamaForCausalLMEagle"],
                eagle_config={"use_last_layernorm": True, "use_input_layernorm_in_first_layer": True},
            ),
        ),
        "speculators": (
            {name.replace("layers.0.", "transformer."): tensor for name, tensor in first.items()},
            speculators,
        ),
    }


def test_every_dialect_is_the_same_head(target_path: TargetPath, tmp_path: Path) -> None:
    tensors = tiny.eagle_tensors(norms=True)
    params = SamplingParams(max_tokens=20, temperature=0, ignore_eos=True, trace=True)
    traces = {}
    for name, (stored, config) in dialects(tensors).items():
        path = tiny.save_head(tmp_path / name, stored, config)
        with LLM(target_path("llama"), {"model": str(path)}, max_model_len=128) as llm:
            assert type(llm.drafter).__name__ == "Eagle"
            traces[name] = llm.generate([[3, 4, 5, 6]], params)[0].outputs[0].trace
    assert all(trace == traces["original"] for trace in traces.values())


def test_an_embedding_that_is_the_targets_is_not_kept_twice(target_path: TargetPath, tmp_path: Path) -> None:
    tensors = tiny.eagle_tensors(own_embedding=True)
    tensors["embed_tokens.weight"] = tiny.reference("llama").model.embed_tokens.weight.detach().clone()
    path = tiny.save_eagle(tmp_path, tensors)
    with LLM(target_path("llama"), {"method": "eagle", "model": str(path)}, max_model_len=64) as llm:
        assert llm.drafter is not None
        assert not any(name.startswith("network.embed.") for name, _ in llm.drafter.named_parameters())


def test_readings_change_what_is_meant(target_path: TargetPath, tmp_path: Path) -> None:
    path = tiny.save_eagle(tmp_path, tiny.eagle_tensors(norms=True))
    with LLM(target_path("llama"), {"method": "eagle", "model": str(path)}, max_model_len=64) as llm:
        assert llm.drafter is not None
        readings = {reading.name: reading.apply(llm.drafter) for reading in llm.drafter.readings()}
        assert readings["norm_output false"].config.feeds_normed is False  # type: ignore[union-attr]
        assert readings["state before the target's final norm"].config.reads_normed is False  # type: ignore[union-attr]
        assert llm.drafter.config.feeds_normed is True  # type: ignore[union-attr]
        assert llm.drafter.provenance()["norm_output"].source.endswith("ambiguous")


BROKEN = {
    "bias": ({}, {"bias": True}, "bias says True, but the tensors say False"),
    "norm": ({}, {"use_last_layernorm": True}, r"use_last_layernorm says True.*norm\.weight"),
    "surplus": ({"mystery.weight": torch.zeros(3)}, {}, r"mystery\.weight"),
    "misshapen": ({"fc.weight": torch.zeros(64, 192)}, {}, r"fc\.weight has shape"),
    "other target": ({}, {"hidden_size": 128}, "hidden_size is 128, the target's 64"),
    "activation": ({}, {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
    "two of a kind": ({"model.fc.weight": torch.zeros(64, 128)}, {}, r"fc\.weight"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_is_broken_is_named(name: str, target_path: TargetPath, tmp_path: Path) -> None:
    more, config, message = BROKEN[name]
    path = tiny.save_eagle(tmp_path, {**tiny.eagle_tensors(), **more}, **config)
    with pytest.raises(ValueError, match=message):
        LLM(target_path("llama"), {"method": "eagle", "model": str(path)}, max_model_len=64)


def test_a_missing_tensor_and_a_missing_model_are_named(target_path: TargetPath, tmp_path: Path) -> None:
    tensors = tiny.eagle_tensors()
    del tensors["layers.0.mlp.up_proj.weight"]
    path = tiny.save_eagle(tmp_path, tensors)
    with pytest.raises(ValueError, match=r"lacks tensor layers\.0\.mlp\.up_proj\.weight"):
        LLM(target_path("llama"), {"method": "eagle", "model": str(path)}, max_model_len=64)
    with pytest.raises(ValueError, match='method eagle needs "model"'):
        LLM(target_path("llama"), {"method": "eagle"}, max_model_len=64)


@pytest.mark.parametrize("method", ["eagle", "eagle3"])
def test_company_does_not_change_a_requests_drafts(method: str, target_path: TargetPath, tmp_path: Path) -> None:
    """Requests that come and go between rounds, in other slots and another order: each drafts as it does alone."""
    path = target_path("llama")
    settings = {**drafter_settings(method, tmp_path, target_path, "llama"), "adaptive": False}
    prompts = [list(range(start, start + 3 + start % 5)) for start in (3, 40, 77, 111, 150, 190)]
    params = [
        SamplingParams(max_tokens=8 + 5 * (number % 3), temperature=0, ignore_eos=True, trace=True)
        for number in range(len(prompts))
    ]
    small: dict[str, Any] = {"max_model_len": 64, "page_size": 4, "enable_prefix_caching": False}
    with LLM(path, settings, max_num_seqs=1, **small) as llm:
        alone = [output.outputs[0].trace for output in llm.generate(prompts, params)]
    with LLM(path, settings, max_num_seqs=3, max_num_batched_tokens=20, **small) as llm:
        together = [output.outputs[0].trace for output in llm.generate(prompts[::-1], params[::-1])]
    assert together[::-1] == alone
