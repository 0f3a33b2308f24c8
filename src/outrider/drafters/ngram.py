"""N-gram lookup: what followed the last few tokens when they stood in this text before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outrider.config import Setting, SpeculativeConfig
from outrider.drafters.base import Drafter, drafters, no_draft
from outrider.kernels.lookup import Lookup, lookup
from outrider.models.base import Target
from outrider.types import Checkpoint, Draft, Hidden, Resolved, Step, Verdict


@drafters.register("ngram")
class Ngram(Drafter):
    reads_tokens_only = True
    own_settings: Mapping[str, Any] = {"prompt_lookup_min": Setting(2, 1, 64), "prompt_lookup_max": Setting(8, 1, 64)}

    def __init__(self, settings: SpeculativeConfig) -> None:
        super().__init__()
        self.lookahead = settings.num_speculative_tokens
        self.shortest, self.longest = settings.own(self.own_settings).values()
        if self.shortest > self.longest:
            raise ValueError(f"prompt_lookup_min ({self.shortest}) must not exceed prompt_lookup_max ({self.longest})")

    @classmethod
    def build(cls, settings: SpeculativeConfig, target: Target, checkpoint: Checkpoint | None) -> Ngram:
        if settings.model is not None:
            raise ValueError(f"ngram drafts from the text itself and takes no model, but got {settings.model!r}")
        return cls(settings)

    def provenance(self) -> dict[str, Resolved]:
        return {
            "prompt_lookup_min": Resolved(self.shortest, "speculative_config"),
            "prompt_lookup_max": Resolved(self.longest, "speculative_config"),
        }

    def propose(self, step: Step, hidden: Hidden, verdict: Verdict) -> Draft:
        if not step.depth:
            return no_draft(step, self.lookahead)
        slots, state = step.batch.slots, step.state
        how = Lookup(step.depth, self.lookahead, self.shortest, self.longest)
        tokens, count = lookup(state.tokens, slots, state.lengths[slots], step.batch.max_len + 1, how)
        return Draft(tokens, torch.where(step.emits, count, 0))
