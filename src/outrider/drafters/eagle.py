"""EAGLE-1 and EAGLE-2 heads (and HASS): a layer or two over [embedding, the target's last state], fed back as it is.
The logits come from the target's own head. EAGLE-2 is the same network: its tree is a way to draft, not to train."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from outrider.config import SpeculativeConfig
from outrider.drafters.base import Reading, Sureness, drafters
from outrider.drafters.feedback import (
    FeedbackDrafter,
    FeedbackNetwork,
    HeadLayers,
    actual_names,
    layer_weights,
    read_layers,
    unless_same,
)
from outrider.drafters.reader import Reader
from outrider.layers.block import Block, DecoderBlock
from outrider.layers.embedding import Embedding, Head
from outrider.layers.linear import Linear
from outrider.layers.mla import LatentBlock
from outrider.layers.narrow import run_narrowing
from outrider.layers.norm import RMSNorm
from outrider.models.base import Target
from outrider.types import Batch, Checkpoint, Resolved, Weight

_INPUT_NORM = "layers.0.input_layernorm.weight"
_SPELLINGS = {  # of tensor names, by what they begin with
    "model.": "",
    "midlayer.": "layers.0.",
    "transformer.": "layers.0.",
    "fusion_fc.": "fc.",
    "embed_layernorm.": "embedding_norm.",
    "embedding_layernorm.": "embedding_norm.",
    "hidden_layernorm.": "layers.0.input_layernorm.",
    "lm_head_layernorm.": "norm.",
    "pre_lm_head_layernorm.": "norm.",
}


@dataclass(frozen=True)
class EagleConfig:
    layers: HeadLayers
    vocab_size: int
    fc_bias: bool
    embedding_norm: bool  # these three norms are additions of later trainers
    input_norm: bool  # before the first layer's attention
    final_norm: bool
    feeds_normed: bool  # where there is a final norm: what is fed back has been through it
    own_embedding: bool
    own_head: bool
    logit_scale: float
    names: dict[str, str | None] = field(repr=False)  # tensor of the file -> canonical name; None: carries nothing
    provenance: dict[str, Resolved] = field(repr=False)
    reads_normed: bool = True  # the target's state is taken after its final norm


def resolve(checkpoint: Checkpoint, target: Target) -> EagleConfig:
    names = {name: _canonical(name) for name in checkpoint.names()}
    reader = Reader(checkpoint.config, names.values())
    layers = read_layers(reader)
    final_norm = reader.has("final_norm", "norm.weight", "use_last_layernorm", "layernorms")
    config = EagleConfig(
        layers=layers,
        vocab_size=target.vocab_size,
        fc_bias=reader.has("fc_bias", "fc.bias", "bias", "fusion_bias"),
        embedding_norm=reader.has("embedding_norm", "embedding_norm.weight", "layernorms"),
        input_norm=reader.has("input_norm", _INPUT_NORM, "use_input_layernorm_in_first_layer", "layernorms"),
        final_norm=final_norm,
        feeds_normed=final_norm and _feeds_normed(reader, names),
        own_embedding=reader.has("own_embedding", "embed_tokens.weight"),
        own_head=reader.has("own_head", "lm_head.weight"),
        logit_scale=float(reader.get("logit_scale", default=1.0)),
        names=names,
        provenance=reader.provenance,
    )
    reader.note("taps", (target.num_layers,), "method eagle: the last state, after the target's final norm")
    if layers.hidden_size != target.hidden_size:
        raise ValueError(
            f"the head's hidden_size is {layers.hidden_size}, the target's {target.hidden_size}: an EAGLE head reads "
            "the target's states as they are, so it belongs to another target"
        )
    return config


def _canonical(name: str) -> str | None:
    """The canonical name of a tensor, None for one that carries nothing the network uses."""
    for spelling, canonical in _SPELLINGS.items():
        if name.startswith(spelling):
            name = canonical + name.removeprefix(spelling)
    return None if name.endswith("rotary_emb.inv_freq") else name


def _feeds_normed(reader: Reader, names: Mapping[str, str | None]) -> bool:
    """Some trainers' norm is the network's last, others' is only for the head: its name tells them apart."""
    actual = next(name for name, canonical in names.items() if canonical == "norm.weight")
    value = reader.get("norm_output")
    if value is None:
        value = reader.note("norm_output", "lm_head" not in actual, f"the name of tensor {actual}; ambiguous")
    return bool(value)


class BareBlock(Block):
    """A block whose attention reads the residual stream as it is."""

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        return self.run(x, x, batch)


class EagleNetwork(FeedbackNetwork):
    config: EagleConfig

    def __init__(self, config: EagleConfig) -> None:
        super().__init__()
        self.config = config
        size, eps = config.layers.hidden_size, config.layers.eps
        self.embedding_norm = RMSNorm(size, eps) if config.embedding_norm else None
        self.fc = Linear(2 * size, size, bias=config.fc_bias)
        blocks: list[nn.Module] = [*config.layers.build()]
        if not config.input_norm:
            first = blocks[0]
            if not isinstance(first, DecoderBlock):
                raise ValueError("method eagle knows no heads with latent attention: is this one for eagle3?")
            blocks[0] = BareBlock(first.attention, first.mlp, first.mlp_norm)
        self.layers = nn.ModuleList(blocks)
        self.norm = RMSNorm(size, eps) if config.final_norm else None
        self.embed = Embedding(config.vocab_size, size) if config.own_embedding else None
        self.head = Head(config.vocab_size, size) if config.own_head else None

    def forward(
        self, embedding: Tensor, state: Tensor, batch: Batch, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """-> what the head reads, and what is fed back, of these rows."""
        if self.embedding_norm is not None:
            embedding = self.embedding_norm(embedding)
        x = run_narrowing(self.layers, self.fc(torch.cat([embedding, state], dim=-1)), batch, rows)
        if self.norm is None:
            return x, x
        normed = self.norm(x)
        return normed, normed if self.config.feeds_normed else x


@drafters.register("eagle")
class Eagle(FeedbackDrafter):
    config: EagleConfig
    network: EagleNetwork

    def __init__(self, config: EagleConfig, target: Target, lookahead: int) -> None:
        super().__init__()
        self.config = config
        self.lookahead = lookahead
        self.taps = (target.num_layers,)
        self.network = EagleNetwork(config)
        self._target = (target,)  # in a tuple: shared, not owned

    @classmethod
    def build(cls, settings: SpeculativeConfig, target: Target, checkpoint: Checkpoint | None) -> Eagle:
        if checkpoint is None:
            raise ValueError('method eagle needs "model": the checkpoint of a head trained for this target')
        return cls(resolve(checkpoint, target), target, settings.num_speculative_tokens)

    @classmethod
    def recognises(cls, config: Mapping[str, Any]) -> Sureness:
        names = [str(name).lower() for name in config.get("architectures") or []]
        if config.get("speculators_model_type") == "eagle":
            return Sureness.BY_NAME
        if any("eagle" in name and not re.search("eagle-?3|peagle", name) for name in names):
            return Sureness.BY_NAME
        # the original repository calls its heads LlamaForCausalLM; `bias` is no key of a whole model
        is_head = "bias" in config and config.get("num_hidden_layers") == 1 and "draft_vocab_size" not in config
        return Sureness.BY_KEYS if is_head else Sureness.NO

    # drafting

    def _features(self, taps: Tensor) -> Tensor:
        (last,) = taps.unbind(1)
        return self._target[0].norm(last) if self.config.reads_normed else last

    # other ways to read the checkpoint

    def readings(self) -> list[Reading]:
        config = self.config
        advice = "no key of config.json says so: train the head on states after the final norm"
        readings = [Reading("state before the target's final norm", advice, {"reads_normed": not config.reads_normed})]
        if config.final_norm:
            now = str(not config.feeds_normed).lower()
            advice = f'set "norm_output": {now} at the top level of the head\'s config.json'
            readings.append(Reading(f"norm_output {now}", advice, {"feeds_normed": not config.feeds_normed}))
        return readings

    # loading

    def check(self) -> None:
        self.network.embed = unless_same(self.network.embed, self._target[0].embed)

    def provenance(self) -> dict[str, Resolved]:
        return self.config.provenance

    def ignores(self, name: str) -> bool:
        return self.config.names.get(name) is None

    def weights(self) -> dict[str, Weight]:
        network = self.network
        single = {
            "embedding_norm.weight": network.embedding_norm,
            "fc.weight": network.fc,
            "fc.bias": network.fc.bias,
            "norm.weight": network.norm,
        }
        weights = {name: Weight((name,)) for name, part in single.items() if part is not None}
        if network.embed is not None:
            weights["embed.weight"] = Weight(("embed_tokens.weight",))
        if network.head is not None:
            weights["head.weight"] = Weight(("lm_head.weight",))
        for number, block in enumerate(network.layers):
            assert isinstance(block, Block | LatentBlock)
            weights |= layer_weights(block, f"layers.{number}.", f"layers.{number}.")
        return actual_names({f"network.{name}": weight for name, weight in weights.items()}, self.config.names)
