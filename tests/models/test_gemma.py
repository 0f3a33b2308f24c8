"""What the golden tests do not see of Gemma: dialects of config.json and of tensor names, defaults, refusals."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from harness import Harness, load_target
from safetensors.torch import load_file, save_file

from outrider.layers.attention import SelfAttention
from outrider.layers.cached import cached_layers
from outrider.layers.sandwich import SandwichBlock
from outrider.models.base import Target
from outrider.models.gemma3 import Gemma3
from outrider.models.gemma4 import Gemma4

PROMPT = torch.randint(3, 249, (30,), generator=torch.Generator().manual_seed(5)).tolist()
FULL, SLIDING = "full_attention", "sliding_attention"
Json = dict[str, Any]
MakeTarget = Callable[..., Path]


def rewrite(
    source: Path,
    directory: Path,
    edit: Callable[[Json], Json] = lambda config: config,
    rename: Callable[[str], str] = lambda name: name,
) -> Path:
    """A checkpoint with another config.json and other tensor names."""
    directory.mkdir(exist_ok=True)
    config = edit(json.loads((source / "config.json").read_text()))
    (directory / "config.json").write_text(json.dumps(config))
    tensors = load_file(source / "model.safetensors")
    save_file({rename(name): tensor for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def logits(path: Path, prompt: list[int] = PROMPT) -> torch.Tensor:
    ((found, _),) = Harness(load_target(path)).run([prompt], 100)
    return found


def block(target: Target, number: int) -> SandwichBlock:
    found = target.layers[number]
    assert isinstance(found, SandwichBlock)
    return found


def settings(family: str, **changes: Any) -> Json:
    kind = tiny.FAMILIES[family]
    return {**tiny.COMMON, **kind.settings, "architectures": [kind.model], **changes}


def test_gemma3_as_older_configs_spell_it(target_path: MakeTarget, tmp_path: Path) -> None:
    full = {"rope_type": "linear", "rope_theta": 2e5, "factor": 8.0}
    sliding = {"rope_type": "default", "rope_theta": 5e3}
    path = target_path(
        "gemma3", layer_types=[SLIDING, SLIDING, FULL] * 2, rope_parameters={FULL: full, SLIDING: sliding}
    )

    def older(config: Json) -> Json:
        del config["layer_types"], config["rope_parameters"], config["tie_word_embeddings"]
        ropes = {"rope_theta": 2e5, "rope_local_base_freq": 5e3, "rope_scaling": {"type": "linear", "factor": 8.0}}
        return {**config, **ropes, "sliding_window_pattern": 3}

    assert torch.equal(logits(rewrite(path, tmp_path, older)), logits(path))


def test_gemma3_without_what_equals_the_defaults(target_path: MakeTarget, tmp_path: Path) -> None:
    ropes = {FULL: {"rope_type": "default", "rope_theta": 1e6}, SLIDING: {"rope_type": "default", "rope_theta": 1e4}}
    path = target_path("gemma3", rope_parameters=ropes, rms_norm_eps=1e-6, query_pre_attn_scalar=256)

    def shorter(config: Json) -> Json:
        left_out = ("rope_parameters", "rms_norm_eps", "query_pre_attn_scalar", "layer_types", "hidden_activation")
        return {key: value for key, value in config.items() if key not in (*left_out, "tie_word_embeddings")}

    assert torch.equal(logits(rewrite(path, tmp_path, shorter)), logits(path))


def test_a_published_config_that_says_little() -> None:
    """Gemma 3 4B names only what differs from the family's defaults."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    with torch.device("meta"):
        target = Gemma3({"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text, "vision_config": {}})
    assert (target.vocab_size, target.max_len, target.embed.scale) == (262208, 131072, 2560**0.5)
    assert target.head.weight is target.embed.weight
    attentions = [block(target, number).attention for number in range(34)]
    shapes = [attention.shape for attention in attentions if isinstance(attention, SelfAttention)]
    assert [shape.window for shape in shapes] == ([1024] * 5 + [0]) * 5 + [1024] * 4
    assert (shapes[0].num_heads, shapes[0].num_kv_heads, shapes[0].head_dim, shapes[0].scale) == (8, 4, 256, 1 / 16)


def test_gemma4_as_published_configs_spell_it(target_path: MakeTarget, tmp_path: Path) -> None:
    for family, kv_heads in (("gemma4", None), ("gemma4_moe", 1), ("gemma4_dense", 1)):
        path = target_path(family)

        def published(config: Json, kv_heads: int | None = kv_heads) -> Json:
            assert "per_layer_config" in config
            del config["per_layer_config"], config["rope_parameters"]
            return {**config, "global_head_dim": 32, "num_global_key_value_heads": kv_heads}

        assert torch.equal(logits(rewrite(path, tmp_path / family, published)), logits(path)), family


def language_model_last(name: str) -> str:
    """Names of older multimodal files -> those of newer ones."""
    name = re.sub(r"^language_model\.model\.", "model.language_model.", name)
    return re.sub(r"^(vision_tower|multi_modal_projector)\.", r"model.\1.", name)


def language_model_first(name: str) -> str:
    return re.sub(r"^model\.language_model\.", "language_model.model.", name).replace(
        "lm_head", "language_model.lm_head"
    )


@pytest.mark.parametrize(
    ("family", "rename"), [("gemma3_vision", language_model_last), ("gemma4_vision", language_model_first)]
)
@pytest.mark.parametrize("tied", [True, False])
def test_both_orders_of_nested_names(
    family: str, rename: Callable[[str], str], tied: bool, target_path: MakeTarget, tmp_path: Path
) -> None:
    path = target_path(family, tie_word_embeddings=tied)
    names = set(load_file(path / "model.safetensors"))
    assert {rename(name) for name in names} != names
    assert torch.equal(logits(rewrite(path, tmp_path, rename=rename)), logits(path))


@pytest.mark.parametrize(
    ("family", "architecture"), [("gemma3_vision", "Gemma3ForCausalLM"), ("gemma4_vision", "Gemma4ForCausalLM")]
)
def test_the_text_part_by_itself(family: str, architecture: str, target_path: MakeTarget, tmp_path: Path) -> None:
    path = target_path(family)

    def flat(config: Json) -> Json:
        return {**config["text_config"], "architectures": [architecture]}

    def rename(name: str) -> str:
        return re.sub(r"^(model\.language_model|language_model\.model)\.", "model.", name)

    assert torch.equal(logits(rewrite(path, tmp_path, flat, rename)), logits(path))


def test_a_place_for_an_image_is_looked_up_as_padding(target_path: MakeTarget) -> None:
    prompt = [*PROMPT[:5], 250, *PROMPT[5:9], 251, 252]
    with torch.no_grad():
        expected = tiny.reference("gemma4_vision")(input_ids=torch.tensor([prompt])).logits[0]
    found = logits(target_path("gemma4_vision"), prompt)
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    padded = [0 if token >= 250 else token for token in prompt]
    assert torch.equal(found, logits(target_path("gemma4_vision"), padded))


def test_layers_that_share_remember_nothing(target_path: MakeTarget) -> None:
    target = load_target(target_path("gemma4"))
    assert len(cached_layers(target)) == 4
    assert target.num_layers == 6
    assert len(list(target.parameters())) == len(target.weights())


def test_keys_and_values_of_layers_that_share_may_be_on_disk(target_path: MakeTarget, tmp_path: Path) -> None:
    path = target_path("gemma4")
    rewrite(path, tmp_path)
    tensors = load_file(path / "model.safetensors")
    for part in ("k_proj", "v_proj", "k_norm"):
        name = f"model.layers.%d.self_attn.{part}.weight"
        tensors |= {name % 4: tensors[name % 3].clone(), name % 5: tensors[name % 1].clone()}
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(logits(tmp_path), logits(path))
    tensors["model.layers.3.self_attn.v_norm.weight"] = torch.ones(16)  # of a layer that has its own
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"layers\.3\.self_attn\.v_norm"):
        load_target(tmp_path)


ROPE = {"rope_type": "default", "rope_theta": 1e4}
REFUSED: list[tuple[str, Json, str]] = [
    ("gemma3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("gemma3", {"use_bidirectional_attention": True}, "use_bidirectional_attention"),
    ("gemma3", {"hidden_activation": "relu"}, "hidden_activation"),
    ("gemma3", {"layer_types": [FULL]}, "layer_types"),
    ("gemma3", {"layer_types": ["chunked_attention"] * 6}, "layer_types"),
    ("gemma3", {"sliding_window": None}, "sliding_window"),
    ("gemma3", {"head_dim": None}, "head_dim"),
    ("gemma3", {"rope_parameters": ROPE}, "rope_parameters"),
    ("gemma3", {"rope_parameters": {FULL: {**ROPE, "rope_type": "longrope"}}}, "longrope"),
    ("gemma3", {"rope_parameters": {FULL: {**ROPE, "partial_rotary_factor": 0.5}}}, "partial_rotary_factor"),
    ("gemma3", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
    ("gemma4", {"use_bidirectional_attention": "all"}, "use_bidirectional_attention"),
    ("gemma4", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping"),
    ("gemma4", {"hidden_activation": "relu"}, "hidden_activation"),
    ("gemma4", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}}, "rope_scaling"),
    ("gemma4", {"rope_theta": 1e6}, "rope_theta"),
    ("gemma4", {"rope_parameters": {FULL: ROPE}}, SLIDING),
    ("gemma4", {"layer_types": None, "sliding_window_pattern": 3}, "sliding_window_pattern"),
    ("gemma4", {"num_kv_shared_layers": 4}, "num_kv_shared_layers"),
    ("gemma4", {"num_kv_shared_layers": 6}, "num_kv_shared_layers"),
    ("gemma4", {"vocab_size_per_layer_input": 255}, "vocab_size_per_layer_input"),
    ("gemma4", {"per_layer_config": {"2": {"intermediate_size": 64}}}, "intermediate_size"),
    ("gemma4", {"per_layer_config": {"2": {"head_dim": 32}}}, "per_layer_config"),
    ("gemma4_moe", {"num_experts": None}, "num_experts"),
    ("gemma4_moe", {"top_k_experts": None}, "top_k_experts"),
    ("gemma4_moe", {"moe_intermediate_size": None}, "moe_intermediate_size"),
]


@pytest.mark.parametrize(("family", "changes", "named"), REFUSED, ids=lambda value: str(value))
def test_what_is_not_built_is_refused_by_name(family: str, changes: Json, named: str) -> None:
    build = Gemma3 if family == "gemma3" else Gemma4
    build(settings(family))
    with pytest.raises(ValueError, match=named):
        build(settings(family, **changes))
