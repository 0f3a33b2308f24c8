"""How an EAGLE-3 checkpoint is read: every field of every dialect becomes one canonical form, and says where from.
Dialects: the original repository and SpecForge (flat keys), speculators (nested), ModelOpt (`eagle_config`)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from outrider.layers.attention import AttentionShape
from outrider.models.base import Target, require
from outrider.types import Checkpoint, Resolved

_ALIASES = {"embed.weight": "embed_tokens.weight", "head.weight": "lm_head.weight"}
_AUX_NORMS = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}


def canonical_names(parameter: str) -> str:
    return _ALIASES.get(parameter, parameter)


@dataclass(frozen=True)
class Eagle3Config:
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_layers: int
    vocab_size: int
    draft_vocab_size: int
    attention: AttentionShape
    rope: dict[str, Any]
    eps: float
    taps: tuple[int, ...]
    use_taps: bool  # False: reads the target's last hidden state alone
    fc_bias: bool
    fc_norm: bool
    norm_before_fc: bool
    norm_output: bool
    norm_before_residual: bool
    own_embedding: bool
    own_head: bool
    maps_vocabulary: bool
    logit_scale: float
    names: dict[str, str | None] = field(repr=False)  # tensor of the file -> canonical name; None: carries nothing
    provenance: dict[str, Resolved] = field(repr=False)


class Reader:
    """Looks a field up in several places. Two places that disagree are an error, never a silent choice."""

    def __init__(self, config: dict[str, Any]) -> None:
        layer = config.get("transformer_layer_config")
        eagle = config.get("eagle_config")
        self.is_speculators = "speculators_model_type" in config
        if self.is_speculators and not isinstance(layer, dict):
            raise ValueError("a speculators config.json needs transformer_layer_config: the file is incomplete")
        self.layer: dict[str, Any] = layer if isinstance(layer, dict) else config
        self.places: dict[str, dict[str, Any]] = {"config.json": config}
        if isinstance(eagle, dict):
            self.places["eagle_config"] = eagle
        if self.layer is not config:
            self.places["transformer_layer_config"] = self.layer
        self.provenance: dict[str, Resolved] = {}

    def get(self, key: str, default: Any, *, places: tuple[str, ...] = ("config.json", "eagle_config")) -> Any:
        found = {place: self.places[place][key] for place in places if self.places.get(place, {}).get(key) is not None}
        values = list(found.values())
        if any(value != values[0] for value in values[1:]):
            said = ", ".join(f"{place} says {value!r}" for place, value in found.items())
            raise ValueError(f"{key} is given twice and differs: {said}; remove the wrong one")
        if values:
            return self.note(key, values[0], " and ".join(found))
        return self.note(key, default, "default")

    def note(self, name: str, value: Any, source: str) -> Any:
        self.provenance[name] = Resolved(value, source)
        return value


def resolve(checkpoint: Checkpoint, target: Target, taps: tuple[int, ...] | None) -> Eagle3Config:
    reader = Reader(checkpoint.config)
    names = {name: _canonical(name) for name in checkpoint.names()}
    present = {name for name in names.values() if name is not None}
    hidden_size, intermediate_size = require(reader.layer, "hidden_size", "intermediate_size")
    vocab_size = target.vocab_size
    draft_vocab_size = reader.get("draft_vocab_size", reader.layer.get("vocab_size", vocab_size))
    use_taps = bool(reader.get("use_aux_hidden_state", True))
    config = Eagle3Config(
        hidden_size=hidden_size,
        target_hidden_size=reader.get("target_hidden_size", target.hidden_size if use_taps else hidden_size),
        intermediate_size=intermediate_size,
        num_layers=reader.layer.get("num_hidden_layers", 1),
        vocab_size=vocab_size,
        draft_vocab_size=draft_vocab_size,
        attention=_attention(reader, present),
        rope=_rope(reader, target),
        eps=reader.layer.get("rms_norm_eps", 1e-6),
        taps=_taps(reader, target, taps) if use_taps else (target.num_layers,),
        use_taps=use_taps,
        fc_bias=reader.note("fc_bias", "fc.bias" in present, "tensors"),
        fc_norm=bool(_either(reader, "fc_norm", "use_aux_norm")),
        norm_before_fc=bool(reader.get("norm_before_fc", False)),
        norm_output=bool(reader.get("norm_output", False)),
        norm_before_residual=_norm_before_residual(reader),
        own_embedding=reader.note("own_embedding", "embed_tokens.weight" in present, "tensors"),
        own_head=reader.note("own_head", "lm_head.weight" in present, "tensors"),
        maps_vocabulary=reader.note("maps_vocabulary", "d2t" in present, "tensors"),
        logit_scale=float(reader.get("logit_scale", 1.0)),
        names=names,
        provenance=reader.provenance,
    )
    _check(config, checkpoint, target)
    return config


def _canonical(name: str) -> str | None:
    """The canonical name of a tensor, None for one that carries nothing the network uses."""
    name = name.removeprefix("model.").replace("midlayer.", "layers.0.")
    for old, new in _AUX_NORMS.items():
        name = name.replace(old, new)
    if name == "t2d" or name.endswith("rotary_emb.inv_freq"):
        return None
    if re.fullmatch(r"layers\.[1-9]\d*\.hidden_norm\.weight", name):  # only the first layer has a use for it
        return None
    return name


def _attention(reader: Reader, present: set[str]) -> AttentionShape:
    layer = reader.layer
    hidden_size, num_heads = require(layer, "hidden_size", "num_attention_heads")
    has_bias, has_norm = (f"layers.0.self_attn.{part}" in present for part in ("q_proj.bias", "q_norm.weight"))
    if bool(layer.get("attention_bias", has_bias)) != has_bias:
        raise ValueError(
            f"config.json says attention_bias={layer['attention_bias']}, but the tensors say {has_bias}: "
            "one of them belongs to another model"
        )
    reader.note("attention_bias", has_bias, "tensors")
    eps = layer.get("rms_norm_eps", 1e-6)
    return AttentionShape(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=layer.get("num_key_value_heads") or num_heads,
        head_dim=layer.get("head_dim") or hidden_size // num_heads,
        qkv_bias=has_bias,
        output_bias="layers.0.self_attn.o_proj.bias" in present,
        head_norm_eps=eps if reader.note("head_norm", has_norm, "tensors") else None,
    )


def _rope(reader: Reader, target: Target) -> dict[str, Any]:
    """The head's own frequencies, or the target's where its config names none. There is no position table to outgrow:
    max_position_embeddings of the head is not read."""
    keys = ("rope_theta", "rope_scaling", "rope_parameters")
    if any(reader.layer.get(key) is not None for key in keys):
        reader.note("rope", {key: reader.layer[key] for key in keys if key in reader.layer}, "the head's config")
        return reader.layer
    reader.note("rope", {key: target.config[key] for key in keys if key in target.config}, "the target's config")
    return target.config


def _taps(reader: Reader, target: Target, chosen: tuple[int, ...] | None) -> tuple[int, ...]:
    """Three ways to name the taps. Top-level ids count layers done, as taps do; ids in `eagle_config` name the layer
    whose output is meant, so one is added."""
    num_layers = target.num_layers
    readings: dict[str, tuple[int, ...]] = {}
    flat = reader.places["config.json"].get("eagle_aux_hidden_state_layer_ids")
    if flat:
        readings["eagle_aux_hidden_state_layer_ids, read as layers done"] = tuple(sorted(flat))
    nested = reader.places.get("eagle_config", {})
    ids = nested.get("eagle_aux_hidden_state_layer_ids") or nested.get("layer_ids")
    if ids:
        readings["eagle_config layer ids, read as outputs (+1)"] = tuple(sorted(number + 1 for number in ids))
    if chosen is not None:
        readings = {"speculative_config taps": tuple(sorted(chosen))}
    if not readings:
        readings = {"default (2, n/2, n-3)": (2, num_layers // 2, num_layers - 3)}
    if len(set(readings.values())) > 1:
        said = "; ".join(f"{source}: {list(taps)}" for source, taps in readings.items())
        raise ValueError(f'the checkpoint names its taps twice and they differ ({said}): set "taps" to the right ones')
    source, taps = next(iter(readings.items()))
    if len(set(taps)) != len(taps) or not all(0 <= tap <= num_layers for tap in taps):
        raise ValueError(
            f"taps {list(taps)} ({source}) do not fit a target of {num_layers} layers, whose taps are 0..{num_layers}: "
            'the head belongs to another target, or set "taps" in speculative_config'
        )
    count = reader.get("num_aux_hidden_states", len(taps))
    if count != len(taps):
        raise ValueError(
            f"num_aux_hidden_states is {count}, but {len(taps)} taps are named ({source}): "
            f'set "taps" in speculative_config to {count} of them'
        )
    return reader.note("taps", taps, source)


def _either(reader: Reader, key: str, older: str) -> Any:
    values = {name: reader.get(name, None) for name in (key, older)}
    del reader.provenance[older]
    given = {name: value for name, value in values.items() if value is not None}
    if len(given) == 2 and bool(values[key]) != bool(values[older]):
        raise ValueError(f"{key} and {older} mean the same but differ ({given}): remove one of them")
    source = " and ".join(given) or "default"
    return reader.note(key, next(iter(given.values()), False), source)


def _norm_before_residual(reader: Reader) -> bool:
    # speculators checkpoints that do not say were trained with it; all other dialects without.
    value = reader.get("norm_before_residual", reader.is_speculators)
    if reader.is_speculators and reader.provenance["norm_before_residual"].source == "default":
        reader.note("norm_before_residual", True, "default of the speculators format")
    return bool(value)


def _check(config: Eagle3Config, checkpoint: Checkpoint, target: Target) -> None:
    """What can be known to be wrong before any weight is read."""
    if config.fc_norm and config.norm_before_fc:
        raise ValueError(
            "fc_norm (a norm per tap) and norm_before_fc (one over all) exclude each other: set one to false"
        )
    if config.use_taps and config.target_hidden_size != target.hidden_size:
        raise ValueError(
            f"the head was made for a target of hidden size {config.target_hidden_size}, this one has "
            f"{target.hidden_size}: it belongs to another target"
        )
    _check_fc_width(config, checkpoint)
    if not config.use_taps and config.hidden_size != target.hidden_size:
        raise ValueError(
            f"use_aux_hidden_state is false, so the head's hidden size ({config.hidden_size}) must be the target's "
            f"({target.hidden_size})"
        )
    if not config.own_embedding and config.hidden_size != target.embed.hidden_size:
        raise ValueError(
            f"the head has no embed_tokens.weight, and cannot share the target's: its hidden size is "
            f"{config.hidden_size}, the target's {target.embed.hidden_size}"
        )
    _check_vocabulary(config, target)


def _check_vocabulary(config: Eagle3Config, target: Target) -> None:
    if config.draft_vocab_size != target.vocab_size and not config.maps_vocabulary:
        raise ValueError(
            f"draft_vocab_size is {config.draft_vocab_size} and the target's vocabulary {target.vocab_size}, but there "
            "is no d2t tensor to map one to the other: the checkpoint is incomplete, or belongs to another target"
        )
    if not config.own_head and (config.draft_vocab_size, config.hidden_size) != (
        target.vocab_size,
        target.head.hidden_size,
    ):
        raise ValueError(
            "the head has no lm_head.weight, and its vocabulary or hidden size differ from the target's, so it cannot "
            "share the target's head"
        )


def _check_fc_width(config: Eagle3Config, checkpoint: Checkpoint) -> None:
    actual = next((name for name, canonical in config.names.items() if canonical == "fc.weight"), None)
    if not config.use_taps or actual is None:
        return
    width, expected = checkpoint.shape(actual)[-1], len(config.taps) * config.target_hidden_size
    if width != expected:
        raise ValueError(
            f"{actual} takes {width} inputs, but {len(config.taps)} taps {list(config.taps)} of a target of hidden "
            f'size {config.target_hidden_size} give {expected}: set "taps" in speculative_config, or this head '
            "belongs to another target"
        )
