"""config.json, looked at before anybody reads it: the type and the range of every key that is read, in one table.
What does not fit is an error that names the key. What several keys must have in common is checked where they meet."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

KEPT, LEFT_OUT, REFUSED = "kept", "left out", "refused"  # what becomes of a null
LONGEST_SHOWN = 60  # characters of a value in a message


@dataclass(frozen=True)
class FieldKind:
    """What a value may be: of these types, in this range; a list, of such entries."""

    what: str
    types: tuple[type, ...]
    low: float = -math.inf
    high: float = math.inf
    entries: FieldKind | None = None  # of a list
    null: str = KEPT
    other: FieldKind | None = None  # what it may be instead

    def allows(self, value: Any) -> bool:
        return self._allows(value) or (self.other is not None and self.other.allows(value))

    def _allows(self, value: Any) -> bool:
        if not isinstance(value, self.types) or (isinstance(value, bool) and bool not in self.types):
            return False
        if isinstance(value, int | float) and not isinstance(value, bool):
            return math.isfinite(value) and self.low <= value <= self.high
        return self.entries is None or (isinstance(value, list) and all(map(self.entries.allows, value)))

    def __str__(self) -> str:
        bounds = [f"at least {self.low:g}"] if self.low > -math.inf else []
        bounds += [f"at most {self.high:g}"] if self.high < math.inf else []
        own = f"{self.what} {' and '.join(bounds)}".rstrip()
        own = own if self.entries is None else f"{own}, each entry {self.entries}"
        return own if self.other is None else f"{own}, or {self.other}"


def _whole(low: int, high: int) -> FieldKind:
    return FieldKind("a whole number", (int,), low, high)


def _number(low: float, high: float) -> FieldKind:
    return FieldKind("a number", (int, float), low, high)


def _listed(entries: FieldKind) -> FieldKind:
    return FieldKind("a list", (list,), entries=entries)


SIZE = _whole(1, 2**24)
COUNT = _whole(0, 2**24)
LAYERS = _whole(1, 4096)
TOKEN = _whole(-1, 2**31)
EPSILON = replace(_number(0, 1), null=REFUSED)
FACTOR = _number(-1e4, 1e4)
POSITIVE = _number(1e-6, 1e6)
FLAG = FieldKind("true or false", (bool,))
TEXT = FieldKind("text", (str,))
TEXTS, NUMBERS, WHOLES = _listed(TEXT), _listed(_number(-1e9, 1e9)), _listed(COUNT)
OBJECT = FieldKind("an object", (dict,))
NOTHING = FieldKind("null", (type(None),))
LIMITS = _listed(replace(_number(0, 1e6), other=NOTHING))
THETA = replace(_number(1.001, 1e12), null=LEFT_OUT)
PART = replace(_number(1e-3, 1), null=LEFT_OUT)

_KINDS: dict[FieldKind, str] = {
    SIZE: "hidden_size intermediate_size vocab_size num_attention_heads num_key_value_heads head_dim "
    "num_attention_groups num_sliding_attention_heads global_head_dim num_global_key_value_heads attention_head_dim "
    "kv_lora_rank q_lora_rank qk_rope_head_dim qk_nope_head_dim v_head_dim true_head_dim "
    "moe_intermediate_size moe_shared_expert_intermediate_size share_expert_dim share_expert_dims moe_latent_size "
    "mamba_num_heads mamba_head_dim ssm_state_size n_groups mamba_n_groups "
    "backbone_hidden_size target_hidden_size draft_vocab_size block_size dspark_block_size num_aux_hidden_states "
    "sliding_window_pattern moe_layer_freq spatial_merge_size conv_group_size num_window_keys",
    COUNT: "hidden_size_per_layer_input vocab_size_per_layer_input num_experts num_local_experts n_routed_experts "
    "moe_num_experts num_experts_per_tok moe_top_k top_k_experts n_shared_experts sliding_window num_kv_shared_layers "
    "first_k_dense_replace num_centroids centroid_intermediate_top_k swa_window_size markov_rank selector_rank "
    "selector_top_k num_target_layers",
    replace(COUNT, null=LEFT_OUT): "max_window_layers",
    replace(SIZE, null=LEFT_OUT): "decoder_sparse_step n_group topk_group",
    _whole(1, 64): "conv_kernel mamba_d_conv",
    _whole(0, 1): "position_lag",
    _whole(0, 64): "num_nextn_predict_layers num_mtp_layers conv_kernel_size",
    replace(LAYERS, null=LEFT_OUT): "num_hidden_layers",
    _whole(1, 2**31): "max_position_embeddings",
    replace(_whole(1, 2**31), null=LEFT_OUT): "original_max_position_embeddings",
    EPSILON: "rms_norm_eps",
    replace(EPSILON, null=LEFT_OUT): "layer_norm_epsilon",
    replace(FACTOR, null=LEFT_OUT): "routed_scaling_factor moe_router_scaling_factor logit_scale output_multiplier "
    "swiglu_alpha",
    replace(POSITIVE, null=LEFT_OUT): "factor low_freq_factor high_freq_factor swiglu_limit",
    POSITIVE: "beta_fast beta_slow query_pre_attn_scalar",
    _number(0, 1e6): "final_logit_softcapping attn_logit_softcapping",
    _number(0, 100): "mscale mscale_all_dim",
    _number(1e-3, 100): "attention_factor",
    PART: "partial_rotary_factor",
    THETA: "rope_local_base_freq",
    replace(THETA, other=_listed(_number(1.001, 1e12))): "rope_theta",
    _listed(_number(1e-6, 1e9)): "factors",
    replace(PART, null=KEPT, other=_listed(_number(1e-3, 1))): "partial_rotary_factors",
    TOKEN: "pad_token_id mask_token_id dspark_noise_token_id pard_token ptd_token_id image_token_id audio_token_id "
    "video_token_id boi_token_id eoi_token_id image_token_index boi_token_index eoi_token_index",
    replace(TOKEN, other=_listed(TOKEN)): "eos_token_id",
    FLAG: "tie_word_embeddings attention_bias mlp_bias use_sliding_window norm_topk_prob mrope_interleaved "
    "attention_k_eq_v use_double_wide_mlp enable_moe_block rope_interleave use_bias use_conv_bias mamba_conv_bias "
    "norm_expert_weight use_ordered_embeddings truncate use_aux_hidden_state use_aux_norm fc_norm norm_before_fc "
    "norm_output norm_before_residual sample_from_anchor rope_is_neox_style is_neox_style use_swa is_causal causal "
    "sliding_window_non_causal enable_confidence_head confidence_head_with_markov attention_sink_bias bias fusion_bias "
    "layernorms use_last_layernorm use_input_layernorm_in_first_layer qkv_bias use_mtp_layernorm next_layer_regular "
    "norm_before_head window_from_anchor tap_after_final_norm mtp_zero_first_embedding",
    replace(FLAG, other=TEXT): "use_bidirectional_attention",
    TEXT: "model_type hidden_act hidden_activation mlp_hidden_act mamba_hidden_act topk_method scoring_func "
    "speculators_model_type dtype torch_dtype rope_type type attention_type hybrid_override_pattern "
    "mtp_hybrid_override_pattern markov_head_type moe_router_activation",
    TEXTS: "architectures layer_types layers_block_type mtp_layers_block_type mlp_layer_types mtp_layer_types "
    "mtp_mlp_layer_types yarn_only_types",
    replace(TEXT, other=WHOLES): "moe_layers_enum",
    WHOLES: "mlp_only_layers mrope_section deepstack_visual_indexes",
    # the output of layer -1 is the embedding
    _listed(_whole(-1, 4096)): "eagle_aux_hidden_state_layer_ids layer_ids target_layer_ids dspark_target_layer_ids "
    "aux_hidden_state_layer_ids",
    LIMITS: "swiglu_limits swiglu_limits_shared",
    replace(OBJECT, null=LEFT_OUT): "text_config vision_config",
    OBJECT: "rope_parameters rope_scaling full_attention sliding_attention eagle_config "
    "dflash_config dspark_config transformer_layer_config attention_other_setting per_layer_config",
    # read by what is said of them, or compared with what is supported, whatever their type
    replace(_listed(FieldKind("anything", (object,))), null=KEPT): "time_step_limit mamba_dt_limit",
}
KEYS: dict[str, FieldKind] = {key: kind for kind, keys in _KINDS.items() for key in keys.split()}
# of a vision tower, whose other keys are read by transformers
VISION = frozenset({"spatial_merge_size", "deepstack_visual_indexes"})


def checked_config(config: Mapping[str, Any], where: str | Path) -> dict[str, Any]:
    """The config without what is null and means nothing; a ValueError names the first key that is not as it must be."""
    return dict(_checked(config, "", where))


def _checked(config: Mapping[str, Any], outer: str, where: str | Path) -> Iterator[tuple[str, Any]]:
    for key, value in config.items():
        kind = KEYS.get(key)
        if kind is None or (outer.endswith("vision_config.") and key not in VISION):
            # the entries of per_layer_config go by the layers' numbers
            if outer.endswith("per_layer_config.") and not isinstance(value, dict):
                raise _refusal(where, outer + key, OBJECT, value)
            is_layer = outer.endswith("per_layer_config.")
            yield key, dict(_checked(value, f"{outer}{key}.", where)) if is_layer else value
            continue
        if value is None and kind.null == LEFT_OUT:
            continue
        if (value is None and kind.null == REFUSED) or (value is not None and not kind.allows(value)):
            raise _refusal(where, outer + key, kind, value)
        yield key, dict(_checked(value, f"{outer}{key}.", where)) if isinstance(value, dict) else value


def _refusal(where: str | Path, key: str, kind: FieldKind, value: Any) -> ValueError:
    shown = repr(value)
    shown = shown if len(shown) <= LONGEST_SHOWN else f"{shown[:LONGEST_SHOWN]}..."
    return ValueError(f"{where}: {key} must be {kind}, not {shown}; repair it, or download the file again")
