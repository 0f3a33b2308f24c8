"""DFlash: the target's hidden states enter as keys and values only, and one block of masks drafts all tokens at once.
DSpark and DFlash2 are options of the same network (see dspark.py, dflash2.py); the checkpoint says which."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from outrider.config import Setting, SpeculativeConfig
from outrider.drafters.base import Drafter, Reading, Sureness, block_rows, draft_chain, drafters, no_draft
from outrider.drafters.dflash2 import ConvBlock, Selector
from outrider.drafters.dflash_config import DFlashConfig, canonical_name, resolve
from outrider.drafters.dflash_layers import LayerMask, remasked
from outrider.drafters.dflash_training import chances, corrected, fresh_dflash
from outrider.drafters.dspark import ConfidenceHead, MarkovHead
from outrider.drafters.feedback import twin
from outrider.drafters.fresh import Fresh, Plan
from outrider.drafters.lesson import (
    Branches,
    Grown,
    Guess,
    Lesson,
    Loss,
    Teaching,
    by_survival,
    judged,
    rows_of,
    teaching,
)
from outrider.drafters.parallel import draft_at_once
from outrider.kernels.activation import GATED
from outrider.layers.attention import AttentionShape, SelfAttention
from outrider.layers.block import DecoderBlock, block_weights
from outrider.layers.embedding import Embedding, Head, embed_rows
from outrider.layers.linear import Linear
from outrider.layers.mlp import GatedMLP
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import Rotary
from outrider.models.base import Target
from outrider.types import Batch, Checkpoint, Draft, Hidden, Resolved, Step, Verdict, Weight

PLACES_PER_BLOCK = 4  # of a text in training, on average
Correction = Callable[[Tensor, Tensor, Tensor], Tensor]  # logits [B, V], hidden [B, H], token before [B] -> [B, V]


class DFlashNetwork(nn.Module):
    def __init__(self, config: DFlashConfig) -> None:
        super().__init__()
        self.config = config
        size, eps = config.hidden_size, config.eps
        self.fc = Linear(len(config.taps) * config.target_hidden_size, size)
        self.hidden_norm = RMSNorm(size, eps)
        shared: dict[int, Rotary] = {}  # layers with the same frequencies compute their tables once a pass
        for rope, shape in zip(config.ropes, config.layers, strict=True):
            if id(rope) not in shared:
                shared[id(rope)] = Rotary.from_config(rope, shape.head_dim)
        rotaries = [shared[id(rope)] for rope in config.ropes]
        self.masks = config.masks
        shapes = [mask.shape(shape) for mask, shape in zip(config.masks, config.layers, strict=True)]
        self.layers = nn.ModuleList(map(self._block, shapes, rotaries))
        self.norm = RMSNorm(size, eps)
        self.embed = Embedding(config.vocab_size, size) if config.own_embedding else None
        self.head = Head(config.draft_vocab_size, size, softcap=config.softcap) if config.own_head else None
        self.mask = nn.Parameter(torch.empty(size)) if config.own_mask else None
        self.d2t = (
            nn.Parameter(torch.zeros(config.draft_vocab_size, dtype=torch.long), requires_grad=False)
            if config.maps_vocabulary
            else None
        )
        correction, vocab_sizes = config.correction, (config.vocab_size, config.draft_vocab_size)
        markov = correction is not None and correction.rank > 0
        self.markov = MarkovHead(correction, size, *vocab_sizes) if correction is not None and markov else None
        confident = correction is not None and correction.confidence
        self.confidence = ConfidenceHead(correction, size) if correction is not None and confident else None
        self.selector = Selector(config.selector, size, config.vocab_size) if config.selector is not None else None

    def _block(self, shape: AttentionShape, rotary: Rotary) -> DecoderBlock:
        config = self.config
        attention = SelfAttention(shape, rotary)
        mlp = GatedMLP(config.hidden_size, config.intermediate_size, activation=GATED[config.activation])
        if config.conv is not None:
            return ConvBlock(attention, mlp, config.eps, config.conv)
        return DecoderBlock(attention, mlp, config.eps)

    def remember(self, taps: Tensor, batch: Batch) -> None:
        """The target's taps [T, n, H_t] of a batch become keys and values of every layer: no queries, no residual."""
        context = self.hidden_norm(self.fc(taps.flatten(1)))
        for block in self.layers:
            assert isinstance(block, DecoderBlock)
            block.attention.remember(context, batch)

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        """A block's embeddings [B R, H] -> what the head reads."""
        rows = {mask: mask.rows(batch) for mask in dict.fromkeys(self.masks)}
        for block, mask in zip(self.layers, self.masks, strict=True):
            x = block(x, rows[mask])
        return self.norm(x)

    def remasked(self, masks: tuple[LayerMask, ...]) -> DFlashNetwork:
        """The same network, with its weights and cache memory, under other masks."""
        other = twin(self)
        other.masks = masks
        other.layers = nn.ModuleList()
        for block, mask in zip(self.layers, masks, strict=True):
            assert isinstance(block, DecoderBlock)
            other.layers.append(remasked(block, mask))
        return other


@drafters.register("dflash", "dspark")
class DFlash(Drafter):
    num_carried = 0  # an entry depends on its own row alone
    reads_last = False
    # Draft tokens whose estimated chance of being reached and accepted is smaller are not put to the test, where the
    # checkpoint has a confidence head. 0: all are.
    own_settings: Mapping[str, Any] = {"confidence_threshold": Setting(0.0, 0, 1)}
    confidence_threshold = 0.0

    def __init__(self, config: DFlashConfig, target: Target, lookahead: int) -> None:
        super().__init__()
        self.config = config
        self.lookahead = lookahead
        self.taps = config.taps
        self.network = DFlashNetwork(config)
        self._target = (target,)  # in a tuple: shared, not owned

    @classmethod
    def build(cls, settings: SpeculativeConfig, target: Target, checkpoint: Checkpoint | None) -> DFlash:
        if checkpoint is None:
            raise ValueError('method dflash needs "model": the checkpoint of a drafter trained for this target')
        config = resolve(checkpoint, target, settings.taps)
        lookahead = settings.num_speculative_tokens
        if lookahead > config.block_size:  # it drafts well in shorter blocks than it was trained with, not in longer
            raise ValueError(
                f"num_speculative_tokens is {lookahead}, but the drafter was trained with blocks of "
                f"{config.block_size}: ask for at most {config.block_size} (block_size)"
            )
        drafter = cls(config, target, lookahead)
        drafter.confidence_threshold = settings.own(cls.own_settings)["confidence_threshold"]
        return drafter

    @classmethod
    def recognises(cls, config: Mapping[str, Any]) -> Sureness:
        names = [str(name).lower() for name in config.get("architectures") or []]
        names += [str(config.get(key, "")).lower() for key in ("speculators_model_type", "model_type")]
        marks = ("dflash", "dspark", "muse_glimmer_assistant", "domino")  # the last to be refused by name
        if any(mark in name for name in names for mark in marks):
            return Sureness.BY_NAME
        return Sureness.BY_NAME if "dflash_config" in config else Sureness.NO

    # drafting

    def propose(self, step: Step, hidden: Hidden, verdict: Verdict) -> Draft:
        # Rows of rejected drafts are written as well, at the places of the newest token and after it: where the block
        # reads there, it has written first, and the next pass overwrites both.
        self.network.remember(self._context(hidden.taps), step.batch)
        if not step.depth:
            return no_draft(step, self.lookahead)
        first = 0 if self.config.from_anchor else 1  # the first row that predicts a token
        batch = block_rows(step, self._block_tokens(step, step.depth + first))
        rows = self.network(self._embed(batch), batch).view(len(batch.slots), -1, self.config.hidden_size)[:, first:]
        return self._limit(step, rows, self._choose(step, rows, self.logits(rows.flatten(0, 1))))

    def _context(self, taps: Tensor) -> Tensor:
        """The target's taps [T, n, H_t] as the drafter takes them."""
        if not (self.config.last_tap_normed and self._taps_last_layer()):
            return taps
        return torch.cat([taps[:, :-1], self._target[0].norm(taps[:, -1:])], dim=1)

    def _taps_last_layer(self) -> bool:
        return self.taps[-1] == self._target[0].num_layers

    def _block_tokens(self, step: Step, num_rows: int) -> Tensor:
        """The newest token of every request, then masks, [B, num_rows]."""
        newest = self._newest(step)
        masks = newest[:, None].new_full((len(newest), num_rows - 1), self._mask_token())
        return torch.cat([newest[:, None], masks], dim=1)

    def _newest(self, step: Step) -> Tensor:
        slots = step.batch.slots
        return step.state.tokens[slots, step.state.lengths[slots] - 1]

    def _mask_token(self) -> int:
        return 0 if self.config.own_mask else self.config.mask_token

    def _embed(self, batch: Batch) -> Tensor:
        x = embed_rows(self.embed, batch)
        if self.network.mask is None:
            return x
        is_mask = torch.arange(len(x), device=x.device) % batch.max_rows > 0
        return torch.where(is_mask[:, None], self.network.mask, x)

    def _choose(self, step: Step, rows: Tensor, logits: Tensor) -> Draft:
        """rows [B, depth, H] and their logits [B depth, V] -> tokens with the target's noise."""
        correct = self._correction()
        if correct is not None:
            by_place = logits.view(*rows.shape[:2], -1)

            def advance(before: Tensor, number: int) -> Tensor:
                return correct(by_place[:, number], rows[:, number], before)

            return draft_chain(step, self.lookahead, advance(self._newest(step), 0), advance, self.target_ids())
        return draft_at_once(step, self.lookahead, logits, self.target_ids())

    def _correction(self) -> Correction | None:
        """What makes a draft token depend on the one before it, if anything does."""
        markov, selector = self.network.markov, self.network.selector
        if markov is None or selector is None:
            return markov if markov is not None else selector
        return lambda logits, hidden, before: selector(markov(logits, hidden, before), hidden, before)

    def _limit(self, step: Step, rows: Tensor, draft: Draft) -> Draft:
        """Leaves out what is not worth a test."""
        confidence, markov = self.network.confidence, self.network.markov
        if confidence is None or not self.confidence_threshold:
            return draft
        before = torch.cat([self._newest(step)[:, None], draft.tokens[:, : step.depth - 1]], dim=1)
        latent = markov.embed(before.flatten()) if markov is not None else None
        chance = confidence(rows.flatten(0, 1), latent).view(before.shape).cumprod(dim=1)
        return Draft(draft.tokens, torch.minimum(draft.count, (chance >= self.confidence_threshold).sum(dim=1)))

    @property
    def embed(self) -> Embedding:
        return self.network.embed if self.network.embed is not None else self._target[0].embed

    def logits(self, rows: Tensor) -> Tensor:
        head = self.network.head if self.network.head is not None else self._target[0].head
        scale = self.config.output_multiplier
        return head(rows * scale if scale != 1.0 else rows)  # before the head's softcap

    def target_ids(self) -> Tensor | None:
        """The target's id of every draft id, or None where they are the same."""
        d2t = self.network.d2t
        return None if d2t is None else d2t + torch.arange(len(d2t), device=d2t.device)

    def readings(self) -> list[Reading]:
        config, readings = self.config, []
        for shift in (1, -1):
            taps = tuple(tap + shift for tap in config.taps)
            if taps[0] >= 0 and taps[-1] <= self._target[0].num_layers:
                advice = f'set "taps" to {list(taps)} in speculative_config'
                readings.append(Reading(f"taps {shift:+d}", advice, {"taps": taps}))
        flag = f"sample_from_anchor {str(not config.from_anchor).lower()}"
        readings.append(
            Reading(flag, f"set {flag} in the drafter's config.json", {"from_anchor": not config.from_anchor})
        )
        if self._taps_last_layer():
            normed = not config.last_tap_normed
            advice = f'set "tap_after_final_norm": {str(normed).lower()} in the drafter\'s config.json'
            side = "after" if normed else "before"
            readings.append(Reading(f"last tap {side} the final norm", advice, {"last_tap_normed": normed}))
        return readings + self._readings_of_windows()

    def _readings_of_windows(self) -> list[Reading]:
        """Whether rows within a window see those after them, where it is counted from, and whether there is any."""
        masks = self.config.masks
        slides = [mask for mask in masks if mask.window]
        if not slides:
            return []
        causal, anchored = not slides[0].causal, not slides[0].anchored
        ordered = tuple(replace(mask, causal=causal) if mask.window else mask for mask in masks)
        placed = tuple(replace(mask, anchored=anchored) for mask in masks)
        without = tuple(LayerMask(0, causal=False) if mask.window else mask for mask in masks)
        place = "in the drafter's config.json"
        return [
            Reading(
                f"windows {'causal' if causal else 'both ways'}",
                f'set "sliding_window_non_causal": {str(not causal).lower()} {place}, without is_causal',
                {"masks": ordered},
            ),
            Reading(
                f"windows from {'the anchor' if anchored else 'every row'}",
                f'set "window_from_anchor": {str(anchored).lower()} {place}',
                {"masks": placed},
            ),
            Reading(
                "no windows", f"set all of layer_types to full_attention {place}, without use_swa", {"masks": without}
            ),
        ]

    def reread(self, **changes: Any) -> Self:
        other = twin(self)
        other.config = replace(self.config, **changes)
        other.taps = other.config.taps
        if "masks" in changes:
            other.network = self.network.remasked(other.config.masks)
        return other

    # training

    trainable = True

    @classmethod
    def fresh(cls, target: Target, plan: Plan) -> Fresh:
        return fresh_dflash(target, plan)

    def loss(self, lesson: Lesson) -> Loss:
        """Blocks of masks at random places of the text, each of which sees the target's states before it. What a draft
        is more likely to come to weighs more."""
        network, guesses = self.network, self.guesses(lesson)
        taught, read = self.taught(lesson, guesses)
        thought = chances(lesson, network.confidence, network.markov, guesses)
        return judged(lesson, self._target[0], taught, read, by_survival, thought)

    def taught(self, lesson: Lesson, guesses: list[Guess]) -> tuple[Teaching, list[Guess]]:
        """Both heads, and what the drafter's reads."""
        network, scale = self.network, self.config.output_multiplier
        taught = teaching(lesson, self._target[0], network.head, self.target_ids())
        if network.markov is not None:
            return corrected(lesson, network.markov, taught, guesses, scale)
        return taught, guesses if scale == 1 else [replace(guess, hidden=guess.hidden * scale) for guess in guesses]

    def guesses(self, lesson: Lesson) -> list[Guess]:
        first, branches = 0 if self.config.from_anchor else 1, Branches(lesson)
        num_rows, length = lesson.shape
        context = rows_of(lesson.tokens, lesson.places, branches)
        self.network.remember(self._context(lesson.taps.flatten(0, 1)), context)
        usable = lesson.learnt & lesson.reaches(1) & (lesson.places > 0)
        chances = lesson.noise.uniform(length) + usable
        anchors = chances.argsort(dim=1, descending=True)[:, : max(length // PLACES_PER_BLOCK, 1)]
        size = lesson.depth + first
        tokens = torch.full((num_rows, anchors.shape[1], size), self._mask_token(), device=anchors.device)
        tokens[..., 0] = lesson.tokens.gather(1, anchors)
        places = lesson.places.gather(1, anchors)[..., None] + torch.arange(size, device=anchors.device)
        batch = replace(rows_of(tokens, places, branches.of(Grown(anchors, size, before=1))), max_rows=size)
        rows = self.network(self._embed(batch), batch).unflatten(0, tokens.shape)
        return [Guess(rows[:, :, first + ahead], anchors, ahead) for ahead in range(lesson.depth)]

    def frozen(self) -> tuple[str, ...]:
        return ("network.embed.weight", "network.head.weight", "network.d2t")

    # loading

    def check(self) -> None:
        ids = self.target_ids()
        wrong = 0 if ids is None else int(((ids < 0) | (ids >= self.config.vocab_size)).sum())
        if wrong:
            raise ValueError(
                f"d2t sends {wrong} draft ids outside the target's vocabulary of {self.config.vocab_size}: it must "
                "hold offsets (target id - draft id), not the target's ids themselves"
            )

    def provenance(self) -> dict[str, Resolved]:
        return self.config.provenance

    def canonical(self, name: str) -> str:
        return canonical_name(name)

    def ignores(self, name: str) -> bool:
        return name == "t2d" or name.endswith("rotary_emb.inv_freq")

    def weights(self) -> dict[str, Weight]:
        network = self.network
        weights = {name: Weight((name,)) for name in ("fc.weight", "hidden_norm.weight", "norm.weight")}
        for number, block in enumerate(network.layers):
            assert isinstance(block, DecoderBlock)
            found = block_weights(block, f"layers.{number}.") | self._attention_weights(block, f"layers.{number}.")
            if isinstance(block, ConvBlock):
                found |= block.conv_weights(f"layers.{number}.")
            weights |= {f"layers.{number}.{name}": weight for name, weight in found.items()}
        parts = {"markov": network.markov, "confidence": network.confidence, "selector": network.selector}
        for name, part in parts.items():
            if part is not None:
                weights |= {f"{name}.{parameter}": weight for parameter, weight in part.weights().items()}
        single = {
            "embed.weight": (network.embed, "embed_tokens.weight"),
            "head.weight": (network.head, "lm_head.weight"),
            "mask": (network.mask, "mask_embedding"),
            "d2t": (network.d2t, "d2t"),
        }
        weights |= {name: Weight((source,)) for name, (part, source) in single.items() if part is not None}
        return {f"network.{name}": weight for name, weight in weights.items()}

    def _attention_weights(self, block: DecoderBlock, source: str) -> dict[str, Weight]:
        """Where the checkpoint's projections are one tensor, or its rotary pairs are neighbours."""
        config, attention = self.config, block.attention
        names = ("qkv_proj",) if config.fused else ("q_proj", "k_proj", "v_proj")
        combine = None if config.half_split else _half_split(attention)
        parts = ["weight"] if attention.qkv.bias is None else ["weight", "bias"]
        weights = {
            f"attention.qkv.{part}": Weight(tuple(f"{source}self_attn.{name}.{part}" for name in names), combine)
            for part in parts
        }
        if attention.q_norm is not None:
            weights |= {
                f"attention.{norm}.weight": Weight((f"{source}self_attn.{norm}.weight",), combine)
                for norm in ("q_norm", "k_norm")
            }
        return weights


def _half_split(attention: SelfAttention) -> Callable[[list[Tensor]], Tensor]:
    """Moves the rows of queries and keys so that rotary pairs of neighbours (2 j, 2 j + 1) become (j, j + half)."""
    shape, num_rotary = attention.whole_shape, 2 * len(attention.rotary.inv_freq)
    order = torch.arange(shape.head_dim)
    order[:num_rotary] = torch.cat([torch.arange(0, num_rotary, 2), torch.arange(1, num_rotary, 2)])
    turned = (shape.num_heads + shape.num_kv_heads) * shape.head_dim

    def combine(tensors: list[Tensor]) -> Tensor:
        rows = torch.cat(tensors)
        heads = rows[:turned].unflatten(0, (-1, shape.head_dim))[:, order.to(rows.device)]
        return torch.cat([heads.flatten(0, 1), rows[turned:]])

    return combine
