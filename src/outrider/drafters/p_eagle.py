"""P-EAGLE: the network of EAGLE-3 drafts all tokens in one pass, reading a learnt state where the target has none yet.
It feeds nothing back: masked rows hold the mask token's embedding and the state `mask_hidden`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from outrider.config import SpeculativeConfig
from outrider.drafters.base import Reading, Sureness, drafters, extend, no_draft, shifted
from outrider.drafters.eagle3 import FIRST_KEY, Eagle3
from outrider.drafters.eagle3_config import Eagle3Config, resolve
from outrider.drafters.feedback import actual_names
from outrider.drafters.fresh import Fresh, Plan
from outrider.drafters.lesson import Branches, Grown, Guess, Lesson, Loss, judged, num_kept, rows_of, teaching
from outrider.drafters.parallel import draft_at_once, draft_rows, mask_rows, num_masked, resolve_mask_token
from outrider.drafters.reader import MASK_TOKEN_KEYS
from outrider.models.base import Target
from outrider.types import Checkpoint, Draft, Hidden, Resolved, Step, Verdict, Weight


@drafters.register("p_eagle")
class PEagle(Eagle3):
    drafts_in_parallel = True

    def __init__(self, config: Eagle3Config, target: Target, lookahead: int, mask_token: Resolved) -> None:
        super().__init__(config, target, lookahead)
        self.mask_token = mask_token
        # what the projection of the taps (or the first layer, where there are none) reads in a masked row
        self.mask_hidden = nn.Parameter(torch.empty(len(config.taps) * config.target_hidden_size))

    @classmethod
    def build(cls, settings: SpeculativeConfig, target: Target, checkpoint: Checkpoint | None) -> PEagle:
        if checkpoint is None:
            raise ValueError('method p_eagle needs "model": the checkpoint of a head trained for this target')
        config = resolve(checkpoint, target, settings.taps)
        if "mask_hidden" not in config.names.values():
            raise ValueError(
                f"{checkpoint.path} lacks tensor mask_hidden, so the head was not trained to draft in parallel: use "
                '"method": "eagle3" without parallel_drafting, or complete the checkpoint'
            )
        vocab_size = config.vocab_size if config.own_embedding else target.embed.vocab_size
        mask_token = resolve_mask_token(checkpoint.config, vocab_size)
        return cls(_with_own_default(config), target, settings.num_speculative_tokens, mask_token)

    @classmethod
    def recognises(cls, config: Mapping[str, Any]) -> Sureness:
        if _is_named(config):
            return Sureness.IN_PARTICULAR
        keys = set(MASK_TOKEN_KEYS) - {"dspark_noise_token_id"}  # of EAGLE-3's dialects with one network for both
        others = ("speculators_model_type", "dflash_config")
        sureness = super().recognises(config)
        if any(key in config for key in others) or not any(config.get(key) is not None for key in keys):
            return Sureness.NO
        return Sureness(sureness + 1) if sureness else Sureness.NO

    @classmethod
    def replaces(cls, method: str, settings: SpeculativeConfig, config: Mapping[str, Any]) -> bool:
        return method == "eagle3" and (settings.parallel_drafting or _is_named(config))

    def propose(self, step: Step, hidden: Hidden, verdict: Verdict) -> Draft:
        extension = extend(step, FIRST_KEY, lag=1, extra=num_masked(step))
        batch, masked = mask_rows(extension, step, self.mask_token.value)
        normed, _ = self._run(batch, self._states(shifted(hidden, extension, step), masked))
        if not step.depth:
            return no_draft(step, self.lookahead)
        logits = self.logits(normed[draft_rows(extension, step)])
        return draft_at_once(step, self.lookahead, logits, self.target_ids())

    def _states(self, taps: Tensor, masked: Tensor) -> Tensor:
        """taps [T, n, H_t], masked [T] -> [T, H_d]; `mask_hidden` goes the way of the taps, through norms and fc."""
        mask = self.mask_hidden.view(taps.shape[1:])
        if self.config.use_taps:
            return self._features(torch.where(masked[:, None, None], mask, taps))
        return torch.where(masked[:, None], mask[0], self._features(taps))  # the target's norm is not for it

    # training

    @classmethod
    def fresh(cls, target: Target, plan: Plan) -> Fresh:
        made = super().fresh(target, replace(plan, num_layers=plan.num_layers or 2))
        width = len(made.config["eagle_aux_hidden_state_layer_ids"]) * target.hidden_size
        mask = torch.randn(1, 1, width, generator=torch.Generator().manual_seed(plan.seed)) * 0.1
        config = {**made.config, "ptd_token_id": plan.mask_token or 0, "norm_before_residual": False}
        return Fresh(config, {**made.tensors, "mask_hidden": mask})

    def loss(self, lesson: Lesson) -> Loss:
        """One pass over the text and over masked rows that grow from some of its places: the further ahead, the fewer
        (conditional drop), always at places that have the nearer ones too."""
        taught = teaching(lesson, self._target[0], self.network.head, self.target_ids())
        return judged(lesson, self._target[0], taught, self.guesses(lesson))

    def guesses(self, lesson: Lesson) -> list[Guess]:
        branches = Branches(lesson, self.config.layers.windows[0])
        columns, order = branches.columns, lesson.order()
        parts: list[Grown | None] = [None]
        tokens, positions = [lesson.ahead(lesson.tokens, 1)], [lesson.places]
        for ahead in range(1, lesson.depth):
            anchors = order[:, : num_kept(lesson.shape[1], ahead)]
            parts.append(Grown(anchors, depth=ahead))
            tokens.append(torch.full_like(anchors, self.mask_token.value))
            positions.append(lesson.places.gather(1, anchors) + ahead)
        rows_tokens, rows_positions = (torch.cat([each.flatten() for each in all]) for all in (tokens, positions))
        masked = self._states(lesson.taps[:1, 0], torch.ones(1, dtype=torch.bool, device=columns.device))
        num_masked = len(rows_tokens) - columns.numel()
        state = torch.cat([self._features(lesson.taps.flatten(0, 1)), masked.expand(num_masked, -1)])
        normed, _ = self._run(rows_of(rows_tokens, rows_positions, branches.of(*parts)), state)
        found, begin = [], 0
        for ahead, part in enumerate(parts):
            anchors = columns if part is None else part.anchors
            rows = normed[begin : begin + anchors.numel()].unflatten(0, anchors.shape)
            begin += anchors.numel()
            newest = (anchors + 1).clamp(max=lesson.shape[1] - 1)  # the token beside the state
            found.append(Guess(rows, newest, ahead, lesson.reaches(1).gather(1, anchors)))
        return found

    def weights(self) -> dict[str, Weight]:
        mask = actual_names({"mask_hidden": Weight(("mask_hidden",), _flat)}, self.config.names)
        return {**super().weights(), **mask}

    def ignores(self, name: str) -> bool:
        return self.config.names.get(name) is None

    def readings(self) -> list[Reading]:
        return [reading for reading in super().readings() if "norm_output" not in reading.name]  # nothing is fed back

    def provenance(self) -> dict[str, Resolved]:
        return {**super().provenance(), "mask_token": self.mask_token}


def _is_named(config: Mapping[str, Any]) -> bool:
    names = [str(name).lower() for name in config.get("architectures") or []]
    return config.get("speculators_model_type") == "peagle" or any("peagle" in name for name in names)


def _with_own_default(config: Eagle3Config) -> Eagle3Config:
    """Checkpoints that do not speak of norm_before_residual were trained without it, unlike EAGLE-3's."""
    if not config.provenance["norm_before_residual"].source.startswith("default"):
        return config
    said = {**config.provenance, "norm_before_residual": Resolved(False, "default of P-EAGLE")}
    return replace(config, norm_before_residual=False, provenance=said)


def _flat(tensors: list[Tensor]) -> Tensor:
    return tensors[0].flatten()
