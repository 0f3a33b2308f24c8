"""A drafter's checkpoint in speculators' format: settings of its layers nested, and the target it was made for."""

from __future__ import annotations

from typing import Any

from outrider.drafters.fresh import Fresh

DIALECTS = ("original", "speculators")
_NAMES = {"eagle3": "Eagle3Speculator", "p_eagle": "PEagleSpeculator", "dflash": "DFlashSpeculator",
          "dspark": "DSparkSpeculator"}  # fmt: skip
_TYPES = {"p_eagle": "peagle"}
_OF_LAYERS = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "attention_bias", "mlp_bias", "rms_norm_eps", "max_position_embeddings", "rope_theta",
    "rope_scaling", "num_hidden_layers", "layer_types", "sliding_window", "tie_word_embeddings",
)  # fmt: skip


def in_speculators_format(fresh: Fresh, method: str, target: str, depth: int) -> Fresh:
    if method not in _NAMES:
        raise ValueError(f"speculators' format has no {method} drafters of this kind: leave out --dialect")
    config = dict(fresh.config)
    layers = {key: config.pop(key) for key in _OF_LAYERS if key in config}
    kind = _TYPES.get(method, method)
    proposal = {"proposal_type": "greedy", "speculative_tokens": depth, "accept_tolerance": 0.0, "verifier_accept_k": 1}
    nested: dict[str, Any] = config.pop("dflash_config", {})
    if nested:
        config["mask_token_id"] = nested["mask_token_id"]
        config["aux_hidden_state_layer_ids"] = [number + 1 for number in nested["target_layer_ids"]]
    else:
        config.setdefault("norm_before_residual", False)  # what the format means where it is silent is another thing
    config |= {
        "architectures": [_NAMES[method]],
        "speculators_model_type": kind,
        "speculators_version": "0.5.0",
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": target, "architectures": []},
        },
        "transformer_layer_config": layers,
    }
    tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in fresh.tensors.items()}
    return Fresh(config, tensors)
