"""How a checkpoint of the DFlash family is read: every field of every dialect becomes one canonical form, with its
source. Dialects: z-lab and SpecForge (`dflash_config`), DeepSpec (flat keys), speculators (nested), Muse Glimmer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from outrider.drafters.dflash2 import ConvShape, SelectorShape, read_conv, read_selector
from outrider.drafters.dflash_layers import FamilyReader, LayerMask, read_attention, read_masks, read_ropes
from outrider.drafters.dspark import CorrectionShape, read_correction
from outrider.drafters.reader import check_fc_width, check_vocabulary
from outrider.kernels.activation import GATED
from outrider.layers.attention import AttentionShape
from outrider.models.base import Target, require
from outrider.types import Checkpoint, Resolved

_PREFIXES = ("model.", "logit_head.")
_ALIASES = {
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
    "final_norm.": "norm.",
    "self_attn.attention_sink_bias": "self_attn.sinks",
    "_codebook.weight": "_codebook",  # as z-lab's class saves them; its published files have them without
}
_OUTPUT_IDS = ("target_layer_ids", "dspark_target_layer_ids", "layer_ids")
_TAP_IDS = ("aux_hidden_state_layer_ids", "eagle_aux_hidden_state_layer_ids")
_NAMING_KEYS = ("projector_type", "speculators_model_type", "model_type")
# keys that change the computation and are not built: key -> the values that ask for nothing
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "attention_mode": ("gqa", "mha"),
    "attn_output_gate": (False,),
    "causal_head": (False,),
    "draft_ffn_type": ("dense",),
    "hybrid_context_fusion": (False,),
    "projector_type": ("dflash", "dflash2", "dspark"),
    "shift_label": (False,),
    "use_aux_hidden_state": (True,),
}


def canonical_name(name: str) -> str:
    """The one name of a tensor, whatever the dialect."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    for old, new in _ALIASES.items():
        name = name.replace(old, new)
    return name


@dataclass(frozen=True)
class DFlashConfig:
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    activation: str
    eps: float
    layers: tuple[AttentionShape, ...]
    masks: tuple[LayerMask, ...]  # of every layer
    ropes: tuple[dict[str, Any], ...]  # of every layer
    half_split: bool  # rotary pairs (j, j + half); False: neighbours, whose rows are moved at load
    fused: bool  # q, k and v are one tensor on disk
    taps: tuple[int, ...]
    last_tap_normed: bool  # a tap after the target's last layer is taken after its final norm
    block_size: int  # rows of a block in training
    mask_token: int
    from_anchor: bool  # the newest token's own row predicts the first draft token
    vocab_size: int
    draft_vocab_size: int
    own_embedding: bool
    own_head: bool
    own_mask: bool  # the mask's embedding is a tensor of the checkpoint
    maps_vocabulary: bool
    output_multiplier: float
    softcap: float
    correction: CorrectionShape | None
    conv: ConvShape | None
    selector: SelectorShape | None
    provenance: dict[str, Resolved] = field(repr=False)


def resolve(checkpoint: Checkpoint, target: Target, taps: tuple[int, ...] | None) -> DFlashConfig:
    present = {canonical_name(name): checkpoint.shape(name) for name in checkpoint.names()}
    reader = FamilyReader(checkpoint.config, present)
    _refuse_domino(reader)
    for key, supported in _UNSUPPORTED.items():
        for place, value in reader.found(key).items():
            if value not in supported:
                raise ValueError(f"{place} = {value!r} is not supported (supported: {supported[0]!r})")
    hidden_size, intermediate_size, num_layers = require(
        reader.layer, "hidden_size", "intermediate_size", "num_hidden_layers"
    )
    config = DFlashConfig(
        hidden_size=hidden_size,
        target_hidden_size=reader.get("target_hidden_size", default=target.hidden_size),
        intermediate_size=intermediate_size,
        activation=_activation(reader),
        eps=reader.layer.get("rms_norm_eps", 1e-6),
        layers=read_attention(reader, num_layers),
        masks=read_masks(reader, num_layers),
        ropes=read_ropes(reader, num_layers),
        half_split=bool(reader.get("rope_is_neox_style", "is_neox_style", default=True)),
        fused=reader.has("fused_projections", "layers.0.self_attn.qkv_proj.weight"),
        taps=_taps(reader, target, num_layers, taps),
        last_tap_normed=bool(reader.get("tap_after_final_norm", default=False)),
        block_size=reader.get("block_size", "dspark_block_size", default=8 if reader.is_speculators else 16),
        mask_token=_mask_token(reader, checkpoint),
        from_anchor=_from_anchor(reader),
        vocab_size=target.vocab_size,
        draft_vocab_size=reader.get("draft_vocab_size", default=target.vocab_size),
        own_embedding=reader.has("own_embedding", "embed_tokens.weight"),
        own_head=reader.has("own_head", "lm_head.weight"),
        own_mask=reader.has("own_mask_embedding", "mask_embedding"),
        maps_vocabulary=reader.has("maps_vocabulary", "d2t"),
        output_multiplier=float(reader.get("output_multiplier", default=1.0)),
        softcap=_softcap(reader, target),
        correction=read_correction(reader),
        conv=read_conv(reader),
        selector=read_selector(reader),
        provenance=reader.provenance,
    )
    _check(config, present, target)
    return config


def _refuse_domino(reader: FamilyReader) -> None:
    """Before anything else is looked at, so that nobody searches for a mistake in the file."""
    named = any("domino" in str(value).lower() for value in reader.found("architectures", *_NAMING_KEYS).values())
    if named or any("prefix_gru" in name for name in reader.tensors):
        raise ValueError(
            "Domino drafters are not supported: a GRU (prefix_gru) that is not built here corrects their logits; use a "
            "dflash or dspark drafter for this target"
        )


def _activation(reader: FamilyReader) -> str:
    name = str(reader.layer.get("hidden_act") or "silu")
    if name not in GATED:
        raise ValueError(f"hidden_act = {name!r} is not supported; known: {', '.join(GATED)}")
    return name


# what goes in, what comes out


def _taps(reader: FamilyReader, target: Target, num_layers: int, chosen: tuple[int, ...] | None) -> tuple[int, ...]:
    """Ids in `target_layer_ids` name the layer whose output is meant, so one is added; `aux_hidden_state_layer_ids`
    count layers done, as taps do. Their order is that of fc's input, which all communities keep ascending."""
    readings = {f"{at}, read as outputs (+1)": [i + 1 for i in ids] for at, ids in reader.found(*_OUTPUT_IDS).items()}
    readings |= {f"{at}, read as layers done": list(ids) for at, ids in reader.found(*_TAP_IDS).items()}
    if chosen is not None:
        readings = {"speculative_config taps": list(chosen)}
    if not readings:
        ids = _spread(target.num_layers, num_layers)
        readings = {"default, evenly spread outputs (+1)": [number + 1 for number in ids]}
    said = "; ".join(f"{source}: {taps}" for source, taps in readings.items())
    if len({tuple(taps) for taps in readings.values()}) > 1:
        raise ValueError(f'the checkpoint names its taps twice and they differ ({said}): set "taps" to the right ones')
    taps = next(iter(readings.values()))
    in_range = all(0 <= tap <= target.num_layers for tap in taps)
    if not in_range or taps != sorted(set(taps)):
        raise ValueError(
            f"taps {taps} ({said}) must ascend and lie in 0..{target.num_layers}, for the target has "
            f'{target.num_layers} layers: the drafter belongs to another target, or set "taps" in speculative_config'
        )
    depth = reader.get("num_target_layers", default=target.num_layers)
    if depth != target.num_layers and chosen is None:
        raise ValueError(
            f"the drafter was made for a target of {depth} layers (num_target_layers), this one has "
            f'{target.num_layers}: it belongs to another target, or set "taps" in speculative_config'
        )
    return tuple(reader.note("taps", tuple(taps), next(iter(readings))))


def _spread(num_target_layers: int, count: int) -> list[int]:
    """As many layers as the drafter has, from the second to the last but two: the trainers' default."""
    if count == 1:
        return [num_target_layers // 2]
    return [round(1 + number * (num_target_layers - 4) / (count - 1)) for number in range(count)]


def _mask_token(reader: FamilyReader, checkpoint: Checkpoint) -> int:
    if (checkpoint.path / "mask_embedding.pt").exists():
        raise ValueError(
            f"{checkpoint.path} has its mask's embedding in mask_embedding.pt, a pickle, which may run code when it is "
            "read: convert it to a safetensors file with one tensor named mask_embedding, and delete it"
        )
    return int(reader.mask_token().value)


def _from_anchor(reader: FamilyReader) -> bool:
    said = reader.get("sample_from_anchor")
    if said is None and reader.kind == "dspark" and reader.is_speculators:
        raise ValueError(
            "config.json does not say sample_from_anchor, and those who read this format take its absence for "
            "different things: add what the drafter was trained with"
        )
    if said is None:
        return bool(reader.note("sample_from_anchor", reader.kind == "dspark", "default"))
    return bool(said)


def _softcap(reader: FamilyReader, target: Target) -> float:
    said = reader.get("final_logit_softcapping")
    if said is None:
        return 0.0 if "lm_head.weight" in reader.tensors else target.head.softcap
    return max(float(said), 0.0)


# what can be known to be wrong before any weight is read


def _check(config: DFlashConfig, present: dict[str, tuple[int, ...]], target: Target) -> None:
    if config.target_hidden_size != target.hidden_size:
        raise ValueError(
            f"the drafter was made for a target of hidden size {config.target_hidden_size}, this one has "
            f"{target.hidden_size}: it belongs to another target"
        )
    if "fc.weight" in present:
        check_fc_width(present["fc.weight"][-1], config.taps, target.hidden_size)
    known = config.vocab_size if config.own_embedding else target.embed.vocab_size
    if not config.own_mask and not 0 <= config.mask_token < known:
        raise ValueError(
            f"mask token {config.mask_token} has no embedding among the {known} there are (mask_token_id), and the "
            "checkpoint has no mask_embedding tensor: it belongs to another target"
        )
    check_vocabulary(config, target)
    if config.maps_vocabulary and config.selector is not None:
        raise ValueError("a candidate selector with a reduced vocabulary (d2t) is not supported")
    if not config.own_head and config.softcap != target.head.softcap:
        raise ValueError(
            f"final_logit_softcapping is {config.softcap}, but the target's head, which the drafter shares, caps at "
            f"{target.head.softcap}: remove it from the drafter's config.json"
        )
