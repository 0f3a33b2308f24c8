"""Where the communities of the DFlash family keep their fields, and how its attention layers are described.
Every field becomes one canonical form, and says where it was read."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from outrider.drafters.dflash_mask import LayerMask
from outrider.drafters.head import Reader
from outrider.layers.attention import AttentionShape
from outrider.models.base import require

FULL, SLIDING = "full_attention", "sliding_attention"
_PREFIXES = ("model.", "logit_head.")
_ALIASES = {
    "encoder.fc.": "fc.",
    "encoder.output_norm_enc.": "hidden_norm.",
    "final_norm.": "norm.",
    "self_attn.attention_sink_bias": "self_attn.sinks",
    "_codebook.weight": "_codebook",  # as z-lab's class saves them; its published files have them without
}


def canonical_name(name: str) -> str:
    """The one name of a tensor, whatever the dialect."""
    for prefix in _PREFIXES:
        name = name.removeprefix(prefix)
    for old, new in _ALIASES.items():
        name = name.replace(old, new)
    return name


class FamilyReader(Reader):
    """Knows the places where this family's communities keep their fields, and the several names of a field."""

    def __init__(self, config: dict[str, Any], tensors: Iterable[str]) -> None:
        super().__init__(config, tensors)
        for name in ("dflash_config", "dspark_config"):
            if isinstance(config.get(name), dict):
                self.places[name] = config[name]
        self.is_muse = config.get("model_type") == "muse_glimmer_assistant"
        kind = str(config.get("speculators_model_type", "")) + " ".join(config.get("architectures") or [])
        self.kind = next((name for name in ("dspark", "dflash2") if name in kind.lower()), "dflash")

    def one(self, *keys: str, default: Any = None) -> Any:
        """A field under any of its names, in any place; noted under the first."""
        found = self.found(*keys)
        values = list(found.values())
        if any(value != values[0] for value in values[1:]):
            said = ", ".join(f"{place} says {value!r}" for place, value in found.items())
            raise ValueError(f"{keys[0]} is given twice and differs: {said}; remove the wrong one")
        if values:
            return self.note(keys[0], values[0], " and ".join(found))
        return default if default is None else self.note(keys[0], default, "default")

    def found(self, *keys: str) -> dict[str, Any]:
        """Where a field is given, and its value there."""
        return {
            f"{place} {key}": values[key]
            for place, values in self.places.items()
            for key in keys
            if values.get(key) is not None
        }


def layer_kinds(reader: FamilyReader, num_layers: int) -> list[str]:
    """Full or sliding, for every layer, as layer_types says it; `use_swa` gives all of them a window besides."""
    kinds = reader.layer.get("layer_types")
    if kinds is None and reader.layer.get("use_sliding_window"):  # as Qwen3's own config is read
        first = reader.layer.get("max_window_layers", 28)
        kinds = [SLIDING if number >= first else FULL for number in range(num_layers)]
    kinds = kinds or [FULL] * num_layers
    unknown = sorted(set(kinds) - {FULL, SLIDING})
    if unknown or len(kinds) != num_layers:
        raise ValueError(
            f"layer_types must name {num_layers} layers, each {FULL} or {SLIDING}: it has {len(kinds)}"
            + (f", among them {', '.join(unknown)}" if unknown else "")
        )
    return list(reader.note("layer_types", tuple(kinds), "config" if "layer_types" in reader.layer else "default"))


def read_attention(reader: FamilyReader, num_layers: int) -> tuple[AttentionShape, ...]:
    """The attention of every layer, but for its mask."""
    layer = reader.layer
    hidden_size, num_heads = require(layer, "hidden_size", "num_attention_heads")
    shape = AttentionShape(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=layer.get("num_key_value_heads") or num_heads,
        head_dim=layer.get("head_dim") or hidden_size // num_heads,
        qkv_bias=_bias(reader),
        output_bias="layers.0.self_attn.o_proj.bias" in reader.tensors,
        head_norm_eps=layer.get("rms_norm_eps", 1e-6)
        if reader.has("head_norm", "layers.0.self_attn.q_norm.weight")
        else None,
    )
    sinks = [f"layers.{number}.self_attn.sinks" in reader.tensors for number in range(num_layers)]
    wanted = reader.one("attention_sink_bias", default=any(sinks))
    if bool(wanted) != any(sinks):
        raise ValueError(f"attention_sink_bias is {wanted}, but the tensors say {any(sinks)}: the config is another's")
    return tuple(replace(shape, sinks=sink) for sink in sinks)


def _bias(reader: FamilyReader) -> bool:
    names = [f"layers.0.self_attn.{part}.bias" for part in ("q_proj", "qkv_proj")]
    return reader.has(
        "attention_bias", next((name for name in names if name in reader.tensors), names[0]), "attention_bias"
    )


def _window(reader: FamilyReader) -> int:
    window = reader.one("swa_window_size") if reader.one("use_swa") else None
    window = window or reader.one("sliding_window")
    if not isinstance(window, int) or window <= 0:
        raise ValueError("some layers look back on a window, but config.json has no sliding_window: add it")
    if reader.is_muse:  # transformers' two-sided mask counts the distance, so a row sees itself and `window` more
        return int(reader.note("sliding_window", window + 1, "sliding_window, a distance in this dialect"))
    return window


def read_masks(reader: FamilyReader, num_layers: int) -> tuple[LayerMask, ...]:
    kinds = layer_kinds(reader, num_layers)
    everywhere = bool(reader.one("use_swa", default=False))
    slides = [everywhere or kind == SLIDING for kind in kinds]
    window = _window(reader) if any(slides) else 0
    causal = _causality(reader, kinds, slides)
    anchored = any(slides) and _anchored(reader)
    return tuple(LayerMask(window if slide else 0, each, anchored) for slide, each in zip(slides, causal, strict=True))


def _anchored(reader: FamilyReader) -> bool:
    said = reader.one("window_from_anchor")
    if said is None:  # engines count from every row, whoever trained
        source = "default of speculators' trainers" if reader.is_speculators else "default"
        return bool(reader.note("window_from_anchor", reader.is_speculators, source))
    return bool(said)


def _causality(reader: FamilyReader, kinds: list[str], slides: list[bool]) -> list[bool]:
    """Whether a row of the block is hidden from the rows before it, by layer. Said for all layers, or for those with
    a window (speculators); else the layers that layer_types calls sliding are causal, and no others."""
    overall = reader.one("is_causal", "causal")
    both_ways = reader.one("sliding_window_non_causal")
    if overall is not None:
        if both_ways is not None and any(slides) and bool(overall) == bool(both_ways):
            raise ValueError(
                f"is_causal = {overall} and sliding_window_non_causal = {both_ways} contradict each other: remove one"
            )
        return [bool(overall)] * len(kinds)
    if both_ways is not None:
        causal, source = [slide and not both_ways for slide in slides], "sliding_window_non_causal, of windows only"
    elif reader.is_muse or (reader.kind == "dflash2" and reader.is_speculators):
        causal, source = [False] * len(kinds), "default of the dialect"
    else:
        causal, source = [kind == SLIDING for kind in kinds], "default"
    reader.note("causal_within_block", tuple(causal), source)
    return causal


def read_ropes(reader: FamilyReader, num_layers: int) -> tuple[dict[str, Any], ...]:
    """The drafter's own frequencies. They pair (j, j + half) unless rope_is_neox_style is false; how the target
    pairs its dimensions on disk says nothing about the drafter's."""
    layer, kinds = reader.layer, layer_kinds(reader, num_layers)
    keys = ("rope_parameters", "rope_theta", "rope_scaling")
    given = {key: layer[key] for key in keys if layer.get(key) is not None}
    if not given:
        raise ValueError(
            "the drafter's config.json names no rope_theta or rope_parameters: add what it was trained with"
        )
    reader.note("rope", given, "the drafter's config")
    nested = given.get("rope_parameters", {})
    if not any(isinstance(value, dict) for value in nested.values()):
        return (layer,) * len(kinds)
    missing = sorted({kind for kind in kinds if kind not in nested})
    if missing:
        raise ValueError(f"rope_parameters says nothing of {', '.join(missing)} layers: add it")
    by_kind = {kind: {**layer, "rope_parameters": nested[kind]} for kind in set(kinds)}
    return tuple(by_kind[kind] for kind in kinds)
