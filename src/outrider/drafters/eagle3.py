"""EAGLE-3: a small network reads several of the target's hidden states and feeds its own back to go on.
One network with options; every published dialect of config.json and tensor names is resolved here, with provenance."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from outrider.config import SpeculativeConfig
from outrider.drafters.base import Reading, Sureness, drafters
from outrider.drafters.eagle3_config import Eagle3Config, canonical_names, distinct_taps, resolve
from outrider.drafters.feedback import FIRST_KEY as FIRST_KEY
from outrider.drafters.feedback import FeedbackDrafter, FeedbackNetwork, actual_names, layer_weights, unless_same
from outrider.drafters.fresh import Fresh, Mould, Plan, Tensors, offsets
from outrider.drafters.lesson import Guess, Lesson, Loss, judged, teaching, unrolled
from outrider.kernels.chain import ChainParts, NativeChain
from outrider.kernels.quantised import Quantised
from outrider.layers.attention import SelfAttention
from outrider.layers.block import DecoderBlock
from outrider.layers.embedding import Embedding, Head
from outrider.layers.linear import Linear
from outrider.layers.mla import LatentBlock
from outrider.layers.narrow import run_narrowing
from outrider.layers.norm import RMSNorm, side_by_side
from outrider.layers.rotary import Rotary
from outrider.models.base import Target
from outrider.types import Batch, Checkpoint, Resolved, Weight


class FusedBlock(nn.Module):
    """The first layer: attention over [norm(embedding), norm(state)] side by side; the residual is the state."""

    def __init__(self, block: DecoderBlock | LatentBlock, size: int, eps: float) -> None:
        super().__init__()
        self.block = block
        self.hidden_norm = RMSNorm(size, eps)

    def forward(self, embedding: Tensor, state: Tensor, batch: Batch, *, norm_before_residual: bool) -> Tensor:
        inputs = side_by_side((self.block.attention_norm, embedding), (self.hidden_norm, state))
        return self.block.run(inputs[:, -state.shape[-1] :] if norm_before_residual else state, inputs, batch)

    def remember(self, embedding: Tensor, state: Tensor, batch: Batch) -> None:
        """Keys and values alone."""
        assert isinstance(self.block.attention, SelfAttention)
        inputs = side_by_side((self.block.attention_norm, embedding), (self.hidden_norm, state))
        self.block.attention.remember(inputs, batch)


class Eagle3Network(FeedbackNetwork):
    config: Eagle3Config

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__()
        self.config = config
        size, eps = config.hidden_size, config.layers.eps
        width = len(config.taps) * config.target_hidden_size
        self.input_norm = RMSNorm(width, eps) if config.norm_before_fc else None
        norms = config.taps if config.fc_norm else ()
        self.fc_norm = nn.ModuleList(RMSNorm(config.target_hidden_size, eps) for _ in norms)
        self.fc = Linear(width, size, bias=config.fc_bias) if config.use_taps else None
        first, *rest = config.layers.build(input_size=2 * size)
        self.first = FusedBlock(first, size, eps)
        self.rest = nn.ModuleList(rest)
        self.norm = RMSNorm(size, eps)
        self.embed = Embedding(config.vocab_size, size) if config.own_embedding else None
        has_head = config.own_head or config.tied_head
        tied = self.embed if config.tied_head else None
        self.head = Head(config.draft_vocab_size, size, tied=tied) if has_head else None
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
            norms = [norm for norm in self.fc_norm if isinstance(norm, RMSNorm)]
            flat = side_by_side(*zip(norms, taps.unbind(1), strict=True))
        else:
            flat = taps.flatten(1)
        return self.fc(flat if self.input_norm is None else self.input_norm(flat))

    def forward(
        self, embedding: Tensor, state: Tensor, batch: Batch, rows: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """-> what the head reads, and what is fed back, of these rows."""
        first = functools.partial(self.first, embedding, norm_before_residual=self.config.norm_before_residual)
        x = run_narrowing([first, *self.rest], state, batch, rows)
        normed = self.norm(x)
        return normed if self.config.norm_before_head else x, normed if self.config.norm_output else x

    def follow(self, embedding: Tensor, state: Tensor, batch: Batch) -> None:
        """A single layer, as most heads have, need not be computed beyond its keys and values."""
        if len(self.rest) or not isinstance(self.first.block.attention, SelfAttention):
            super().follow(embedding, state, batch)
        else:
            self.first.remember(embedding, state, batch)


@drafters.register("eagle3")
class Eagle3(FeedbackDrafter):
    config: Eagle3Config
    network: Eagle3Network

    def __init__(self, config: Eagle3Config, target: Target, lookahead: int) -> None:
        super().__init__()
        self.config = config
        self.lookahead = lookahead
        self.taps = config.taps
        self.network = Eagle3Network(config)
        self._target = (target,)  # in a tuple: shared, not owned
        self._chain: NativeChain | None = None
        self._ids: tuple[Tensor, Tensor] | None = None  # d2t, and what it says

    @classmethod
    def build(cls, settings: SpeculativeConfig, target: Target, checkpoint: Checkpoint | None) -> Eagle3:
        if checkpoint is None:
            raise ValueError('method eagle3 needs "model": the checkpoint of a head trained for this target')
        return cls(resolve(checkpoint, target, settings.taps), target, settings.num_speculative_tokens)

    @classmethod
    def recognises(cls, config: Mapping[str, Any]) -> Sureness:
        names = [str(name).lower() for name in config.get("architectures") or []]
        marks = ("draft_vocab_size", "eagle_config", "eagle_aux_hidden_state_layer_ids")
        if config.get("speculators_model_type") == "eagle3" or any("eagle3" in name for name in names):
            return Sureness.BY_NAME
        return Sureness.BY_KEYS if any(mark in config for mark in marks) else Sureness.NO

    # drafting

    def _features(self, taps: Tensor) -> Tensor:
        if not self.config.use_taps:  # the target's last state, as its head sees it
            taps = self._target[0].norm(taps)
        return self.network.combine(taps)

    def native_chain(self, *, drawn: bool) -> tuple[NativeChain, Rotary] | None:
        """For a single plain layer, and tables that lie in memory as they are. What logits are times decides nothing
        while tokens are the best ones."""
        network, config, embed = self.network, self.config, self.embed
        block, head = network.first.block, network.head or self._target[0].head
        if len(network.rest) or not isinstance(block, DecoderBlock) or not block.has_native():
            return None
        if embed.ranks is not None or embed.scale != 1.0 or head.columns is not None:
            return None
        if embed.weight.shape[1] != config.hidden_size or head.softcap or config.logit_scale <= 0:
            return None
        if drawn and config.logit_scale != 1:
            return None
        assert block._native is not None
        known = self._chain
        if known is None or known.block is not block._native:
            assert not isinstance(head.packed, Quantised), "that is for GPUs"
            parts = ChainParts(
                embedding=(embed.weight.detach(), embed.packed),
                embedding_norm=block.attention_norm.weight.detach(),
                state_norm=network.first.hidden_norm.weight.detach(),
                final_norm=network.norm.weight.detach(),
                eps=network.norm.eps,
                head=(head.weight.detach(), head.packed),
                ids=self.target_ids(),
                residual_is_normed=config.norm_before_residual,
                head_reads_normed=config.norm_before_head,
                feeds_normed=config.norm_output,
            )
            self._chain = known = NativeChain(block._native, parts)
        return known, block.attention.rotary

    def target_ids(self) -> Tensor | None:
        d2t = self.network.d2t
        if d2t is None or self.config.absolute_ids:
            return d2t
        if torch.is_grad_enabled() or self._ids is None or self._ids[0] is not d2t:
            self._ids = (d2t, d2t + torch.arange(len(d2t), device=d2t.device))
        return self._ids[1]

    # other ways to read the checkpoint

    def readings(self) -> list[Reading]:
        config, readings = self.config, []
        for shift in (1, -1) if config.use_taps else ():
            taps = tuple(tap + shift for tap in config.taps)
            if taps[0] >= 0 and taps[-1] <= self._target[0].num_layers:
                advice = f'set "taps" to {list(taps)} in speculative_config'
                readings.append(Reading(f"taps {shift:+d}", advice, {"taps": taps}))
        flags = {"norm_before_residual": config.norm_before_residual, "norm_output": config.norm_output}
        if not config.norm_output and config.provenance["norm_output"].source != "default":
            flags["norm_before_head"] = config.norm_before_head  # what SpecForge's trainer means by norm_output false
        for flag, value in flags.items():
            now = str(not value).lower()
            advice = f'set "{flag}": {now} at the top level of the head\'s config.json'
            readings.append(Reading(f"{flag} {now}", advice, {flag: not value}))
        if config.maps_vocabulary and self.reread(absolute_ids=not config.absolute_ids)._maps_well():
            name = "d2t offsets" if config.absolute_ids else "d2t absolute"
            advice = "store target id - draft id in the tensor d2t, as engines expect it"
            readings.append(Reading(name, advice, {"absolute_ids": not config.absolute_ids}))
        return readings

    def reread(self, **changes: Any) -> Self:
        other = super().reread(**changes)
        other._chain = other._ids = None
        return other

    # training

    trainable = True

    @classmethod
    def fresh(cls, target: Target, plan: Plan) -> Fresh:
        mould, num_layers = Mould.of(target, plan), plan.num_layers or 1
        made, taps = Tensors(target, mould, plan), plan.taps or distinct_taps(target.num_layers)
        ids = plan.draft_ids
        tensors = {
            "fc.weight": made.last_of(len(taps)),
            **made.layer("midlayer." if num_layers == 1 else "layers.0.", inputs=2),
            "norm.weight": made.final_norm(),
            "lm_head.weight": made.head(ids),
        }
        first = "midlayer." if num_layers == 1 else "layers.0."
        tensors[f"{first}hidden_norm.weight"] = tensors[f"{first}input_layernorm.weight"].clone()
        for number in range(1, num_layers):
            tensors |= made.layer(f"layers.{number}.")
        if ids is not None:
            known = torch.zeros(target.vocab_size, dtype=torch.bool).index_fill(0, ids.cpu(), True)
            tensors |= {"d2t": offsets(ids), "t2d": known}
        if plan.post_norm:
            tensors |= {f"fc_norm.{number}.weight": made.ones(target.hidden_size) for number in range(len(taps))}
        windowed = {"layer_types": ["sliding_attention"] * num_layers, "sliding_window": plan.window}
        config = {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "llama",
            **mould.config,
            "num_hidden_layers": num_layers,
            "draft_vocab_size": target.vocab_size if ids is None else len(ids),
            "target_hidden_size": target.hidden_size,
            "eagle_aux_hidden_state_layer_ids": list(taps),
            **({"fc_norm": True, "norm_output": True} if plan.post_norm else {}),
            **(windowed if plan.window else {}),
        }
        return Fresh(config, tensors)

    def loss(self, lesson: Lesson) -> Loss:
        """Training-time test: it drafts from every place of the text at once, each step from its own output of the step
        before, beside the text's tokens; the further ahead, from the fewer places. A draft sees the states that the
        target's features made up to its place, and its own."""
        taught = teaching(lesson, self._target[0], self.network.head, self.target_ids())
        return judged(lesson, self._target[0], taught, self.guesses(lesson))

    def guesses(self, lesson: Lesson) -> list[Guess]:
        """A row is made of the taps of one token and the embedding of the next, which is the newest that it knows."""
        state = self._features(lesson.taps.flatten(0, 1))
        return unrolled(lesson, self.config.layers.windows[0], state, self._run)

    def frozen(self) -> tuple[str, ...]:
        return ("network.embed.weight", "network.head.weight", "network.d2t")

    # loading

    def check(self) -> None:
        """d2t holds offsets. If it cannot, but could hold the target's ids themselves, then that is what it holds."""
        if not self.config.tied_head:
            self.network.embed = unless_same(self.network.embed, self._target[0].embed)
        if not self.config.maps_vocabulary:
            return
        strays, could_be_ids = self._num_strays(), self.reread(absolute_ids=True)._maps_well()
        if strays and not could_be_ids:
            raise ValueError(
                f"d2t sends {strays} draft ids outside the target's vocabulary of {self.config.vocab_size}, and does "
                "not hold the target's ids themselves either: the head belongs to another target"
            )
        source = "d2t read as offsets"
        if strays:
            source = "d2t read as the target's ids: as offsets they would leave its vocabulary"
        elif could_be_ids:
            source += "; ambiguous: they could be the target's ids"
        said = {**self.config.provenance, "target_ids": Resolved("ids" if strays else "offsets", source)}
        self.config = self.network.config = replace(self.config, absolute_ids=strays > 0, provenance=said)

    def _num_strays(self) -> int:
        ids = self.target_ids()
        return 0 if ids is None else int(((ids < 0) | (ids >= self.config.vocab_size)).sum())

    def _maps_well(self) -> bool:
        ids = self.target_ids()
        return ids is not None and not self._num_strays() and len(ids.unique()) == len(ids)

    def provenance(self) -> dict[str, Resolved]:
        return self.config.provenance

    def ignores(self, name: str) -> bool:
        return self.config.names.get(name) in (None, "mask_hidden")  # the latter is for drafting all at once

    def weights(self) -> dict[str, Weight]:
        named = {f"network.{parameter}": weight for parameter, weight in self._canonical_weights().items()}
        return actual_names(named, self.config.names)

    def _canonical_weights(self) -> dict[str, Weight]:
        network = self.network
        weights = {
            "first.hidden_norm.weight": Weight(("layers.0.hidden_norm.weight",)),
            "norm.weight": Weight(("norm.weight",)),
            **layer_weights(network.first.block, "layers.0.", "first.block."),
        }
        for number, block in enumerate(network.rest):
            assert isinstance(block, DecoderBlock | LatentBlock)
            weights |= layer_weights(block, f"layers.{number + 1}.", f"rest.{number}.")
        for number in range(len(network.fc_norm)):
            weights[f"fc_norm.{number}.weight"] = Weight((f"fc_norm.{number}.weight",))
        single = {
            "input_norm.weight": network.input_norm,
            "fc.weight": network.fc,
            "embed.weight": network.embed,
            "head.weight": network.head if self.config.own_head else None,
            "d2t": network.d2t,
        }
        weights |= {name: Weight((canonical_names(name),)) for name, part in single.items() if part is not None}
        if network.fc is not None and network.fc.bias is not None:
            weights["fc.bias"] = Weight(("fc.bias",))
        return weights
