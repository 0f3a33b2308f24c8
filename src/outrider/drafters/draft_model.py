"""A separate, smaller language model of the same vocabulary drafts token by token; or, if it was trained to (PARD),
all tokens in one pass, from mask tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.config import SpeculativeConfig
from outrider.drafters.base import Drafter, Sureness, draft_chain, drafters, extend, no_draft, single_rows
from outrider.drafters.parallel import draft_at_once, draft_rows, mask_rows, num_masked, resolve_mask_token
from outrider.models.base import Target, targets
from outrider.types import Batch, Checkpoint, Draft, Hidden, Resolved, Step, Verdict, Weight


@drafters.register("draft_model")
class DraftModel(Drafter):
    needs_tokenizer_of_target = True
    drafts_in_parallel = True

    def __init__(self, model: Target, lookahead: int, vocab_size: int, mask_token: Resolved | None = None) -> None:
        super().__init__()
        self.model = model
        self.lookahead = lookahead
        self.vocab_size = vocab_size  # the target's; ids beyond the smaller of the two are padding
        self.mask_token = mask_token  # None: token by token

    @classmethod
    def build(cls, settings: SpeculativeConfig, target: Target, checkpoint: Checkpoint | None) -> DraftModel:
        if checkpoint is None:
            raise ValueError('method draft_model needs "model": a checkpoint that shares the target\'s tokenizer')
        architectures = checkpoint.config.get("architectures") or []
        if len(architectures) != 1:
            raise ValueError(f"{checkpoint.path}: config.json: architectures must name one, not {architectures!r}")
        model = targets[architectures[0]].from_config(checkpoint.config)
        # Vocabularies are padded to a multiple of something; more than that apart, they are different tokenizers.
        if abs(model.vocab_size - target.vocab_size) > 512:
            raise ValueError(
                f"draft model {checkpoint.path} has a vocabulary of {model.vocab_size} (vocab_size), the target one "
                f"of {target.vocab_size}: they cannot share token ids; choose a draft model with the same tokenizer"
            )
        mask_token = (
            resolve_mask_token(checkpoint.config, model.embed.vocab_size) if settings.parallel_drafting else None
        )
        return cls(model, settings.num_speculative_tokens, target.vocab_size, mask_token)

    @classmethod
    def recognises(cls, config: Mapping[str, Any]) -> Sureness:
        known = any(name in targets for name in config.get("architectures") or [])
        return Sureness.PERHAPS if known else Sureness.NO

    def weights(self) -> dict[str, Weight]:
        return {f"model.{name}": weight for name, weight in self.model.weights().items()}

    def canonical(self, name: str) -> str:
        return self.model.canonical(name)

    def ignores(self, name: str) -> bool:
        return self.model.ignores(name)

    def provenance(self) -> dict[str, Resolved]:
        architecture = self.model.config["architectures"][0]
        said = {"architecture": Resolved(architecture, "architectures in the draft model's config.json")}
        return said if self.mask_token is None else {**said, "mask_token": self.mask_token}

    def propose(self, step: Step, hidden: Hidden, verdict: Verdict) -> Draft:
        return self._one_by_one(step) if self.mask_token is None else self._at_once(step, self.mask_token.value)

    def _at_once(self, step: Step, mask_token: int) -> Draft:
        """Recurrent layers need no more than this: the masked rows follow the newest token, and no state is kept of
        them."""
        extension = extend(step, extra=num_masked(step))
        last = self._run(mask_rows(extension, step, mask_token)[0])
        if not step.depth:
            return no_draft(step, self.lookahead)
        rows = last[draft_rows(extension, step)]
        return draft_at_once(step, self.lookahead, self._logits(rows), sharpness=1.0)

    def _one_by_one(self, step: Step) -> Draft:
        extension = extend(step)
        last = self._run(extension.batch)[extension.last]
        if not step.depth:
            return no_draft(step, self.lookahead)

        def advance(tokens: Tensor, ahead: int) -> Tensor:
            return self._logits(self._run(single_rows(step, ahead, tokens)))

        # a model of its own, which may be as sure as the target is
        return draft_chain(step, self.lookahead, self._logits(last), advance, sharpness=1.0)

    def _run(self, batch: Batch) -> Tensor:
        known = batch.input_ids.clamp(max=self.model.embed.vocab_size - 1)  # the target may have more padding ids
        # It sees an image's placeholder tokens, not the target's features, which are made for the target's layers.
        return self.model(replace(batch, input_ids=known, features=None)).last

    def _logits(self, last: Tensor) -> Tensor:
        logits = self.model.logits(last)
        if self.model.vocab_size > self.vocab_size:
            return logits[:, : self.vocab_size]
        return torch.nn.functional.pad(logits, (0, self.vocab_size - self.model.vocab_size), value=-torch.inf)
