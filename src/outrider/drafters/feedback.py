"""What drafting heads of the EAGLE family share: their layers, how a config.json describes them, and the feedback loop.
A head reads the target's state before each token beside the token's embedding; then it goes on from its own output."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, TypeVar

import torch
from torch import Tensor, nn

from outrider.drafters.base import (
    SHARPNESS,
    Drafter,
    chain_rows,
    draft_chain,
    draft_positions,
    extend,
    no_draft,
    shifted,
    single_rows,
)
from outrider.drafters.reader import Reader
from outrider.kernels.chain import NativeChain
from outrider.kernels.dispatch import use_native
from outrider.kernels.sampling import choose, drawing_of
from outrider.layers.attention import AttentionShape, SelfAttention
from outrider.layers.block import Block, DecoderBlock, attention_weights, mlp_weights
from outrider.layers.embedding import Embedding, Head, embed_rows
from outrider.layers.mla import LatentAttention, LatentBlock, LatentShape, latent_weights
from outrider.layers.mlp import GatedMLP
from outrider.layers.rotary import Rotary
from outrider.models.base import Target, refuse, require
from outrider.types import Batch, Draft, Hidden, Step, Verdict, Weight

FIRST_KEY = 1  # an entry stands at the index of its token and needs the state before it, so token 0 has none

Module = TypeVar("Module", bound=nn.Module)


# ---- the layers ----


@dataclass(frozen=True)
class HeadLayers:
    """Decoder layers like a target's, but few."""

    hidden_size: int
    intermediate_size: int
    attention: AttentionShape | LatentShape
    windows: tuple[int, ...]  # of each layer; 0: none
    rope: dict[str, Any]
    eps: float
    mlp_bias: bool

    @property
    def num_layers(self) -> int:
        return len(self.windows)

    def build(self, input_size: int | None = None) -> list[DecoderBlock | LatentBlock]:
        """`input_size`: what the first layer's attention reads, where it differs from the hidden size."""
        turning = self.attention.rotary_dim if isinstance(self.attention, LatentShape) else self.attention.head_dim
        rotary = Rotary.from_config(self.rope, turning)
        blocks: list[DecoderBlock | LatentBlock] = []
        for number, window in enumerate(self.windows):
            shape = replace(self.attention, input_size=None if number else input_size)
            mlp = GatedMLP(self.hidden_size, self.intermediate_size, bias=self.mlp_bias)
            if isinstance(shape, LatentShape):
                blocks.append(LatentBlock(LatentAttention(shape, rotary), mlp, self.eps))
            else:
                blocks.append(DecoderBlock(SelfAttention(replace(shape, window=window), rotary), mlp, self.eps))
        return blocks


def layer_weights(block: Block | LatentBlock, source: str, name: str) -> dict[str, Weight]:
    """`source` is e.g. "layers.0.", `name` the block's own, e.g. "rest.0."."""
    assert isinstance(block.mlp, GatedMLP)
    weights = {f"{name}mlp_norm.weight": Weight((f"{source}post_attention_layernorm.weight",))}
    if isinstance(block, DecoderBlock | LatentBlock):
        weights[f"{name}attention_norm.weight"] = Weight((f"{source}input_layernorm.weight",))
    if isinstance(block, LatentBlock):
        weights |= latent_weights(block.attention.whole_shape, f"{source}self_attn.", f"{name}attention.")
    else:
        weights |= attention_weights(block.attention, f"{source}self_attn.", f"{name}attention.")
    return weights | mlp_weights(block.mlp, f"{source}mlp.", f"{name}mlp.")


def read_layers(reader: Reader) -> HeadLayers:
    layer = reader.layer
    refuse(layer, "hidden_act", "silu")
    hidden_size, intermediate_size = require(layer, "hidden_size", "intermediate_size")
    num_layers = layer.get("num_hidden_layers", 1)
    attention = _attention(reader)
    return HeadLayers(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        attention=attention,
        windows=_windows(reader, num_layers, attention),
        rope=_rope(reader),
        eps=layer.get("rms_norm_eps", 1e-6),
        mlp_bias=reader.has("mlp_bias", "layers.0.mlp.down_proj.bias", "mlp_bias"),
    )


def _attention(reader: Reader) -> AttentionShape | LatentShape:
    layer, source = reader.layer, "layers.0.self_attn."
    if f"{source}kv_a_proj_with_mqa.weight" in reader.tensors:
        reader.note("attention", "latent", "tensors")
        biased = reader.has("attention_bias", f"{source}kv_a_proj_with_mqa.bias", "attention_bias")
        return replace(LatentShape.from_config(layer), bias=biased)
    reader.note("attention", "grouped", "tensors")
    hidden_size, num_heads = require(layer, "hidden_size", "num_attention_heads")
    has_norm = reader.has("head_norm", f"{source}q_norm.weight")
    return AttentionShape(
        hidden_size=hidden_size,
        num_heads=num_heads,
        num_kv_heads=layer.get("num_key_value_heads") or num_heads,
        head_dim=layer.get("head_dim") or hidden_size // num_heads,
        qkv_bias=reader.has("attention_bias", f"{source}q_proj.bias", "attention_bias", "qkv_bias"),
        output_bias=f"{source}o_proj.bias" in reader.tensors,
        head_norm_eps=layer.get("rms_norm_eps", 1e-6) if has_norm else None,
    )


def _windows(reader: Reader, num_layers: int, attention: AttentionShape | LatentShape) -> tuple[int, ...]:
    """How far each layer looks back. Only `layer_types` says that one does not see everything."""
    kinds, window = reader.layer.get("layer_types"), reader.layer.get("sliding_window")
    if not kinds:
        unused = window and reader.layer.get("use_sliding_window") is not False
        doubt = f"; sliding_window={window} is not heeded, as there are no layer_types" if unused else ""
        return reader.note("windows", (0,) * num_layers, f"default{doubt}")
    if len(kinds) < num_layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise ValueError(
            f"layer_types {kinds} must say full_attention or sliding_attention for each of {num_layers} layers"
        )
    slides = [kind == "sliding_attention" for kind in kinds[:num_layers]]
    if any(slides) and (not window or isinstance(attention, LatentShape)):
        raise ValueError("layer_types has sliding_attention, but there is no sliding_window, or attention is latent")
    return reader.note("windows", tuple(window if slide else 0 for slide in slides), "layer_types and sliding_window")


def _rope(reader: Reader) -> dict[str, Any]:
    """There is no position table to outgrow: max_position_embeddings of the head is not read."""
    keys = ("rope_theta", "rope_scaling", "rope_parameters")
    said = {key: reader.layer[key] for key in keys if reader.layer.get(key) is not None}
    reader.note("rope", said or {"rope_theta": 10000.0}, "the head's config" if said else "default")
    return reader.layer  # where it is silent, trainers have turned with base 10000, whatever the target does


# ---- drafting ----


class FeedbackConfig(Protocol):
    @property
    def logit_scale(self) -> float: ...


class FeedbackNetwork(nn.Module):
    """(embedding, state, batch, rows) -> what the head reads, and what is fed back, of those rows (None: of all)."""

    config: FeedbackConfig
    embed: Embedding | None  # None: the target's
    head: Head | None

    def follow(self, embedding: Tensor, state: Tensor, batch: Batch) -> None:
        """Remembers the same. Subclasses may leave out what only drafts need."""
        self(embedding, state, batch)


class FeedbackDrafter(Drafter):
    """Subclasses say what a row's state is (`_features`)."""

    network: FeedbackNetwork
    config: FeedbackConfig
    _target: tuple[Target]  # in a tuple: shared, not owned
    reads_last = False

    @property
    def embed(self) -> Embedding:
        return self.network.embed if self.network.embed is not None else self._target[0].embed

    def logits(self, normed: Tensor) -> Tensor:
        head = self.network.head if self.network.head is not None else self._target[0].head
        return head(normed) * self.config.logit_scale if self.config.logit_scale != 1.0 else head(normed)

    def _features(self, taps: Tensor) -> Tensor:
        """The target's taps [T, n, H_t] -> the network's state [T, H]."""
        raise NotImplementedError

    def propose(self, step: Step, hidden: Hidden, verdict: Verdict) -> Draft:
        extension = extend(step, FIRST_KEY, lag=1)  # training counted positions by the hidden state
        state = self._features(shifted(hidden, extension, step))
        if not step.depth:
            self.network.follow(embed_rows(self.embed, extension.batch), state, extension.batch)
            return no_draft(step, self.lookahead)
        normed, feedback = self._run(extension.batch, state, extension.last)

        def advance(tokens: Tensor, ahead: int) -> Tensor:
            nonlocal feedback
            normed, feedback = self._run(single_rows(step, ahead, tokens, FIRST_KEY, lag=1), feedback)
            return self.logits(normed)

        first = self.logits(normed)
        chain = self.native_chain(drawn=not step.sampling.greedy) if use_native(first) else None
        if chain is not None and (step.sampling.greedy or not step.sampling.extra):
            return draft_natively(chain, step, self.lookahead, first, feedback)
        return draft_chain(step, self.lookahead, first, advance, self.target_ids())

    def native_chain(self, *, drawn: bool) -> tuple[NativeChain, Rotary] | None:
        """What drafts the tokens after the first in one call, where it can; and what its layer turns by. `drawn`: they
        are not just the best ones."""
        return None

    def reread(self, **changes: Any) -> Self:
        other = twin(self)
        other.config = replace(self.config, **changes)  # type: ignore[type-var]
        other.taps = changes.get("taps", self.taps)
        other.network = twin(self.network)
        other.network.config = other.config
        return other

    def _run(self, batch: Batch, state: Tensor, rows: Tensor | None = None) -> tuple[Tensor, Tensor]:
        return self.network(embed_rows(self.embed, batch), state, batch, rows)


def draft_natively(
    chain: tuple[NativeChain, Rotary], step: Step, lookahead: int, first: Tensor, feedback: Tensor
) -> Draft:
    """As draft_chain(): `first` [B, V] are the logits after the newest token, `feedback` [B, H] the state."""
    run, rotary = chain
    rows, depth = chain_rows(step, FIRST_KEY, lag=1), step.depth
    tokens = torch.zeros(lookahead, len(first), dtype=torch.long)
    slots, positions, ids = step.batch.slots, draft_positions(step), run.parts.ids
    choose(first, step.sampling, slots, positions[0], ids, tokens[0], SHARPNESS)
    if depth > 1:
        drawing = None if step.sampling.greedy else drawing_of(step.sampling, slots, positions, ids, SHARPNESS)
        run(tokens[:depth], feedback, rows, rotary(rows), drawing)
    return Draft(tokens.T, torch.where(step.emits, depth, 0))


def unless_same(own: Embedding | None, shared: Embedding) -> Embedding | None:
    """Many checkpoints carry the target's embedding once more; then it need not stay in memory twice."""
    if own is None or own.scale != shared.scale:
        return own
    return None if own.holds_the_same_as(shared) else own


def twin(module: Module) -> Module:
    """A copy with settings of its own that shares every parameter and layer."""
    other = copy.copy(module)
    other._modules = {**module._modules}
    return other


def actual_names(weights: Mapping[str, Weight], names: Mapping[str, str | None]) -> dict[str, Weight]:
    """Weights in canonical names -> in those of the file. `names`: tensor of the file -> canonical name."""
    actual = {canonical: name for name, canonical in names.items() if canonical is not None}
    return {
        parameter: Weight(tuple(actual.get(name, name) for name in weight.names), weight.combine)
        for parameter, weight in weights.items()
    }
