"""EAGLE-3: a small network reads several of the target's hidden states and feeds its own back to go on.
One network with options; every published dialect of config.json and tensor names is resolved here, with provenance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from outrider.config import SpeculativeConfig
from outrider.drafters.base import Drafter, draft_chain, drafters, extend, no_draft, shifted, single_rows
from outrider.drafters.eagle3_config import Eagle3Config, canonical_names, resolve
from outrider.layers.attention import SelfAttention
from outrider.layers.block import Block, DecoderBlock, attention_weights, block_weights, mlp_weights
from outrider.layers.embedding import Embedding, Head, embed_rows
from outrider.layers.linear import Linear
from outrider.layers.mlp import GatedMLP
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import Rotary
from outrider.models.base import Target
from outrider.types import Batch, Checkpoint, Draft, Hidden, Resolved, Step, Verdict, Weight

FIRST_KEY = 1  # an entry stands at the index of its token and needs the state before it, so token 0 has none


class FusedBlock(Block):
    """The first layer: attention over [norm(embedding), norm(state)] side by side; the residual is the state."""

    def __init__(self, config: Eagle3Config, rotary: Rotary) -> None:
        shape = replace(config.attention, input_size=2 * config.hidden_size)
        mlp = GatedMLP(config.hidden_size, config.intermediate_size)
        super().__init__(SelfAttention(shape, rotary), mlp, RMSNorm(config.hidden_size, config.eps))
        self.norm_before_residual = config.norm_before_residual
        self.embedding_norm = RMSNorm(config.hidden_size, config.eps)
        self.hidden_norm = RMSNorm(config.hidden_size, config.eps)

    def forward(self, embedding: Tensor, state: Tensor, batch: Batch) -> Tensor:
        normed = self.hidden_norm(state)
        residual = normed if self.norm_before_residual else state
        return self.run(residual, torch.cat([self.embedding_norm(embedding), normed], dim=-1), batch)


class Eagle3Network(nn.Module):
    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        rotary = Rotary.from_config(config.rope, config.attention.head_dim)
        width = len(config.taps) * config.target_hidden_size
        self.input_norm = RMSNorm(width, config.eps) if config.norm_before_fc else None
        norms = config.taps if config.fc_norm else ()
        self.fc_norm = nn.ModuleList(RMSNorm(config.target_hidden_size, config.eps) for _ in norms)
        self.fc = Linear(width, config.hidden_size, bias=config.fc_bias) if config.use_taps else None
        self.first = FusedBlock(config, rotary)
        self.rest = nn.ModuleList(
            DecoderBlock(
                SelfAttention(config.attention, rotary),
                GatedMLP(config.hidden_size, config.intermediate_size),
                config.eps,
            )
            for _ in range(config.num_layers - 1)
        )
        self.norm = RMSNorm(config.hidden_size, config.eps)
        self.embed = Embedding(config.vocab_size, config.hidden_size) if config.own_embedding else None
        self.head = Head(config.draft_vocab_size, config.hidden_size) if config.own_head else None
        self.d2t = (
            nn.Parameter(torch.zeros(config.draft_vocab_size, dtype=torch.long), requires_grad=False)
            if config.maps_vocabulary
            else None
        )

    def combine(self, taps: Tensor) -> Tensor:
        """The target's taps [T, n, H_t] -> the network's state [T, H_d]."""
        if self.fc is None:
            return taps.flatten(1)
        if self.config.fc_norm:
            taps = torch.stack([norm(tap) for norm, tap in zip(self.fc_norm, taps.unbind(1), strict=True)], dim=1)
        flat = taps.flatten(1)
        return self.fc(flat if self.input_norm is None else self.input_norm(flat))

    def forward(self, embedding: Tensor, state: Tensor, batch: Batch) -> tuple[Tensor, Tensor]:
        """-> what the head reads (after the norm), and what is fed back."""
        x = self.first(embedding, state, batch)
        for block in self.rest:
            x = block(x, batch)
        normed = self.norm(x)
        return normed, normed if self.config.norm_output else x


@drafters.register("eagle3")
class Eagle3(Drafter):
    def __init__(self, config: Eagle3Config, target: Target, lookahead: int) -> None:
        super().__init__()
        self.config = config
        self.lookahead = lookahead
        self.taps = config.taps
        self.network = Eagle3Network(config)
        self._target = (target,)  # in a tuple: shared, not owned

    @classmethod
    def build(cls, settings: SpeculativeConfig, target: Target, checkpoint: Checkpoint | None) -> Eagle3:
        if checkpoint is None:
            raise ValueError('method eagle3 needs "model": the checkpoint of a head trained for this target')
        return cls(resolve(checkpoint, target, settings.taps), target, settings.num_speculative_tokens)

    @classmethod
    def recognises(cls, config: Mapping[str, Any]) -> int:
        names = [str(name).lower() for name in config.get("architectures") or []]
        marks = ("draft_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids")
        if config.get("speculators_model_type") == "eagle3" or any("eagle3" in name for name in names):
            return 3
        return 2 if any(mark in config for mark in marks) else 0

    # drafting

    def propose(self, step: Step, hidden: Hidden, verdict: Verdict) -> Draft:
        extension = extend(step, FIRST_KEY, lag=1)  # training counted positions by the hidden state
        state = self._features(shifted(hidden, extension, step))
        normed, feedback = self._run(extension.batch, state)
        if not step.depth:
            return no_draft(step, self.lookahead)
        feedback = feedback[extension.last]

        def advance(tokens: Tensor, ahead: int) -> Tensor:
            nonlocal feedback
            normed, feedback = self._run(single_rows(step, ahead, tokens, FIRST_KEY, lag=1), feedback)
            return self.logits(normed)

        return draft_chain(step, self.lookahead, self.logits(normed[extension.last]), advance, self.target_ids())

    def _run(self, batch: Batch, state: Tensor) -> tuple[Tensor, Tensor]:
        return self.network(embed_rows(self.embed, batch), state, batch)

    def _features(self, taps: Tensor) -> Tensor:
        if not self.config.use_taps:  # the target's last state, as its head sees it
            taps = self._target[0].norm(taps)
        return self.network.combine(taps)

    @property
    def embed(self) -> Embedding:
        return self.network.embed if self.network.embed is not None else self._target[0].embed

    def logits(self, normed: Tensor) -> Tensor:
        head = self.network.head if self.network.head is not None else self._target[0].head
        return head(normed) * self.config.logit_scale if self.config.logit_scale != 1.0 else head(normed)

    def target_ids(self) -> Tensor | None:
        """The target's id of every draft id, or None where they are the same."""
        d2t = self.network.d2t
        return None if d2t is None else d2t + torch.arange(len(d2t), device=d2t.device)

    # loading

    def check(self) -> None:
        ids = self.target_ids()
        if ids is None:
            return
        wrong = int(((ids < 0) | (ids >= self.config.vocab_size)).sum())
        if wrong:
            raise ValueError(
                f"d2t sends {wrong} draft ids outside the target's vocabulary of {self.config.vocab_size}: it must "
                "hold offsets (target id - draft id), not the target's ids themselves"
            )

    def provenance(self) -> dict[str, Resolved]:
        return self.config.provenance

    def ignores(self, name: str) -> bool:
        return self.config.names.get(name) is None

    def weights(self) -> dict[str, Weight]:
        actual = {canonical: name for name, canonical in self.config.names.items() if canonical is not None}
        return {
            f"network.{parameter}": Weight(tuple(actual.get(name, name) for name in weight.names), weight.combine)
            for parameter, weight in self._canonical_weights().items()
        }

    def _canonical_weights(self) -> dict[str, Weight]:
        network, first = self.network, self.network.first
        weights = {
            "first.embedding_norm.weight": Weight(("layers.0.input_layernorm.weight",)),
            "first.hidden_norm.weight": Weight(("layers.0.hidden_norm.weight",)),
            "first.mlp_norm.weight": Weight(("layers.0.post_attention_layernorm.weight",)),
            "norm.weight": Weight(("norm.weight",)),
        }
        weights |= attention_weights(first.attention, "layers.0.self_attn.", "first.attention.")
        assert isinstance(first.mlp, GatedMLP)
        weights |= mlp_weights(first.mlp, "layers.0.mlp.", "first.mlp.")
        for number, block in enumerate(network.rest):
            assert isinstance(block, DecoderBlock)
            for name, weight in block_weights(block, f"layers.{number + 1}.").items():
                weights[f"rest.{number}.{name}"] = weight
        for number in range(len(network.fc_norm)):
            weights[f"fc_norm.{number}.weight"] = Weight((f"fc_norm.{number}.weight",))
        single = {
            "input_norm.weight": network.input_norm,
            "fc.weight": network.fc,
            "embed.weight": network.embed,
            "head.weight": network.head,
            "d2t": network.d2t,
        }
        weights |= {name: Weight((canonical_names(name),)) for name, part in single.items() if part is not None}
        if network.fc is not None and network.fc.bias is not None:
            weights["fc.bias"] = Weight(("fc.bias",))
        return weights
