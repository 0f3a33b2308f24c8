"""N-gram lookup: what followed the last few tokens when they stood in this text before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from outrider.config import Setting, SpeculativeConfig
from outrider.drafters.base import Drafter, drafters, no_draft
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
        """The longest suffix that occurred before wins; of its occurrences, the latest with a full draft after it."""
        if not step.depth:
            return no_draft(step, self.lookahead)
        slots = step.batch.slots
        width = min(step.batch.max_len + 1, step.state.tokens.shape[1])
        lengths = step.state.lengths[slots, None].clamp(max=width)  # [B, 1]; a prompt may go on beyond this chunk
        tokens = step.state.tokens[slots, :width]  # [B, L]
        index = torch.arange(width, device=tokens.device)
        # run[b, i]: how many tokens ending at i equal the last ones of the text, up to `longest`
        run = torch.zeros_like(tokens)
        alike = torch.ones_like(tokens, dtype=torch.bool)
        for back in range(min(self.longest, width)):
            last = tokens.gather(1, (lengths - 1 - back).clamp(min=0))
            shifted = torch.cat([tokens.new_full((len(tokens), back), -1), tokens[:, : width - back]], dim=1)
            alike = alike & (shifted == last) & (lengths > back)
            run += alike
        earlier = index < lengths - 1
        run = torch.where(earlier & (run >= self.shortest), run, 0)
        room = (lengths - 1 - index).clamp(max=self.lookahead)
        score = (run * (self.lookahead + 1) + room) * width + index
        best = torch.where(run > 0, score, -1).argmax(1)  # [B]
        match = run.gather(1, best[:, None])[:, 0]
        start = best + 1
        # As far ahead as the texts agreed so far: a chance match is short, and a copy soon earns the full depth.
        count = torch.minimum(lengths[:, 0] - start, match).clamp(max=step.depth)
        place = (start[:, None] + torch.arange(self.lookahead, device=tokens.device)).clamp(max=width - 1)
        return Draft(tokens.gather(1, place), torch.where(step.emits, count, 0))
