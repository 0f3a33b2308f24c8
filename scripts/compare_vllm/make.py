"""Writes the tiny checkpoints of every case, with the helpers that the tests use:
python scripts/compare_vllm/make.py DIRECTORY"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPOSITORY / "tests"), str(REPOSITORY / "tests" / "drafters")]

import samples  # noqa: E402
import tiny  # noqa: E402
import tiny_dflash  # noqa: E402
from mtp_checkpoints import with_modules  # noqa: E402
from sides import Case, save_cases  # noqa: E402
from tokenizers import Tokenizer  # noqa: E402

DEPTH = 4
PROMPTS = [[7, 8, 9, 10, 11, 12, 13, 14, 15], [50, 60, 70], [(37 * place + 11) % 200 + 3 for place in range(41)]]
# vLLM's attention on a CPU wants heads of 32 or more; eight layers, so that different layer ids are different layers
SIZES: dict[str, Any] = {"num_hidden_layers": 8, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
HEADS = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
TAPS = [1, 4, 7]

# name: options of the tensors and keys of config.json
EAGLE3: dict[str, dict[str, Any]] = {
    "plain": {},
    "default_taps": {"config": {"eagle_aux_hidden_state_layer_ids": None}},
    "reduced_vocabulary": {"draft_vocab": 96},
    "fc_norm": {"fc_norm": True},
    "fc_norm_norm_output": {"fc_norm": True, "norm_output": True},
    "norm_before_fc": {"norm_before_fc": True},
    "norm_before_residual": {"norm_before_residual": True},
    "norm_output": {"norm_output": True},
    "two_layers": {"num_layers": 2},
    "shared_head": {"own_head": False},
    "own_embedding": {"own_embedding": True},
    "one_tap": {"taps": [3], "config": {"num_aux_hidden_states": 1}},
    "five_taps": {"taps": [0, 2, 3, 5, 8], "config": {"num_aux_hidden_states": 5}},
    "attention_bias": {"attention_bias": True},
    "logit_scale": {"logit_scale": 0.5, "draft_vocab": 128},
    "last_hidden_alone": {"use_aux_hidden_state": False, "taps": [8]},
    "qwen3_head": {"head_norm": True, "config": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"}},
    "short_positions": {"config": {"max_position_embeddings": 64}},
}
FLAGS = ("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual", "logit_scale", "attention_bias")


def save_eagle3(directory: Path, options: dict[str, Any], rename: Callable[[str], str] = str) -> Path:
    taps, vocab = options.get("taps", TAPS), options.get("draft_vocab", tiny.VOCAB)
    extras = {key: value for key, value in options.items() if key not in ("config", "draft_vocab")}
    tensors = tiny.eagle3_tensors(64, 64, len(taps), vocab, **extras)
    if options.get("attention_bias"):  # vLLM leaves this one as the memory was, if the file lacks it
        tensors["layers.0.self_attn.o_proj.bias"] = 0.1 * torch.randn(64, generator=torch.Generator().manual_seed(6))
    for name in [name for name in tensors if name.endswith(("q_norm.weight", "k_norm.weight"))]:
        tensors[name] = tensors[name].repeat(2)  # heads are twice as wide here
    config = tiny.eagle3_config(draft_vocab=vocab, model_type="llama", num_hidden_layers=options.get("num_layers", 1))
    config |= HEADS | {"hidden_act": "silu", "eagle_aux_hidden_state_layer_ids": taps, "max_position_embeddings": 512}
    config |= {flag: options[flag] for flag in FLAGS if flag in options}
    if options.get("use_aux_hidden_state") is False:
        config["eagle_config"] = {"use_aux_hidden_state": False}
        del tensors["fc.weight"], config["eagle_aux_hidden_state_layer_ids"]
    config |= options.get("config", {})
    config = {key: value for key, value in config.items() if value is not None}
    return tiny.save_head(directory, {rename(name): tensor for name, tensor in tensors.items()}, config)


def dialects(directory: Path) -> Iterator[tuple[str, Path]]:
    """The same head as each community would publish it."""
    ids = "eagle_aux_hidden_state_layer_ids"
    midlayer = save_eagle3(
        directory / "midlayer", {"draft_vocab": 96}, lambda name: name.replace("layers.0", "midlayer")
    )
    yield "midlayer", midlayer
    llama = {"draft_vocab": 96, "config": {"architectures": ["LlamaForCausalLM"]}}
    yield "llama_architecture", save_eagle3(directory / "llama", llama)
    layer_ids = {"draft_vocab": 96, "config": {ids: None, "eagle_config": {"layer_ids": TAPS}}}
    yield "eagle_config_layer_ids", save_eagle3(directory / "layer_ids", layer_ids)
    nested = {"draft_vocab": 96, "config": {ids: None, "eagle_config": {ids: [tap - 1 for tap in TAPS]}}}
    yield "modelopt", save_eagle3(directory / "modelopt", nested)
    speculators = save_eagle3(directory / "speculators", {"draft_vocab": 96, "norm_before_residual": False})
    flat = json.loads((speculators / "config.json").read_text())
    outer = ("draft_vocab_size", "norm_before_residual", ids)
    config = {key: flat[key] for key in outer} | {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {
            "algorithm": "eagle3",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": DEPTH}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "target", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {key: value for key, value in flat.items() if key not in (*outer, "architectures")},
    }
    (speculators / "config.json").write_text(json.dumps(config))
    yield "speculators", speculators


def save_p_eagle(directory: Path) -> Path:
    tensors = tiny.eagle3_tensors(64, 64, 3, tiny.VOCAB, num_layers=2, own_embedding=True)
    tensors["mask_hidden"] = torch.randn(1, 1, 3 * 64, generator=torch.Generator().manual_seed(2))
    settings = HEADS | {"eagle_aux_hidden_state_layer_ids": TAPS, "model_type": "llama", "ptd_token_id": 251}
    return tiny.save_eagle3(directory, tensors, num_hidden_layers=2, max_position_embeddings=512, **settings)


def save_dflash(directory: Path, options: dict[str, Any], *, same_norms: bool = True, **config: Any) -> Path:
    """On a CPU, vLLM norms the context's keys of all layers by the first layer's weights: right if they are equal."""
    tensors = tiny_dflash.dflash_tensors(head_dim=32, **options)
    if same_norms and options.get("num_layers", 2) > 1:
        tensors["layers.1.self_attn.k_norm.weight"] = tensors["layers.0.self_attn.k_norm.weight"].clone()
    nested = {"mask_token_id": tiny_dflash.MASK, "target_layer_ids": [tap - 1 for tap in TAPS]}
    settings = {"head_dim": 32, "max_position_embeddings": 512, "dflash_config": nested, **config}
    return tiny_dflash.save_dflash(directory, tensors, **settings)


def perturbed(target: Path, directory: Path) -> Path:
    """A draft model that mostly agrees with the target: the target with noise in its last layers."""
    shutil.copytree(target, directory, dirs_exist_ok=True)
    tensors, generator = load_file(target / "model.safetensors"), torch.Generator().manual_seed(5)
    for name in tensors:
        if name.startswith(("model.layers.6.mlp", "model.layers.7.mlp")):
            tensors[name] += 0.05 * torch.randn(tensors[name].shape, generator=generator)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


class Maker:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.cases: list[Case] = []

    def target(self, name: str, family: str = "llama", **overrides: Any) -> Path:
        path = self.directory / "targets" / name
        if not path.exists():
            tiny.save_target(path, family, **overrides)
        return path

    def add(self, name: str, target: Path, speculative: dict[str, Any], **more: Any) -> None:
        settings = {"num_speculative_tokens": DEPTH, **speculative}
        usual = {"prompts": PROMPTS, "vocab_size": tiny.VOCAB}
        self.cases.append(Case(name, str(target), settings, **{**usual, **more}))

    def head(self, name: str) -> Path:
        return self.directory / "drafters" / name


def make(maker: Maker) -> None:
    llama = maker.target("llama", **SIZES)
    for name, options in EAGLE3.items():
        path = save_eagle3(maker.head(name), options)
        maker.add(f"eagle3-{name}", llama, {"method": "eagle3", "model": str(path)})
    other_readings = {"eagle_config_layer_ids": [2, 4, 5], "modelopt": [tap - 1 for tap in TAPS]}
    for name, path in dialects(maker.head("dialects")):
        settings = {"method": "eagle3", "model": str(path)}
        maker.add(f"eagle3-dialect-{name}", llama, settings)
        if name in other_readings:  # told to read the ids as vLLM does
            maker.add(f"eagle3-dialect-{name}-as_vllm", llama, settings, outrider={"taps": other_readings[name]})
    for family, sizes in FAMILIES.items():
        target = maker.target(family, family, **{**SIZES, **sizes})
        maker.add(f"eagle3-on_{family}", target, {"method": "eagle3", "model": str(maker.head("plain"))})
    eagle = tiny.save_eagle(maker.head("eagle"), model_type="llama", **{**HEADS, "max_position_embeddings": 512})
    maker.add("eagle", llama, {"method": "eagle", "model": str(eagle)})
    p_eagle = save_p_eagle(maker.head("p_eagle"))
    maker.add("p_eagle", llama, {"method": "eagle3", "model": str(p_eagle), "parallel_drafting": True})
    blocks(maker, llama)
    draft = maker.target("draft", **{**SIZES, "num_hidden_layers": 3})
    maker.add("draft_model", llama, {"method": "draft_model", "model": str(draft)})
    near = perturbed(llama, maker.directory / "targets" / "near")
    maker.add("draft_model-near", llama, {"method": "draft_model", "model": str(near)}, guided=False)
    pard = maker.target("pard", **{**SIZES, "num_hidden_layers": 3, "pard_token": 252})
    maker.add("pard", llama, {"method": "draft_model", "model": str(pard), "parallel_drafting": True})
    modules(maker)
    default(maker)


# other targets under the same EAGLE-3 head, and what they need to run in vLLM on a CPU
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen2": {},
    "qwen3": {},
    "qwen3_moe": {},
    # vLLM has the published model's activation built in
    "gpt_oss": {
        "layer_types": ["sliding_attention", "full_attention"] * 4,
        "swiglu_alpha": 1.702,
        "swiglu_limit": 7.0,
    },
    "nemotron_h": {"hybrid_override_pattern": "M-M*M-M*"},
}


def blocks(maker: Maker, target: Path) -> None:
    variants: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "": ({}, {}),
        "-one_layer": ({"num_layers": 1}, {"num_layers": 1}),
        "-reduced_vocabulary": ({"draft_vocab": 96}, {"draft_vocab_size": 96}),
    }
    for name, (options, config) in variants.items():
        path = save_dflash(maker.head(f"dflash{name}"), options, **config)
        maker.add(f"dflash{name}", target, {"method": "dflash", "model": str(path)})
    path = save_dflash(maker.head("dflash-own_norms"), {}, same_norms=False)
    maker.add("dflash-own_norms", target, {"method": "dflash", "model": str(path)})


def modules(maker: Maker) -> None:
    """Targets with their own multi-token-prediction modules, and Gemma 4's assistant."""
    other = {"attention_type": "sliding_attention", "num_attention_heads": 6, "num_attention_groups": 2, "head_dim": 32}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    latent = {
        "rope_parameters": rope,
        "rms_norm_eps": 1e-6,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
    }
    sizes: dict[str, dict[str, Any]] = {
        "deepseek_v3": latent,
        "nemotron_h": HEADS,
        "step3p5": {
            "head_dim": 32,
            "attention_other_setting": other,
            "swiglu_limits": [0.0] * 4,  # vLLM has no experts with limits on a CPU
        },
    }
    unsaid = {
        "deepseek_v3": {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        "step3p5": {"model_type": "step3p5"},
    }
    # vLLM's other latent attention wants 16-bit weights
    backend = {
        "deepseek_v3": {
            "vllm": {"attention_config": {"backend": "CPU_MLA"}},
            "vllm_speculative": {"attention_backend": "CPU_MLA"},
        }
    }
    for family, options in sizes.items():
        path = maker.directory / "targets" / f"{family}-mtp"
        if not path.exists():
            with_modules(maker.target(f"{family}-plain", family, **options), path)
            kept = {k: v for k, v in load_file(path / "model.safetensors").items() if not k.startswith("vi")}
            save_file(kept, path / "model.safetensors", metadata={"format": "pt"})  # without what sees images
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps({**config, **unsaid.get(family, {})}))
        for depth in (1, 3):
            settings = {"method": "mtp", "num_speculative_tokens": depth}
            maker.add(f"mtp-{family}-{depth}", path, settings, **backend.get(family, {}))
    heads = {"head_dim": 32, "global_head_dim": 64}
    target, assistant = maker.target("gemma4", "gemma4_dense", **heads), maker.head("assistant")
    samples.save_assistant(assistant, **heads)
    settings = {"method": "mtp", "model": str(assistant)}
    maker.add("gemma4_assistant", target, settings, outrider={"method": "gemma4_assistant"})


def default(maker: Maker) -> None:
    """The embedded pair: trained, so its own drafts are accepted. Prompts are ids of its tokenizer."""
    folder = REPOSITORY / "src" / "outrider" / "default"
    tokenizer = Tokenizer.from_file(str(folder / "target" / "tokenizer.json"))
    texts = ["Once upon a time", "The best way to learn is", "In the morning, the old man"]
    prompts = [tokenizer.encode(text).ids for text in texts]
    # vLLM takes no vocabulary map where the vocabulary is the target's
    tensors = {k: v for k, v in load_file(folder / "drafter" / "model.safetensors").items() if k not in ("d2t", "t2d")}
    path = tiny.save_head(maker.head("default"), tensors, json.loads((folder / "drafter" / "config.json").read_text()))
    settings = {"method": "eagle3", "model": str(path), "num_speculative_tokens": 5}
    maker.add("default", folder / "target", settings, prompts=prompts, vocab_size=4096, guided=False)


def main() -> None:
    maker = Maker(Path(sys.argv[1]).resolve())
    make(maker)
    save_cases(maker.directory, maker.cases)
    print(f"{len(maker.cases)} cases in {maker.directory}")


if __name__ == "__main__":
    main()
