"""Tiny random checkpoints for tests. Every parameter is random: a default init hides norm and bias bugs."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file

VOCAB = 256
COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
GEMMA3 = {
    "rms_norm_eps": 1e-2,  # large enough to be noticed
    "head_dim": 16,
    "num_hidden_layers": 6,
    "sliding_window": 8,
    "query_pre_attn_scalar": 24,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    },
}
GEMMA4 = {
    "rms_norm_eps": 1e-2,  # large enough to be noticed, and to keep small answers from being blown up
    "head_dim": 16,
    "num_hidden_layers": 6,
    "sliding_window": 8,
    "global_head_dim": 32,
    "tie_word_embeddings": True,
    # the last two read layers 3 and 1; the first three alone are a whole model too
    "layer_types": ["full_attention"] * 2 + ["sliding_attention"] * 3 + ["full_attention"],
    "hidden_size_per_layer_input": 12,
    "vocab_size_per_layer_input": VOCAB,
    "num_kv_shared_layers": 2,
    "use_double_wide_mlp": True,
    "final_logit_softcapping": 30.0,
}
GEMMA4_DENSE = {
    **GEMMA4,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "num_kv_shared_layers": 0,
    "num_global_key_value_heads": 1,  # which is heeded only where values are keys
}
GEMMA4_MOE = {
    **GEMMA4_DENSE,
    "attention_bias": True,
    "attention_k_eq_v": True,
    "use_double_wide_mlp": False,
    "enable_moe_block": True,
    "num_experts": 4,
    "top_k_experts": 2,
    "moe_intermediate_size": 32,
}
SIGLIP = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
GEMMA4_VISION = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "patch_size": 8,
    "position_embedding_size": 64,
    "pooling_kernel_size": 2,
}
DEEPSEEK = {
    "rms_norm_eps": 1e-2,  # large enough to be noticed: some of the norms do not use it
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 20,
    "n_routed_experts": 16,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 2.5,
}
DEEPSEEK_YARN = {**YARN_ROPE, "mscale": 0.8, "mscale_all_dim": 1.2, "beta_fast": 32, "beta_slow": 1}
NEMOTRON = {
    "hybrid_override_pattern": "M-M*ME",
    "head_dim": 16,
    "mamba_num_heads": 6,
    "mamba_head_dim": 20,
    "ssm_state_size": 24,
    "n_groups": 2,
    "conv_kernel": 4,
    "chunk_size": 16,
    "time_step_min": 1e-20,  # the reference clamps by it in prefill and not in decoding; nothing else clamps
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "moe_intermediate_size": 40,
    "moe_shared_expert_intermediate_size": 48,
    "routed_scaling_factor": 2.5,
    "n_group": 1,
    "topk_group": 1,
}
STEP = {
    "num_attention_groups": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
    "rope_theta": [5e6, 1e4, 1e4, 5e6],
    "partial_rotary_factors": [0.5, 1.0, 1.0, 0.5],
    "rope_scaling": {
        "rope_type": "llama3",
        "factor": 2.0,
        "original_max_position_embeddings": 64,
        "low_freq_factor": 1.0,
        "high_freq_factor": 32.0,
    },
    "yarn_only_types": ["full_attention"],
    "sliding_window": 8,
    "attention_other_setting": {
        "attention_type": "sliding_attention",
        "num_attention_heads": 6,
        "num_attention_groups": 2,
        "head_dim": 16,
    },
    "moe_num_experts": 8,
    "moe_top_k": 2,
    "moe_intermediate_size": 32,
    "share_expert_dim": 32,
    "moe_layers_enum": "1,2,3",
    "moe_router_scaling_factor": 3.0,
    "swiglu_limits": [0.0, 0.0, None, 0.3],
    "swiglu_limits_shared": [0.4, 0.0, 0.3, 0.2],
}
STEP_AROUND = {
    "vision_config": {
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "mlp_ratio": 2.0,
        "image_size": 56,
        "patch_size": 14,
    },
    "image_token_id": 255,
}
QWEN25_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 56,
    "fullatt_block_indexes": [1],
}
QWEN3_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "out_hidden_size": 64,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0, 1],
}
QWEN_TOKENS = {"image_token_id": 250, "video_token_id": 251, "vision_start_token_id": 252, "vision_end_token_id": 253}
MROPE = {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [2, 3, 3]}
MROPE_TURNS = {"rope_type": "default", "rope_theta": 5e6, "mrope_section": [4, 2, 2], "mrope_interleaved": True}


@dataclass(frozen=True)
class Family:
    """How to make a tiny model of Hugging Face's own."""

    config: str  # the config's class
    model: str  # the model's class, which is the architecture's name on disk
    settings: dict[str, Any] = field(default_factory=dict)
    nested: dict[str, Any] | None = None  # a multimodal config around the text's: its other settings
    architecture: str | None = None  # where the reference goes by another name than the published checkpoints
    norm_centre: float = 1.0  # around which norm weights are drawn: 0 where norms multiply by 1 + weight

    @property
    def registered(self) -> str:
        return self.architecture or self.model


def _causal(name: str, settings: dict[str, Any] | None = None, config: str | None = None) -> Family:
    return Family(config or f"{name}Config", f"{name}ForCausalLM", settings or {})


FAMILIES: dict[str, Family] = {
    "llama": _causal("Llama"),
    "llama3": _causal(
        "Llama", {"rope_parameters": LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True, "head_dim": 24}
    ),
    "llama_linear": _causal(
        "Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}
    ),
    "llama_yarn": _causal("Llama", {"rope_parameters": YARN_ROPE}),
    "smollm2": _causal("Llama", {"tie_word_embeddings": True, "rope_theta": 100000.0, "num_attention_heads": 2}),
    "mistral": _causal("Mistral", {"sliding_window": 8}),
    "qwen2": _causal("Qwen2"),
    "qwen2_window": _causal(
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2, "tie_word_embeddings": True},
    ),
    "qwen3": _causal("Qwen3", {"head_dim": 16}),
    "qwen3_moe": _causal(
        "Qwen3Moe",
        {
            "head_dim": 16,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "mlp_only_layers": [0],
            "norm_topk_prob": True,
        },
    ),
    "gpt_oss": _causal(
        "GptOss",
        {
            "head_dim": 16,
            "sliding_window": 8,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {**YARN_ROPE, "beta_fast": 4.0, "beta_slow": 1.0, "truncate": False},
            "swiglu_alpha": 1.3,
            "swiglu_limit": 0.8,  # low enough to matter
        },
    ),
    "qwen2_5_vl": Family(
        "Qwen2_5_VLConfig",
        "Qwen2_5_VLForConditionalGeneration",
        {"rope_parameters": MROPE},
        {"vision_config": QWEN25_VISION, **QWEN_TOKENS},
    ),
    "qwen3_vl": Family(
        "Qwen3VLConfig",
        "Qwen3VLForConditionalGeneration",
        {"head_dim": 16, "rope_parameters": MROPE_TURNS},
        {"vision_config": QWEN3_VISION, **QWEN_TOKENS},
    ),
    "gemma3": Family("Gemma3TextConfig", "Gemma3ForCausalLM", GEMMA3, norm_centre=0.0),
    "gemma3_softcap": Family(
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            **GEMMA3,
            "final_logit_softcapping": 2.0,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "layer_types": ["full_attention", "sliding_attention"] * 3,
        },
        norm_centre=0.0,
    ),
    "gemma3_vision": Family(
        "Gemma3Config",
        "Gemma3ForConditionalGeneration",
        GEMMA3,
        {
            "vision_config": SIGLIP,
            "mm_tokens_per_image": 4,
            "image_token_index": 250,
            "boi_token_index": 251,
            "eoi_token_index": 252,
        },
        norm_centre=0.0,
    ),
    # norms below one: nothing else keeps the attention scores of this family small
    "gemma4": Family("Gemma4TextConfig", "Gemma4ForCausalLM", GEMMA4, norm_centre=0.6),
    "gemma4_dense": Family("Gemma4TextConfig", "Gemma4ForCausalLM", GEMMA4_DENSE, norm_centre=0.6),
    "gemma4_moe": Family("Gemma4TextConfig", "Gemma4ForCausalLM", GEMMA4_MOE, norm_centre=0.6),
    "gemma4_vision": Family(
        "Gemma4Config",
        "Gemma4ForConditionalGeneration",
        {**GEMMA4, "attention_bias": True, "use_bidirectional_attention": "vision"},
        {
            "vision_config": GEMMA4_VISION,
            "audio_config": None,
            "image_token_id": 250,
            "video_token_id": 251,
            "audio_token_id": 252,
            "boi_token_id": 253,
            "eoi_token_id": 254,
        },
        norm_centre=0.6,
    ),
    "nemotron_h": _causal("NemotronH", NEMOTRON),
    "nemotron_h_latent": _causal(
        "NemotronH",
        {
            **NEMOTRON,
            "hybrid_override_pattern": "ME*E-",
            "moe_latent_size": 24,
            "n_group": 2,
            "norm_topk_prob": False,
            "conv_kernel": 3,
            "use_conv_bias": False,
            "use_bias": True,
            "mlp_bias": True,
            "layer_norm_epsilon": 1e-3,
        },
    ),
    "deepseek_v2": _causal(
        "DeepseekV2",
        {
            **DEEPSEEK,
            "topk_method": "group_limited_greedy",
            "rope_parameters": DEEPSEEK_YARN,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "deepseek_v2_lite": _causal("DeepseekV2", {**DEEPSEEK, "topk_method": "greedy", "q_lora_rank": None}),
    "deepseek_v3": _causal("DeepseekV3", {**DEEPSEEK, "rope_parameters": DEEPSEEK_YARN}),
    "deepseek_v3_no_yarn": _causal(
        "DeepseekV3",
        {
            **DEEPSEEK,
            "q_lora_rank": None,
            "norm_topk_prob": False,
            "attention_bias": True,
            "rope_interleave": False,
        },
    ),
    "step3p5": Family(
        "Step3p7Config",
        "Step3p7ForConditionalGeneration",
        STEP,
        STEP_AROUND,
        architecture="Step3p5ForCausalLM",
        norm_centre=0.0,
    ),
    "step3p7": Family("Step3p7Config", "Step3p7ForConditionalGeneration", STEP, STEP_AROUND, norm_centre=0.0),
}


def randomise(module: torch.nn.Module, seed: int = 0, scale: float = 0.15, norm_centre: float = 1.0) -> None:
    """Every parameter and every stored buffer."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in sorted(module.state_dict().items()):
            noise = torch.randn(tensor.shape, generator=generator)
            around_one = name.endswith(("layer_scalar", "router.scale", "per_expert_scale"))
            centre = norm_centre if "norm" in name else 1.0
            tensor.copy_(centre + 0.3 * noise if "norm" in name or around_one else scale * noise)


def family_settings(kind: Family, overrides: dict[str, Any]) -> dict[str, Any]:
    """With fewer layers than the family has, lists that go by layers are silent about those left out."""
    usual = {**COMMON, **kind.settings}
    full, count = usual["num_hidden_layers"], overrides.get("num_hidden_layers", usual["num_hidden_layers"])
    by_layer = {key: value for key, value in usual.items() if isinstance(value, list) and len(value) >= full}
    return {**usual, **{key: value[:count] + value[full:] for key, value in by_layer.items()}, **overrides}


def reference(family: str, seed: int = 0, **overrides: Any) -> transformers.PreTrainedModel:
    """A tiny random model of Hugging Face's own."""
    kind = FAMILIES[family]
    settings = family_settings(kind, overrides)
    if "hybrid_override_pattern" in settings:  # which says how many layers there are
        settings["hybrid_override_pattern"] = settings["hybrid_override_pattern"][: overrides.get("num_hidden_layers")]
        del settings["num_hidden_layers"]
    config_class = getattr(transformers, kind.config)
    if kind.nested is None:
        config = config_class(**settings)
    else:
        tied = settings.get("tie_word_embeddings", False)
        config = config_class(text_config=settings, tie_word_embeddings=tied, **kind.nested)
    model = getattr(transformers, kind.model)(config).eval()
    randomise(model, seed, norm_centre=kind.norm_centre)
    model.tie_weights()
    return model


def save_target(directory: Path, family: str = "llama", seed: int = 0, **overrides: Any) -> Path:
    reference(family, seed, **overrides).save_pretrained(directory)
    kind = FAMILIES[family]
    if kind.architecture is not None:  # config.json as it is published, not as the reference would write it
        settings = {**family_settings(kind, overrides), "architectures": [kind.architecture]}
        (directory / "config.json").write_text(json.dumps(settings))
    return directory


# rows and columns of a latent attention's matrices; 0 columns: as wide as the layer's input
LATENT_SHAPES = {
    "q_a_proj": (24, 0),
    "q_a_layernorm": (24, 0),
    "q_b_proj": (4 * (16 + 8), 24),
    "kv_a_proj_with_mqa": (32 + 8, 0),
    "kv_a_layernorm": (32, 0),
    "kv_b_proj": (4 * (16 + 20), 32),
    "o_proj": (64, 4 * 20),
}
LATENT = {key: DEEPSEEK[key] for key in ("kv_lora_rank", "q_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim")}
LATENT |= {"v_head_dim": 20, "num_key_value_heads": 4}


def _grouped_shapes(hidden: int) -> dict[str, tuple[int, int]]:
    return {
        "q_proj": (hidden, 0),
        "k_proj": (hidden // 2, 0),
        "v_proj": (hidden // 2, 0),
        "o_proj": (hidden, hidden),
    }


def eagle3_tensors(hidden: int, target_hidden: int, num_taps: int, draft_vocab: int, **options: Any) -> dict[str, Any]:
    """Tensors of a random head in canonical (speculators) names."""
    generator = torch.Generator().manual_seed(options.get("seed", 1))

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * 0.15

    def norm(size: int) -> torch.Tensor:
        return 1 + 0.3 * torch.randn(size, generator=generator)

    tensors = {"fc.weight": noise(hidden, num_taps * target_hidden), "norm.weight": norm(hidden)}
    for layer in range(options.get("num_layers", 1)):
        name, width = f"layers.{layer}.", 2 * hidden if layer == 0 else hidden
        tensors |= {
            f"{name}input_layernorm.weight": norm(hidden),
            f"{name}hidden_norm.weight": norm(hidden),
            f"{name}post_attention_layernorm.weight": norm(hidden),
            f"{name}mlp.gate_proj.weight": noise(2 * hidden, hidden),
            f"{name}mlp.up_proj.weight": noise(2 * hidden, hidden),
            f"{name}mlp.down_proj.weight": noise(hidden, 2 * hidden),
        }
        shapes = LATENT_SHAPES if options.get("latent") else {}
        for part, (rows, columns) in (shapes or _grouped_shapes(hidden)).items():
            weight = norm(rows) if "norm" in part else noise(rows, columns or width)
            tensors[f"{name}self_attn.{part}.weight"] = weight
        if options.get("mlp_bias"):
            sizes = {"gate": 2 * hidden, "up": 2 * hidden, "down": hidden}
            tensors |= {f"{name}mlp.{part}_proj.bias": noise(size) for part, size in sizes.items()}
        if options.get("head_norm"):
            tensors |= {f"{name}self_attn.{part}_norm.weight": norm(hidden // 4) for part in "qk"}
        if options.get("attention_bias"):
            tensors |= {
                f"{name}self_attn.{part}_proj.bias": noise(size)
                for part, size in (("q", hidden), ("k", hidden // 2), ("v", hidden // 2))
            }
    if options.get("fc_bias"):
        tensors["fc.bias"] = noise(hidden)
    if options.get("fc_norm"):
        tensors |= {f"fc_norm.{number}.weight": norm(target_hidden) for number in range(num_taps)}
    if options.get("norm_before_fc"):
        tensors["input_norm.weight"] = norm(num_taps * target_hidden)
    if options.get("own_head", True):
        tensors["lm_head.weight"] = noise(draft_vocab, hidden)
    if options.get("own_embedding"):
        tensors["embed_tokens.weight"] = noise(VOCAB, hidden)
    if draft_vocab != VOCAB:
        kept = torch.randperm(VOCAB, generator=generator)[:draft_vocab].sort().values
        tensors["d2t"] = kept - torch.arange(draft_vocab)
        tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, kept, True)
    return tensors


def eagle3_config(hidden: int = 64, draft_vocab: int = VOCAB, **settings: Any) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": VOCAB,
        "draft_vocab_size": draft_vocab,
        "max_position_embeddings": 64,
        "eagle_aux_hidden_state_layer_ids": [1, 2, 4],
        "rope_theta": 10000.0,
        **settings,
    }


def save_eagle3(directory: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    settings = eagle3_config(**config)
    if tensors is None:
        tensors = eagle3_tensors(64, 64, 3, settings["draft_vocab_size"])
    return save_head(directory, tensors, settings)


def save_head(directory: Path, tensors: dict[str, torch.Tensor], config: dict[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def eagle_tensors(hidden: int = 64, **options: Any) -> dict[str, torch.Tensor]:
    """Tensors of a random EAGLE-1 head, as the original repository names them."""
    tensors = eagle3_tensors(hidden, hidden, 2, VOCAB, **{"own_head": False, **options})  # fc [H, 2 H], as here
    tensors["fc.weight"] *= 0.4  # nothing norms what is fed back, so it must not grow by itself
    if not options.get("norms"):
        del tensors["norm.weight"], tensors["layers.0.input_layernorm.weight"]
    generator = torch.Generator().manual_seed(4)
    for name in [name for name in tensors if name.endswith("hidden_norm.weight")]:
        del tensors[name]
    for part in "qkv":  # the first layer's attention is no wider than the others'
        name = f"layers.0.self_attn.{part}_proj.weight"
        tensors[name] = tensors[name][:, :hidden]
    if options.get("norms"):
        tensors["embedding_norm.weight"] = 1 + 0.3 * torch.randn(hidden, generator=generator)
    return tensors


def eagle_config(**settings: Any) -> dict[str, Any]:
    config = eagle3_config(architectures=["LlamaForCausalLM"], bias=False)
    del config["draft_vocab_size"], config["eagle_aux_hidden_state_layer_ids"]
    return {**config, **settings}


def save_eagle(directory: Path, tensors: dict[str, torch.Tensor] | None = None, **config: Any) -> Path:
    return save_head(directory, tensors if tensors is not None else eagle_tensors(), eagle_config(**config))


CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def save_tokenizer(directory: Path) -> None:
    """A byte-level tokenizer: one token a byte, so that random ids are text, if odd text."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={token: number for number, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHAT_TEMPLATE}))
