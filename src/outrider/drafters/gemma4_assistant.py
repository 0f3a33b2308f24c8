"""Gemma 4's assistant: a few layers with queries only, which read keys and values that the target wrote.
It writes none itself, so all drafted tokens are asked for from one position, by default that of the newest token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from outrider.config import SpeculativeConfig
from outrider.drafters.base import Drafter, Reading, Sureness, draft_chain, drafters, no_draft
from outrider.drafters.feedback import twin
from outrider.layers.attention import AttentionShape, SelfAttention
from outrider.layers.embedding import Head
from outrider.layers.linear import Linear
from outrider.layers.mlp import GatedMLP
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import Rotary
from outrider.layers.sandwich import sandwich_weights
from outrider.layers.shared_attention import SharedAttention, shared_attention_weights
from outrider.models.base import Target, nested_text, refuse, require
from outrider.models.gemma3 import gated_activation, rope_parameters
from outrider.models.gemma4 import DEFAULT_ROPE, DEFAULTS, Gemma4Block, head_shapes
from outrider.types import Batch, Checkpoint, Draft, Hidden, Resolved, Step, Verdict, Weight

ARCHITECTURES = ("Gemma4AssistantForCausalLM", "Gemma4UnifiedAssistantForCausalLM")
POSITIONS = ("the newest token", "the token before the newest")  # by position_lag
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"


@dataclass(frozen=True)
class AssistantConfig:
    text: dict[str, Any]  # of its own layers
    kinds: list[str]
    target_size: int
    num_centroids: int  # 0: the head is whole
    num_chosen: int  # centroids whose tokens are looked at
    head_name: str  # the tensor that is the head
    num_window_keys: int  # that layers with a window see; none of them is the newest token's, which has no key yet
    position_lag: int  # 0: drafts are asked for from the newest token's position; 1: from that of the token before it
    provenance: dict[str, Resolved]


def resolve(checkpoint: Checkpoint, target: Target) -> AssistantConfig:
    config = checkpoint.config
    if not isinstance(config.get("text_config"), dict):
        raise ValueError("config.json of a Gemma 4 assistant lacks text_config")
    text = {**DEFAULTS, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0, **nested_text(config)}
    require(text, "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")
    require(text, "num_key_value_heads", "head_dim", "global_head_dim", "max_position_embeddings")
    num_layers = text["num_hidden_layers"]
    for key, *supported in (
        ("hidden_size_per_layer_input", 0),
        ("vocab_size_per_layer_input", 0),
        ("enable_moe_block", False),
        ("use_double_wide_mlp", False),
        ("attn_logit_softcapping",),
        ("num_kv_shared_layers", 0, num_layers),  # all of them in any case
    ):
        refuse(text, key, *supported)
    (kinds,) = require(text, "layer_types")
    if len(kinds) != num_layers:
        raise ValueError(f"config.json: layer_types has {len(kinds)} entries for {num_layers} layers")
    kinds = [*kinds[:-1], "full_attention"]  # the last one is, whatever the config says
    (target_size,) = require(config, "backbone_hidden_size")
    ordered = bool(config.get("use_ordered_embeddings", False))
    num_centroids, num_chosen = require(config, "num_centroids", "centroid_intermediate_top_k") if ordered else (0, 0)
    tied = bool(config.get("tie_word_embeddings", True))
    head_name = EMBEDDING if tied and EMBEDDING in checkpoint.names() else HEAD
    num_window_keys, window_source = _window(config, text, kinds)
    position_lag = config.get("position_lag", 0)
    if position_lag not in (0, 1):
        raise ValueError(f"config.json: position_lag must be 0 or 1, not {position_lag!r}")
    doubt = "; ambiguous: engines differ"
    provenance = {
        "backbone_hidden_size": Resolved(target_size, "config.json"),
        "layer_types": Resolved(tuple(kinds), "text_config"),
        "head": Resolved(head_name, "tie_word_embeddings and tensors"),
        "centroids": Resolved(f"{num_chosen} of {num_centroids}" if ordered else None, "use_ordered_embeddings"),
        "window keys": Resolved(num_window_keys, window_source),
        "position": Resolved(
            f"of {POSITIONS[position_lag]}, for all drafts",
            "config.json position_lag" if "position_lag" in config else f"default{doubt}",
        ),
    }
    resolved = AssistantConfig(
        text, kinds, target_size, num_centroids, num_chosen, head_name, num_window_keys, position_lag, provenance
    )
    _check(resolved, target)
    return resolved


def _window(config: dict[str, Any], text: dict[str, Any], kinds: list[str]) -> tuple[int, str]:
    """How many keys layers with a window see, and who says so. By default those that the newest token's own position
    would see: it is one of the window, but has no key yet."""
    if "sliding_attention" not in kinds:
        return 0, "layer_types"
    (window,) = require(text, "sliding_window")
    if window < 2:
        raise ValueError("config.json: sliding_window must be at least 2, or such layers would see nothing")
    if "num_window_keys" in config:
        return config["num_window_keys"], "config.json num_window_keys"
    return window - 1, "default, sliding_window less the newest token; ambiguous: engines differ"


def _check(config: AssistantConfig, target: Target) -> None:
    """What can be known to be wrong before any weight is read."""
    if config.target_size != target.hidden_size:
        raise ValueError(
            f"backbone_hidden_size is {config.target_size}, but the target's hidden size {target.hidden_size}: the "
            "assistant belongs to another target"
        )
    if config.text["vocab_size"] != target.vocab_size:
        raise ValueError(
            f"the assistant's vocab_size is {config.text['vocab_size']}, the target's {target.vocab_size}: it belongs "
            "to another target"
        )
    for kind, (head_dim, num_kv_heads) in head_shapes(config.text, config.kinds).items():
        source = target.shared_layers.get(kind)
        if source is None:
            known = ", ".join(sorted(target.shared_layers)) or "none"
            raise ValueError(f"the assistant reads a {kind} layer, but the target has no such layer to read ({known})")
        shape = source.whole_shape
        if (head_dim, num_kv_heads) != (shape.head_dim, shape.num_kv_heads):
            raise ValueError(
                f"the assistant's {kind} layers read {num_kv_heads} key/value heads of {head_dim}, but the target's "
                f"have {shape.num_kv_heads} of {shape.head_dim}: it belongs to another target"
            )
    if config.num_centroids and config.text["vocab_size"] % config.num_centroids:
        raise ValueError(
            f"config.json: num_centroids {config.num_centroids} does not divide the vocabulary of "
            f"{config.text['vocab_size']}"
        )
    if not 0 <= config.num_chosen <= config.num_centroids:
        raise ValueError(
            f"config.json: centroid_intermediate_top_k {config.num_chosen} of {config.num_centroids} centroids"
        )


class CentroidHead(Head):
    """Looks only at the tokens of the centroids that are nearest; all others are out of the question."""

    is_multiplied = False

    def __init__(self, vocab_size: int, hidden_size: int, num_centroids: int, num_chosen: int) -> None:
        super().__init__(vocab_size, hidden_size, is_split=False)
        self.centroids = Linear(hidden_size, num_centroids)
        self.num_chosen = num_chosen
        # the tokens of the first centroid, then of the second, ...
        self.ordering = nn.Parameter(torch.zeros(vocab_size, dtype=torch.long), requires_grad=False)

    def forward(self, hidden: Tensor, out: Tensor | None = None) -> Tensor:
        chosen = self.centroids(hidden).topk(self.num_chosen, dim=-1).indices  # [R, k]
        ids = self.ordering.view(len(self.centroids.weight), -1)[chosen].flatten(1)  # [R, n]
        near = (self.weight[ids] * hidden[:, None]).sum(-1)
        logits = torch.full((len(hidden), self.vocab_size), -torch.inf, dtype=near.dtype, device=near.device)
        return torch.scatter(logits, 1, ids, near, out=out)


class AssistantNetwork(nn.Module):
    def __init__(self, config: AssistantConfig, sources: Mapping[str, SelfAttention]) -> None:
        super().__init__()
        self.config = config
        text, size = config.text, config.text["hidden_size"]
        self.pre_projection = Linear(2 * config.target_size, size)
        heads = head_shapes(text, config.kinds)
        rotaries = {kind: self._rotary(kind, heads[kind][0]) for kind in heads}
        self.layers = nn.ModuleList(
            self._block(SharedAttention(sources[kind], self._shape(kind), rotaries[kind], text["rms_norm_eps"]))
            for kind in config.kinds
        )
        self.norm = self._norm()
        self.post_projection = Linear(size, config.target_size)
        vocab_size = text["vocab_size"]
        self.head = (
            CentroidHead(vocab_size, size, config.num_centroids, config.num_chosen)
            if config.num_centroids
            else Head(vocab_size, size)
        )

    def _norm(self) -> RMSNorm:
        return RMSNorm(self.config.text["hidden_size"], self.config.text["rms_norm_eps"], wide=True)

    def _rotary(self, kind: str, head_dim: int) -> Rotary:
        given = rope_parameters(self.config.text) or DEFAULT_ROPE
        (settings,) = require(given, kind)
        lengths = {"max_position_embeddings": self.config.text["max_position_embeddings"]}
        return Rotary.from_config({**lengths, "rope_parameters": settings}, head_dim)

    def _shape(self, kind: str) -> AttentionShape:
        text = self.config.text
        head_dim, num_kv_heads = head_shapes(text, self.config.kinds)[kind]
        bias = bool(text.get("attention_bias", False))
        return AttentionShape(
            hidden_size=text["hidden_size"],
            num_heads=text["num_attention_heads"],
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            window=self.config.num_window_keys if kind == "sliding_attention" else 0,
            qkv_bias=bias,
            output_bias=bias,
        )

    def _block(self, attention: SharedAttention) -> Gemma4Block:
        text = self.config.text
        mlp = GatedMLP(text["hidden_size"], text["intermediate_size"], activation=gated_activation(text))
        return Gemma4Block(attention, mlp, [self._norm() for _ in range(4)], None, None)

    def with_window(self, num_keys: int) -> AssistantNetwork:
        """The same network, where layers with a window see so many keys."""
        other = twin(self)
        other.layers = nn.ModuleList()
        for layer in self.layers:
            assert isinstance(layer, Gemma4Block)
            changed = twin(layer)
            if isinstance(layer.attention, SharedAttention) and layer.attention.shape.window:
                attention = twin(layer.attention)
                attention.shape = replace(attention.shape, window=num_keys)
                attention.options = replace(attention.options, window=num_keys)
                changed.attention = attention
            other.layers.append(changed)
        return other

    def forward(self, embedding: Tensor, state: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """The target's embedding and hidden state [B, H_t] -> what the head reads, and what is fed back."""
        x = self.pre_projection(torch.cat([embedding, state], dim=-1))
        for layer in self.layers:
            x = layer(x, batch)
        normed = self.norm(x)
        return normed, self.post_projection(normed)


@drafters.register("gemma4_assistant")
class Gemma4Assistant(Drafter):
    def __init__(self, config: AssistantConfig, target: Target, lookahead: int) -> None:
        super().__init__()
        self.config = config
        self.lookahead = lookahead
        self.network = AssistantNetwork(config, target.shared_layers)
        self._target = (target,)  # in a tuple: shared, not owned

    @classmethod
    def build(cls, settings: SpeculativeConfig, target: Target, checkpoint: Checkpoint | None) -> Gemma4Assistant:
        if checkpoint is None:
            raise ValueError('method gemma4_assistant needs "model": the assistant that was trained for this target')
        if not target.shared_layers:
            raise ValueError("method gemma4_assistant reads keys and values of the target, and this one shares none")
        return cls(resolve(checkpoint, target), target, settings.num_speculative_tokens)

    @classmethod
    def recognises(cls, config: Mapping[str, Any]) -> Sureness:
        named = any(name in ARCHITECTURES for name in config.get("architectures") or [])
        return Sureness.BY_NAME if named else Sureness.NO

    @classmethod
    def supports(cls, target: type[Target]) -> bool:
        return target.shared_layers is not Target.shared_layers

    # drafting

    def propose(self, step: Step, hidden: Hidden, verdict: Verdict) -> Draft:
        """There is no text to follow: what it reads of it is the target's."""
        if not step.depth:
            return no_draft(step, self.lookahead)
        (target,) = self._target
        slots = step.batch.slots
        rows = self._rows(step, verdict)
        newest = step.state.tokens[slots, step.state.lengths[slots] - 1]
        # the row that said the newest token, as the target's head saw it
        state = target.norm(hidden.last[step.batch.query_start[:-1].long() + verdict.kept - 1])

        def advance(tokens: Tensor, ahead: int) -> Tensor:
            nonlocal state
            normed, state = self.network(target.embed(tokens), state, rows)
            return self.network.head(normed)

        return draft_chain(step, self.lookahead, advance(newest, 0), advance)

    def _rows(self, step: Step, verdict: Verdict) -> Batch:
        """One row for each request: sees what the target has computed, by default from the place right after it."""
        batch = step.batch
        request = torch.arange(len(batch.slots), device=batch.slots.device)
        seen = step.starts + verdict.kept - 1  # index of the last key
        return replace(
            batch,
            input_ids=request,
            positions=step.state.positions_at(batch.slots, seen + 1 - self.config.position_lag),
            indices=seen,
            query_start=torch.arange(len(request) + 1, dtype=torch.int32, device=request.device),
            request=request,
            row_slots=batch.slots,
            write_locations=torch.zeros_like(request),  # nothing is written
            max_rows=1,
            recurrence=None,
            features=None,
            last_key=None,
            memo={},
        )

    # other ways to read the checkpoint

    def readings(self) -> list[Reading]:
        """Four engines give four answers: how many keys a window holds, and where drafts are asked for from."""
        config, readings = self.config, []
        if config.num_window_keys:
            window = config.text["sliding_window"]
            for count in (window - 1, window, window + 1):
                if count != config.num_window_keys:
                    advice = f'set "num_window_keys": {count} at the top level of the assistant\'s config.json'
                    readings.append(Reading(f"window of {count} keys", advice, {"num_window_keys": count}))
        lag = 1 - config.position_lag
        advice = f'set "position_lag": {lag} at the top level of the assistant\'s config.json'
        return [*readings, Reading(f"position of {POSITIONS[lag]}", advice, {"position_lag": lag})]

    def reread(self, **changes: Any) -> Self:
        other = twin(self)
        other.config = replace(self.config, **changes)
        if "num_window_keys" in changes:
            other.network = self.network.with_window(other.config.num_window_keys)
        return other

    # loading

    def check(self) -> None:
        head = self.network.head
        if isinstance(head, CentroidHead):
            expected = torch.arange(head.vocab_size, device=head.ordering.device)
            if not torch.equal(head.ordering.sort().values, expected):
                raise ValueError("masked_embedding.token_ordering must hold every token id exactly once")

    def provenance(self) -> dict[str, Resolved]:
        return self.config.provenance

    def ignores(self, name: str) -> bool:
        return name in (EMBEDDING, HEAD)  # whichever of the two is not the head: the same again, or never looked up

    def weights(self) -> dict[str, Weight]:
        weights = {
            "pre_projection.weight": Weight(("pre_projection.weight",)),
            "post_projection.weight": Weight(("post_projection.weight",)),
            "norm.weight": Weight(("model.norm.weight",)),
            "head.weight": Weight((self.config.head_name,)),
        }
        if isinstance(self.network.head, CentroidHead):
            weights["head.centroids.weight"] = Weight(("masked_embedding.centroids.weight",))
            weights["head.ordering"] = Weight(("masked_embedding.token_ordering",))
        for number, layer in enumerate(self.network.layers):
            assert isinstance(layer, Gemma4Block)
            assert isinstance(layer.attention, SharedAttention)
            source, name = f"model.layers.{number}.", f"layers.{number}."
            block = sandwich_weights(layer, source) | {"scalar": Weight((f"{source}layer_scalar",))}
            block |= shared_attention_weights(layer.attention, f"{source}self_attn.", "attention.")
            weights |= {f"{name}{parameter}": weight for parameter, weight in block.items()}
        return {f"network.{parameter}": weight for parameter, weight in weights.items()}
