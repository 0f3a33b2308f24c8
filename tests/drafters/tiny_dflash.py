"""Tiny random checkpoints of the DFlash family, in the form z-lab publishes."""

import json
from pathlib import Path
from typing import Any

import tiny
import torch
from safetensors.torch import save_file
from torch import Tensor

TAPS = (1, 2, 3)
MASK = tiny.VOCAB - 3
DSPARK = {"architectures": ["Qwen3DSparkModel"], "markov_rank": 12, "enable_confidence_head": True}
DFLASH2 = {"conv_kernel_size": 2, "conv_group_size": 16, "selector_rank": 12, "selector_top_k": 7}


def dflash_tensors(num_layers: int = 2, hidden: int = 64, num_taps: int = 3, **options: Any) -> dict[str, Tensor]:
    """Canonical names. Heads of 16 in four groups, two of keys; everything is random."""
    generator = torch.Generator().manual_seed(options.get("seed", 1))

    def noise(*shape: int, scale: float = 0.15) -> Tensor:
        return torch.randn(*shape, generator=generator) * scale

    def norm(size: int) -> Tensor:
        return 1 + noise(size, scale=0.3)

    size, heads, keys = options.get("head_dim", 16), 4, 2
    tensors = {
        "fc.weight": noise(hidden, num_taps * 64),
        "hidden_norm.weight": norm(hidden),
        "norm.weight": norm(hidden),
    }
    for number in range(num_layers):
        name = f"layers.{number}."
        rows = {"q": heads * size, "k": keys * size, "v": keys * size}
        tensors |= {f"{name}{part}_layernorm.weight": norm(hidden) for part in ("input", "post_attention")}
        tensors |= {f"{name}self_attn.{part}_proj.weight": noise(count, hidden) for part, count in rows.items()}
        tensors |= {f"{name}mlp.{part}_proj.weight": noise(2 * hidden, hidden) for part in ("gate", "up")}
        tensors[f"{name}self_attn.o_proj.weight"] = noise(hidden, heads * size)
        tensors[f"{name}mlp.down_proj.weight"] = noise(hidden, 2 * hidden)
        if options.get("head_norm", True):
            tensors |= {f"{name}self_attn.{part}_norm.weight": norm(size) for part in "qk"}
        if options.get("bias"):
            tensors |= {f"{name}self_attn.{part}_proj.bias": noise(count) for part, count in rows.items()}
            tensors[f"{name}self_attn.o_proj.bias"] = noise(hidden)
        if options.get("sinks"):
            tensors[f"{name}self_attn.sinks"] = noise(heads, scale=2.0)
        if options.get("conv"):
            for conv in ("attention_conv", "mlp_conv"):
                tensors[f"{name}{conv}.base_kernel"] = noise(2, 2, hidden, scale=0.5)
                tensors[f"{name}{conv}.kernel_projection.weight"] = noise(2 * 2 * hidden // 16, hidden, scale=0.05)
    vocab, rank = options.get("draft_vocab", tiny.VOCAB), options.get("rank", 0)
    if options.get("own_embedding"):
        tensors["embed_tokens.weight"] = noise(tiny.VOCAB, hidden)
    if options.get("own_head") or vocab != tiny.VOCAB:
        tensors["lm_head.weight"] = noise(vocab, hidden)
    if vocab != tiny.VOCAB:
        kept = torch.randperm(tiny.VOCAB, generator=generator)[:vocab].sort().values
        tensors["d2t"] = kept - torch.arange(vocab)
        tensors["t2d"] = torch.zeros(tiny.VOCAB, dtype=torch.bool).index_fill(0, kept, True)
    if options.get("own_mask"):
        tensors["mask_embedding"] = noise(hidden)
    if rank:
        tensors["markov_head.markov_w1.weight"] = noise(tiny.VOCAB, rank, scale=1.0)
        tensors["markov_head.markov_w2.weight"] = noise(vocab, rank, scale=0.5)
        tensors["confidence_head.proj.weight"] = noise(1, hidden + rank)
        tensors["confidence_head.proj.bias"] = noise(1)
    if options.get("gated"):
        tensors["markov_head.gate_proj.weight"] = noise(rank, hidden + rank)
        tensors["markov_head.gate_proj.bias"] = noise(rank)
    if options.get("selector"):
        tensors["candidate_selector.predecessor_codebook"] = noise(tiny.VOCAB, 12, scale=1.0)
        tensors["candidate_selector.successor_codebook"] = noise(tiny.VOCAB, 12, scale=1.0)
        tensors["candidate_selector.hidden_projection.weight"] = noise(12, hidden)
    return tensors


def dflash_config(num_layers: int = 2, hidden: int = 64, **settings: Any) -> dict[str, Any]:
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "vocab_size": tiny.VOCAB,
        "rope_theta": 10000.0,
        "max_position_embeddings": 64,  # runs go beyond it
        "block_size": 8,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [tap - 1 for tap in TAPS]},
    }
    return {key: value for key, value in (config | settings).items() if value is not None}


def save_dflash(directory: Path, tensors: dict[str, Tensor] | None = None, **settings: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    if tensors is None:
        tensors = dflash_tensors()
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    (directory / "config.json").write_text(json.dumps(dflash_config(**settings)))
    return directory


def save_dspark(directory: Path) -> Path:
    return save_dflash(directory, dflash_tensors(rank=12), **DSPARK)
