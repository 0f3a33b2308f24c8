"""DeepSeek beyond the golden tests: other settings, old spellings, what is refused, and V3's own MTP modules."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
import transformers
from harness import Harness, load_target, prompt_work
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel

from outrider.engine.cache import Cache
from outrider.engine.request import Request
from outrider.engine.runner import exact_shape
from outrider.kernels import native_library
from outrider.layers.mla import LatentShape
from outrider.layers.moe import MixtureMLP
from outrider.layers.mtp import MtpModule
from outrider.models.base import Mtp, Target, targets
from outrider.sampling_params import SamplingParams

FAMILIES = [family for family in tiny.FAMILIES if family.startswith("deepseek")]
PROMPT = [7, 91, 30, 205, 18, 44, 130, 9, 9, 61, 250, 77, 3, 158, 99, 12, 201, 66, 35, 140, 5, 222, 87, 19]
NUM_LAYERS = 3


def settings(family: str, **overrides: Any) -> dict[str, Any]:
    return {**tiny.COMMON, **tiny.FAMILIES[family].settings, **overrides}


def build(family: str, **overrides: Any) -> Target:
    return targets[tiny.FAMILIES[family].registered](settings(family, **overrides))


def edit_config(path: Path, **changes: Any) -> None:
    config = json.loads((path / "config.json").read_text())
    config = {key: value for key, value in {**config, **changes}.items() if value is not ...}
    (path / "config.json").write_text(json.dumps(config))


def logits_of(path: Path) -> Tensor:
    return Harness(load_target(path)).run([PROMPT], 7)[0][0]


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        ("deepseek_v3", {"n_group": 1, "topk_group": 1}),  # Kimi K2, Moonlight
        ("deepseek_v3", {"first_k_dense_replace": 0, "rope_interleave": False}),
        ("deepseek_v3", {"first_k_dense_replace": 4, "attention_bias": True}),
        ("deepseek_v3_no_yarn", {"tie_word_embeddings": True, "rope_interleave": True}),
        ("deepseek_v2", {"topk_method": "greedy", "n_group": None, "topk_group": None, "n_shared_experts": 1}),
        ("deepseek_v2_lite", {"attention_bias": True, "tie_word_embeddings": True}),
    ],
)
def test_other_settings(family: str, overrides: dict[str, Any], target_path: Callable[..., Path]) -> None:
    with torch.no_grad():
        expected = tiny.reference(family, **overrides)(input_ids=torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(logits_of(target_path(family, **overrides)), expected, atol=1e-4, rtol=0)


@pytest.mark.skipif(native_library.library() is None, reason="no C compiler, so no native kernels")
@pytest.mark.parametrize("family", FAMILIES)
def test_logits_do_not_depend_on_the_rows_beside(family: str, target_path: Callable[..., Path]) -> None:
    target = load_target(target_path(family))
    prompts = [PROMPT, PROMPT[5:10], PROMPT[::-1][:17]]
    alone = [Harness(target).run([prompt], 64)[0] for prompt in prompts]
    for chunk in (64, 6, 1):
        for (logits, taps), (expected, expected_taps) in zip(Harness(target).run(prompts, chunk), alone, strict=True):
            assert torch.equal(logits, expected)
            assert torch.equal(taps, expected_taps)


def test_published_configs_are_spelt_the_old_way(tmp_path: Path) -> None:
    for family, routing in (
        ("deepseek_v2", {"scoring_func": "softmax", "seq_aux": True, "aux_loss_alpha": 0.001}),
        ("deepseek_v3", {"scoring_func": "sigmoid", "topk_method": "noaux_tc", "ep_size": 1}),
    ):
        path = tiny.save_target(tmp_path / family, family)
        expected = logits_of(path)
        rope = {("type" if key == "rope_type" else key): value for key, value in tiny.DEEPSEEK_YARN.items()}
        theta = rope.pop("rope_theta")
        edit_config(path, rope_parameters=..., rope_theta=theta, rope_scaling=rope, moe_layer_freq=1, **routing)
        assert torch.equal(logits_of(path), expected)


def test_scale_of_the_published_v3() -> None:
    yarn = {"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 1.0}
    dims = {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64}
    assert LatentShape.from_config(settings("deepseek_v3", rope_parameters=None, **dims)).scale == 192**-0.5
    scale = LatentShape.from_config(settings("deepseek_v3", rope_parameters=None, rope_scaling=yarn, **dims)).scale
    assert scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)


def test_an_mlp_for_all_rows_is_optional() -> None:
    target = build("deepseek_v3", n_shared_experts=None)
    mixture = next(module for module in target.modules() if isinstance(module, MixtureMLP))
    assert mixture.shared is None
    assert target.weights().keys() == dict(target.named_parameters()).keys()


@pytest.mark.parametrize(
    ("family", "key", "value"),
    [
        ("deepseek_v2", "topk_method", "noaux_tc"),
        ("deepseek_v2", "scoring_func", "sigmoid"),
        ("deepseek_v2", "norm_topk_prob", True),
        ("deepseek_v3", "topk_method", "group_limited_greedy"),
        ("deepseek_v3", "scoring_func", "softmax"),
        ("deepseek_v3", "mlp_bias", True),
        *(
            (family, key, value)
            for family in ("deepseek_v2", "deepseek_v3")
            for key, value in (
                ("moe_layer_freq", 2),
                ("hidden_act", "gelu"),
                ("num_key_value_heads", 2),
                ("partial_rotary_factor", 0.5),
                ("topk_group", 9),
                ("n_group", 5),
                ("kv_lora_rank", None),
                ("first_k_dense_replace", None),
            )
        ),
    ],
)
def test_refused_by_name(family: str, key: str, value: Any) -> None:
    with pytest.raises(ValueError, match=key):
        build(family, **{key: value})


def test_groups_of_one_expert_are_refused() -> None:
    with pytest.raises(ValueError, match="n_group"):
        build("deepseek_v3", n_group=16, topk_group=4)


@pytest.mark.parametrize("name", ["q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"])
def test_a_misshapen_tensor_is_named(name: str, tmp_path: Path) -> None:
    path = tiny.save_target(tmp_path, "deepseek_v3")
    tensors = load_file(path / "model.safetensors")
    key = f"model.layers.1.self_attn.{name}.weight"
    for wrong in (tensors[key][:-2].clone(), torch.cat([tensors[key], tensors[key][:2]])):
        save_file({**tensors, key: wrong}, path / "model.safetensors")
        with pytest.raises(ValueError, match=name):
            load_target(path)


# ---- multi-token prediction ----


def save_with_modules(directory: Path, num_modules: int, family: str = "deepseek_v3") -> Path:
    """A target of NUM_LAYERS and modules after them: a module's block is one more layer, with a few tensors around."""
    path = tiny.save_target(directory, family, num_hidden_layers=NUM_LAYERS + num_modules)
    tensors = load_file(path / "model.safetensors")
    generator = torch.Generator().manual_seed(8)
    for number in range(NUM_LAYERS, NUM_LAYERS + num_modules):
        source = f"model.layers.{number}."
        for name in ("enorm", "hnorm", "shared_head.norm"):
            tensors[f"{source}{name}.weight"] = 1 + 0.3 * torch.randn(64, generator=generator)
        tensors[f"{source}eh_proj.weight"] = 0.15 * torch.randn(64, 128, generator=generator)
        tensors[f"{source}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors[f"{source}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    edit_config(path, num_hidden_layers=NUM_LAYERS, num_nextn_predict_layers=num_modules)
    return path


def load_module(mtp: Mtp, number: int, path: Path) -> MtpModule:
    module = mtp.build(number)
    parameters, weights = dict(module.named_parameters()), mtp.weights(number, module)
    assert weights.keys() == parameters.keys()
    tensors = load_file(path / "model.safetensors")
    with torch.no_grad():
        for name, weight in weights.items():
            parts = [tensors[source] for source in weight.names]
            value = weight.combine(parts) if weight.combine is not None else torch.cat(parts)
            assert value.shape == parameters[name].shape, name
            parameters[name].copy_(value)
    return module


@torch.inference_mode()
def run_modules(target: Target, modules: list[MtpModule], chunk: int) -> list[Tensor]:
    """What each module gives, after its norm [n, H]; module k sees token p + 1 + k beside row p."""
    harness = Harness(target)
    Cache(harness.cache.shape, [nn.ModuleList(modules)], torch.device("cpu"), torch.float32)  # binds their pages
    num_rows = len(PROMPT) - len(modules)
    harness.cache.admit(0, PROMPT, [])
    harness.cache.set_pages(0, 0, harness.pages[0])
    request = Request("0", PROMPT, SamplingParams(), seed=0, slot=0)
    found: list[list[Tensor]] = [[] for _ in modules]
    for start in range(0, num_rows, chunk):
        count = min(chunk, num_rows - start)
        plan = [prompt_work(request, start, count, emits=True)]
        step = harness.runner.pack(plan, exact_shape(plan, 0))
        hidden = target.norm(target(step.batch).last)
        harness.cache.state.computed[0] += count
        for number, module in enumerate(modules):
            following = torch.tensor(PROMPT[start + 1 + number : start + 1 + number + count])
            hidden = module.norm(module(target.embed(following), hidden, step.batch))
            found[number].append(hidden)
    return [torch.cat(parts) for parts in found]


@torch.no_grad()
def reference_modules(path: Path, num_modules: int) -> list[Tensor]:
    """The same by transformers' own modules, read from the same files by its own names."""
    model = transformers.DeepseekV3ForCausalLM.from_pretrained(path)
    model._keys_to_ignore_on_load_unexpected = [rf"model\.layers\.{NUM_LAYERS + k}\..*" for k in range(num_modules)]
    modules = MtpModel.from_pretrained(model, device_map={"": "cpu"})
    cache = MtpCache(config=model.config.get_mtp_config())
    num_rows = len(PROMPT) - num_modules
    hidden = model.model(input_ids=torch.tensor([PROMPT[:num_rows]])).last_hidden_state
    found = []
    for number in range(num_modules):
        ahead = number + 1
        ids, positions = torch.tensor([PROMPT[ahead : ahead + num_rows]]), torch.arange(ahead, ahead + num_rows)[None]
        hidden = modules.forward_layer(number, hidden, positions, cache, input_ids=ids)
        found.append(hidden[0])
    return found


@pytest.mark.parametrize("chunk", [100, 7, 1])
@pytest.mark.parametrize("num_modules", [1, 2])
def test_mtp_modules_give_what_transformers_gives(num_modules: int, chunk: int, tmp_path: Path, kernels: str) -> None:
    path = save_with_modules(tmp_path, num_modules)
    target = load_target(path)
    mtp = target.mtp
    assert mtp is not None
    assert (mtp.num_modules, mtp.reads_normed, mtp.feeds_normed, mtp.chained) == (num_modules, True, True, True)
    modules = [load_module(mtp, number, path) for number in range(num_modules)]
    assert all(module.head is None and module.embed is None for module in modules), "they are the target's"
    expected = reference_modules(path, num_modules)
    for found, each in zip(run_modules(target, modules, chunk), expected, strict=True):
        assert each.std() > 0.3
        torch.testing.assert_close(found, each, atol=1e-4, rtol=0)


def test_the_target_takes_no_notice_of_its_modules(tmp_path: Path) -> None:
    path = save_with_modules(tmp_path / "with", 1)
    expected = logits_of(path)
    tensors = load_file(path / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"model.layers.{NUM_LAYERS}.")}
    assert len(kept) < len(tensors)
    save_file(kept, path / "model.safetensors")
    assert torch.equal(logits_of(path), expected)


def test_modules_that_the_config_does_not_know_are_an_error(tmp_path: Path) -> None:
    path = save_with_modules(tmp_path, 2)
    edit_config(path, num_nextn_predict_layers=1)
    with pytest.raises(ValueError, match=rf"nothing uses, tensor model\.layers\.{NUM_LAYERS + 1}\."):
        load_target(path)


def test_no_modules() -> None:
    assert build("deepseek_v3", num_nextn_predict_layers=0).mtp is None
    assert build("deepseek_v3").mtp is None, "the config says nothing of modules"
    assert build("deepseek_v2").mtp is None
