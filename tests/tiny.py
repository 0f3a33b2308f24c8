"""Tiny random checkpoints for tests. Every parameter is random: a default init hides norm and bias bugs."""

import json
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
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama3": ("Llama", {"rope_parameters": LLAMA3_ROPE, "attention_bias": True, "mlp_bias": True, "head_dim": 24}),
    "llama_linear": ("Llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}}),
    "llama_yarn": ("Llama", {"rope_parameters": YARN_ROPE}),
    "smollm2": ("Llama", {"tie_word_embeddings": True, "rope_theta": 100000.0, "num_attention_heads": 2}),
    "mistral": ("Mistral", {"sliding_window": 8}),
    "qwen2": ("Qwen2", {}),
    "qwen2_window": (
        "Qwen2",
        {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2, "tie_word_embeddings": True},
    ),
    "qwen3": ("Qwen3", {"head_dim": 16}),
}


def randomise(module: torch.nn.Module, seed: int = 0, scale: float = 0.15) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in sorted(module.named_parameters()):
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(1 + 0.3 * noise if "norm" in name else scale * noise)


def reference(family: str, seed: int = 0, **overrides: Any) -> transformers.PreTrainedModel:
    """A tiny random model of Hugging Face's own."""
    name, settings = FAMILIES[family]
    config = getattr(transformers, f"{name}Config")(**{**COMMON, **settings, **overrides})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    randomise(model, seed)
    model.tie_weights()
    return model


def save_target(directory: Path, family: str = "llama", seed: int = 0, **overrides: Any) -> Path:
    reference(family, seed, **overrides).save_pretrained(directory)
    return directory


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
            f"{name}self_attn.q_proj.weight": noise(hidden, width),
            f"{name}self_attn.k_proj.weight": noise(hidden // 2, width),
            f"{name}self_attn.v_proj.weight": noise(hidden // 2, width),
            f"{name}self_attn.o_proj.weight": noise(hidden, hidden),
            f"{name}mlp.gate_proj.weight": noise(2 * hidden, hidden),
            f"{name}mlp.up_proj.weight": noise(2 * hidden, hidden),
            f"{name}mlp.down_proj.weight": noise(hidden, 2 * hidden),
        }
        if options.get("head_norm"):
            tensors |= {f"{name}self_attn.{part}_norm.weight": norm(hidden // 4) for part in "qk"}
        if options.get("attention_bias"):
            tensors |= {
                f"{name}self_attn.{part}_proj.bias": noise(size)
                for part, size in (("q", hidden), ("k", hidden // 2), ("v", hidden // 2))
            }
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
    directory.mkdir(parents=True, exist_ok=True)
    settings = eagle3_config(**config)
    if tensors is None:
        tensors = eagle3_tensors(64, 64, 3, settings["draft_vocab_size"])
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(settings))
    return directory


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
