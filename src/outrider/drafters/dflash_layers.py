"""The attention layers of a DFlash drafter: how a config.json describes them, and which keys the rows of a drafted
block see in each, of the context before it and of the block itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from outrider.drafters.feedback import twin
from outrider.drafters.reader import Reader
from outrider.kernels.attention import AttentionOptions
from outrider.layers.attention import AttentionShape
from outrider.layers.block import DecoderBlock
from outrider.models.base import require
from outrider.types import Batch

FULL, SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True)
class LayerMask:
    window: int  # 0: everything before is seen
    causal: bool  # a row of the block does not see those after it
    anchored: bool = False  # the window ends before the block's first row, and all rows see the same of the context

    def __post_init__(self) -> None:
        if not self.window:
            object.__setattr__(self, "anchored", False)

    @property
    def keys(self) -> int:
        """A window as attention counts it: keys up to a row's index, its own among them."""
        return self.window + 1 if self.anchored else self.window

    @property
    def bidirectional(self) -> bool:
        """Whether attention asks the batch for the last key that a row sees. An anchored row's own index says only
        where its window begins."""
        return self.anchored or not self.causal

    def shape(self, shape: AttentionShape) -> AttentionShape:
        return replace(shape, window=self.keys, bidirectional=self.bidirectional)

    def options(self, options: AttentionOptions) -> AttentionOptions:
        return replace(options, window=self.keys, bidirectional=self.bidirectional)

    def rows(self, batch: Batch) -> Batch:
        """A block's batch as this layer takes it."""
        if not self.anchored:
            return batch
        assert batch.last_key is not None, "only rows of a block have an anchor"
        anchor = batch.last_key - (batch.max_rows - 1)
        return replace(batch, indices=anchor, last_key=batch.indices if self.causal else batch.last_key)


def remasked(block: DecoderBlock, mask: LayerMask) -> DecoderBlock:
    """The same layer, with its weights and cache memory, under another mask."""
    other, attention = twin(block), twin(block.attention)
    attention.shape, attention.options = mask.shape(attention.shape), mask.options(attention.options)
    other.attention = attention
    other._native = None
    return other


class FamilyReader(Reader):
    """Knows which member of the family a checkpoint is, and whose."""

    def __init__(self, config: dict[str, Any], tensors: Iterable[str]) -> None:
        super().__init__(config, tensors)
        self.is_muse = config.get("model_type") == "muse_glimmer_assistant"
        kind = str(config.get("speculators_model_type", "")) + " ".join(config.get("architectures") or [])
        self.kind = next((name for name in ("dspark", "dflash2") if name in kind.lower()), "dflash")


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
    wanted = reader.get("attention_sink_bias", default=any(sinks))
    if bool(wanted) != any(sinks):
        raise ValueError(f"attention_sink_bias is {wanted}, but the tensors say {any(sinks)}: the config is another's")
    return tuple(replace(shape, sinks=sink) for sink in sinks)


def _bias(reader: FamilyReader) -> bool:
    names = [f"layers.0.self_attn.{part}.bias" for part in ("q_proj", "qkv_proj")]
    return reader.has(
        "attention_bias", next((name for name in names if name in reader.tensors), names[0]), "attention_bias"
    )


def _window(reader: FamilyReader) -> int:
    window = reader.get("swa_window_size") if reader.get("use_swa") else None
    window = window or reader.get("sliding_window")
    if not isinstance(window, int) or window <= 0:
        raise ValueError("some layers look back on a window, but config.json has no sliding_window: add it")
    if reader.is_muse:  # transformers' two-sided mask counts the distance, so a row sees itself and `window` more
        return int(reader.note("sliding_window", window + 1, "sliding_window, a distance in this dialect"))
    return window


def read_masks(reader: FamilyReader, num_layers: int) -> tuple[LayerMask, ...]:
    kinds = layer_kinds(reader, num_layers)
    everywhere = bool(reader.get("use_swa", default=False))
    slides = [everywhere or kind == SLIDING for kind in kinds]
    window = _window(reader) if any(slides) else 0
    causal = _causality(reader, kinds, slides)
    anchored = any(slides) and _anchored(reader)
    return tuple(LayerMask(window if slide else 0, each, anchored) for slide, each in zip(slides, causal, strict=True))


def _anchored(reader: FamilyReader) -> bool:
    said = reader.get("window_from_anchor")
    if said is None:  # engines count from every row, whoever trained
        source = "default of speculators' trainers" if reader.is_speculators else "default"
        return bool(reader.note("window_from_anchor", reader.is_speculators, source))
    return bool(said)


def _causality(reader: FamilyReader, kinds: list[str], slides: list[bool]) -> list[bool]:
    """Whether a row of the block is hidden from the rows before it, by layer. Said for all layers, or for those with
    a window (speculators); else the layers that layer_types calls sliding are causal, and no others."""
    overall = reader.get("is_causal", "causal")
    bidirectional = reader.get("sliding_window_non_causal")
    if overall is not None:
        if bidirectional is not None and any(slides) and bool(overall) == bool(bidirectional):
            raise ValueError(
                f"is_causal = {overall} and sliding_window_non_causal = {bidirectional} contradict each other: remove "
                "one of them"
            )
        return [bool(overall)] * len(kinds)
    if bidirectional is not None:
        causal, source = [slide and not bidirectional for slide in slides], "sliding_window_non_causal, of windows only"
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
