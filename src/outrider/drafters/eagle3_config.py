"""How an EAGLE-3 checkpoint is read: every field of every dialect becomes one canonical form, and says where from.
Dialects: the original, SpecForge's and DeepSpec's (flat keys), speculators' (nested), ModelOpt's (`eagle_config`)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from outrider.drafters.feedback import HeadLayers, read_layers
from outrider.drafters.reader import Reader, check_fc_width, check_vocabulary
from outrider.models.base import Target, refuse
from outrider.types import Checkpoint, Resolved

_EMBED, _HEAD = "embed_tokens.weight", "lm_head.weight"
_ALIASES = {"embed.weight": _EMBED, "head.weight": _HEAD}
_AUX_NORMS = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}


def canonical_names(parameter: str) -> str:
    return _ALIASES.get(parameter, parameter)


@dataclass(frozen=True)
class Eagle3Config:
    layers: HeadLayers
    target_hidden_size: int
    vocab_size: int
    draft_vocab_size: int
    taps: tuple[int, ...]
    use_taps: bool  # False: reads the target's last hidden state alone
    fc_bias: bool
    fc_norm: bool
    norm_before_fc: bool
    norm_output: bool  # what is fed back is normed
    norm_before_head: bool
    norm_before_residual: bool
    own_embedding: bool
    own_head: bool
    tied_head: bool  # its own embedding is the head
    maps_vocabulary: bool
    logit_scale: float
    names: dict[str, str | None] = field(repr=False)  # tensor of the file -> canonical name; None: carries nothing
    provenance: dict[str, Resolved] = field(repr=False)
    absolute_ids: bool = False  # d2t holds the target's ids, not how far they are from the draft's

    @property
    def hidden_size(self) -> int:
        return self.layers.hidden_size


def resolve(checkpoint: Checkpoint, target: Target, taps: tuple[int, ...] | None) -> Eagle3Config:
    names = {name: _canonical(name) for name in checkpoint.names()}
    reader = Reader(checkpoint.config, names.values())
    layers = read_layers(reader)
    use_taps = bool(reader.get("use_aux_hidden_state", default=True))
    if not use_taps:  # such a checkpoint may still carry what would read them
        names = {name: None if re.match(r"(fc|fc_norm|input_norm)\.", c or "") else c for name, c in names.items()}
    own_embedding, own_head = reader.has("own_embedding", _EMBED), reader.has("own_head", _HEAD)
    read_size = target.hidden_size if use_taps else layers.hidden_size
    config = Eagle3Config(
        layers=layers,
        target_hidden_size=reader.get("target_hidden_size", default=read_size),
        vocab_size=target.vocab_size,
        draft_vocab_size=reader.get("draft_vocab_size", default=reader.layer.get("vocab_size", target.vocab_size)),
        taps=_taps(reader, target, taps) if use_taps else (target.num_layers,),
        use_taps=use_taps,
        fc_bias=use_taps and reader.has("fc_bias", "fc.bias", "bias"),
        fc_norm=use_taps and bool(reader.get("fc_norm", "use_aux_norm", default=False)),
        norm_before_fc=use_taps and bool(reader.get("norm_before_fc", default=False)),
        norm_output=_norm_output(reader),
        norm_before_head=bool(reader.get("norm_before_head", default=True)),
        norm_before_residual=_norm_before_residual(reader),
        own_embedding=own_embedding,
        own_head=own_head,
        tied_head=own_embedding and not own_head and bool(reader.layer.get("tie_word_embeddings")),
        maps_vocabulary=reader.has("maps_vocabulary", "d2t"),
        logit_scale=float(reader.get("logit_scale", default=1.0)),
        names=names,
        provenance=reader.provenance,
    )
    _check(config, checkpoint, target)
    return config


def _canonical(name: str) -> str | None:
    """The canonical name of a tensor, None for one that carries nothing the network uses."""
    name = name.removeprefix("model.")
    name = re.sub(r"^midlayer\.(\d+)\.", r"layers.\1.", name).replace("midlayer.", "layers.0.")
    for old, new in _AUX_NORMS.items():
        name = name.replace(old, new)
    if name == "t2d" or name.endswith("rotary_emb.inv_freq"):
        return None
    if re.fullmatch(r"layers\.[1-9]\d*\.hidden_norm\.weight", name):  # only the first layer has a use for it
        return None
    return name


@dataclass(frozen=True)
class _Ids:
    """Layer ids of a checkpoint as taps."""

    taps: tuple[int, ...]
    source: str


def _taps(reader: Reader, target: Target, chosen: tuple[int, ...] | None) -> tuple[int, ...]:
    num_layers = target.num_layers
    if chosen is not None:
        found = [_Ids(tuple(sorted(chosen)), "speculative_config taps")]
    else:
        found = _named_ids(reader, num_layers) or [_Ids(usual_taps(num_layers), "default (2, n/2, n-3)")]
    if len({ids.taps for ids in found}) > 1:
        said = "; ".join(f"{ids.source}: {list(ids.taps)}" for ids in found)
        raise ValueError(f'the checkpoint names its taps twice and they differ ({said}): set "taps" to the right ones')
    taps, source = found[0].taps, found[0].source
    if len(set(taps)) != len(taps) or not all(0 <= tap <= num_layers for tap in taps):
        raise ValueError(
            f"taps {list(taps)} ({source}) do not fit a target of {num_layers} layers, whose taps are 0..{num_layers}: "
            'the head belongs to another target, or set "taps" in speculative_config'
        )
    count = reader.get("num_aux_hidden_states", default=len(taps))
    if count != len(taps):
        raise ValueError(
            f"num_aux_hidden_states is {count}, but {len(taps)} taps are named ({source}): "
            f'set "taps" in speculative_config to {count} of them'
        )
    return reader.note("taps", taps, source)


def usual_taps(num_layers: int) -> tuple[int, ...]:
    """What nearly all heads read, and every trainer's default."""
    return (2, num_layers // 2, num_layers - 3)


def distinct_taps(num_layers: int) -> tuple[int, ...]:
    """The usual ones of a new head; a target of few layers has no three of them."""
    usual = usual_taps(num_layers)
    return usual if len(set(usual)) == 3 and min(usual) > 0 and usual == tuple(sorted(usual)) else (num_layers - 1,)


def _named_ids(reader: Reader, num_layers: int) -> list[_Ids]:
    """Ids at the top level, and `layer_ids` of eagle_config, count layers done, as taps do. Other ids in eagle_config,
    and DeepSpec's `target_layer_ids`, name the layer whose output is meant, so one is added. Not all checkpoints keep
    to it, so doubts are told; only DeepSpec writes its key."""
    nested, top = reader.places.get("eagle_config", {}), reader.places["config.json"]
    key, deepspec = "eagle_aux_hidden_state_layer_ids", "target_layer_ids"
    given = [
        (key, top.get(key), 0),
        (deepspec, top.get(deepspec), 1),
        (f"eagle_config {key}", nested.get(key), 1),
        ("eagle_config layer_ids", nested.get("layer_ids"), 0),
    ]
    readings = []
    for name, ids, shift in given:
        if not ids:
            continue
        taps = tuple(sorted(number + shift for number in ids))
        other = tuple(tap + (-1 if shift else 1) for tap in taps)
        ways = ("read as layers done", "read as outputs (+1)")
        source = f"{name}, {ways[shift]}"
        if other == usual_taps(num_layers):
            source += f"; doubtful: {ways[1 - shift]} they are the usual {list(other)}"
        elif taps != usual_taps(num_layers) and not reader.is_speculators and name != deepspec:
            source += f"; ambiguous: {ways[1 - shift]} they are {list(other)}"
        readings.append(_Ids(taps, source))
    return readings


def _norm_output(reader: Reader) -> bool:
    """Engines and speculators' trainer: what is fed back is normed. SpecForge's trainer: what the head reads is, and
    the state is fed back as it is."""
    value = bool(reader.get("norm_output", default=False))
    source = reader.provenance["norm_output"].source
    if source != "default" and not reader.is_speculators:
        trained = "the head reads the normed state" if value else "the head reads the state without a norm"
        source += f"; ambiguous: to SpecForge's trainer it says that {trained}, and nothing of what is fed back"
    return bool(reader.note("norm_output", value, source))


def _norm_before_residual(reader: Reader) -> bool:
    # speculators checkpoints that do not say were trained with it; all other dialects without.
    value = reader.get("norm_before_residual", default=reader.is_speculators)
    if reader.is_speculators and reader.provenance["norm_before_residual"].source == "default":
        reader.note("norm_before_residual", True, "default where the speculators format is silent; ambiguous")
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
    eagle = checkpoint.config.get("eagle_config") or {}
    refuse(eagle, "use_mtp_layernorm", False)
    if config.layers.num_layers > 1:
        refuse(eagle, "next_layer_regular", True)
    _check_fc(config, checkpoint)
    if not config.use_taps and config.hidden_size != target.hidden_size:
        raise ValueError(
            f"use_aux_hidden_state is false, so the head's hidden size ({config.hidden_size}) must be the target's "
            f"({target.hidden_size})"
        )
    has_head = config.own_head or config.tied_head
    check_vocabulary(config, target, has_head=has_head)


def _check_fc(config: Eagle3Config, checkpoint: Checkpoint) -> None:
    actual = next((name for name, canonical in config.names.items() if canonical == "fc.weight"), None)
    if config.use_taps and actual is not None:
        check_fc_width(checkpoint.shape(actual)[-1], config.taps, config.target_hidden_size)
