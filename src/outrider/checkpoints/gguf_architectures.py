"""What llama.cpp's converter did to each model family, and what the family's config.json says of it.
Another family is another entry in ARCHITECTURES."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from outrider.checkpoints.gguf_file import Metadata

MAX_LAYERS = 10_000  # a damaged number must not fill the memory with types of layers

# A family's own entries of config.json, from the metadata and the entries that all families share.
ReadSettings = Callable[[Metadata, Mapping[str, Any]], dict[str, Any]]


def _llama_settings(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    return {"hidden_act": "silu"}


def _gemma3_settings(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    # Without a window, llama.cpp lets every layer see the whole context.
    window = metadata.get("gemma3.attention.sliding_window", int, 0)
    softcap = metadata.get("gemma3.final_logit_softcapping", float, None)
    num_layers = config["num_hidden_layers"]
    if num_layers > MAX_LAYERS:
        raise ValueError(f"{metadata.path} is damaged: it has {num_layers} layers; download or convert it again")
    # No key holds the scale of the queries: llama.cpp knows the 27B, which departs from the others, by its depth.
    is_27b = num_layers == 62
    scalar = config["hidden_size"] // config["num_attention_heads"] if is_27b else config["head_dim"]
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": window or config["max_position_embeddings"],
        "layer_types": _gemma3_layer_types(metadata, num_layers) if window else ["full_attention"] * num_layers,
        "rope_local_base_freq": metadata.get("gemma3.rope.freq_base_swa", float, 10000.0),
        "attn_logit_softcapping": None,
        "final_logit_softcapping": softcap or None,
    }


def _gemma3_layer_types(metadata: Metadata, num_layers: int) -> list[str]:
    """A pattern is a list with an entry for every layer, or the distance between layers of full attention."""
    key = "gemma3.attention.sliding_window_pattern"
    if metadata.has_list(key):
        slides = metadata.get(key, list)
    else:
        distance = metadata.get(key, int, 6)
        slides = [distance < 1 or (layer + 1) % distance != 0 for layer in range(num_layers)]
    if len(slides) != num_layers:
        raise ValueError(f"{metadata.path}: {key!r} is not of {num_layers} layers; convert the model again")
    return ["sliding_attention" if slide else "full_attention" for slide in slides]


@dataclass(frozen=True)
class Architecture:
    """One family: its names, how its weights were changed, and what is special about its config."""

    model_type: str
    class_name: str
    layer_names: Mapping[str, str]
    interleaved_rope: bool = False  # q and k rows were permuted so that the pairs rope rotates are neighbours
    norm_offset: float = 0.0  # what was added to the weight of every norm
    rope_theta: float = 10000.0  # where the file does not say
    turn_end: str | None = None  # ends an answer too, though no key of the file names it
    read_settings: ReadSettings = _llama_settings


MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
PROJECTION_NAMES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
LLAMA_NAMES = PROJECTION_NAMES | {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
QUERY_KEY_NORM_NAMES = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
SANDWICH_NORM_NAMES = {  # a norm before and after each half of a layer
    "attn_norm": "input_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", LLAMA_NAMES, interleaved_rope=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", LLAMA_NAMES),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", LLAMA_NAMES | QUERY_KEY_NORM_NAMES),
    "gemma3": Architecture(
        "gemma3_text",
        "Gemma3ForCausalLM",
        PROJECTION_NAMES | SANDWICH_NORM_NAMES | QUERY_KEY_NORM_NAMES,
        norm_offset=1.0,
        rope_theta=1e6,
        turn_end="<end_of_turn>",
        read_settings=_gemma3_settings,
    ),
}
