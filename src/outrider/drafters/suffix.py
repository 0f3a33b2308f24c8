"""Suffix drafting: what followed the last tokens in this text and in earlier requests' texts, judged by frequency.
Good for agents, code edits and anything else that says again what was said before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from outrider.config import Setting, SpeculativeConfig
from outrider.drafters.base import Drafter, drafters, no_draft
from outrider.drafters.suffix_tree import Lengths, SuffixCache, SuffixGuess
from outrider.models.base import Target
from outrider.types import Checkpoint, Draft, Hidden, Resolved, Step, Verdict

PREFIX = "suffix_decoding_"  # of the names of its settings


@drafters.register("suffix")
class Suffix(Drafter):
    """A host structure, so `propose` copies the committed tokens to the host: the one place where a drafter waits for
    the device. Texts enter it when their request has ended, however it ended; of running requests it keeps nothing, so
    preemption and slots used again need no care."""

    reads_tokens_only = True
    recordable = False  # its tree is on the host
    own_settings: Mapping[str, Any] = {
        f"{PREFIX}max_tree_depth": Setting(24, 2, 1024),  # the longest match and its continuation together
        f"{PREFIX}max_cached_requests": Setting(10_000, 0, 10**9),  # that are remembered; 0: the own text alone
        f"{PREFIX}max_cached_tokens": Setting(250_000, 1, 10**12),  # of all of them together; about 250 bytes each
        f"{PREFIX}max_spec_factor": Setting(1.0, 0.0, 1e6),  # draft tokens for each token of the match
        f"{PREFIX}min_token_prob": Setting(0.1, 0.0, 1.0),  # a draft ends where its tokens' probability falls below
    }

    def __init__(self, settings: SpeculativeConfig) -> None:
        super().__init__()
        self.lookahead = settings.num_speculative_tokens
        self.settings = {name.removeprefix(PREFIX): value for name, value in settings.own(self.own_settings).items()}
        self.forget()

    @classmethod
    def build(cls, settings: SpeculativeConfig, target: Target, checkpoint: Checkpoint | None) -> Suffix:
        if settings.model is not None:
            raise ValueError(f"suffix drafts from texts and takes no model, but got {settings.model!r}")
        return cls(settings)

    def provenance(self) -> dict[str, Resolved]:
        return {name: Resolved(value, "speculative_config") for name, value in self.settings.items()}

    def learn(self, tokens: Sequence[int], tenant: str | None) -> None:
        self.cache.add(tokens, tenant)

    def forget(self) -> None:
        """Starts with an empty memory: nothing of any earlier request is left."""
        limits = ("max_tree_depth", "max_cached_requests", "max_cached_tokens")
        self.cache = SuffixCache(*(self.settings[name] for name in limits))

    def propose(self, step: Step, hidden: Hidden, verdict: Verdict) -> Draft:
        if not step.depth:
            return no_draft(step, self.lookahead)
        slots, device = step.batch.slots, step.batch.slots.device
        lengths = step.state.lengths[slots].tolist()
        emits = step.emits.tolist()
        table = step.state.tokens[slots, : max(lengths)].cpu().numpy()  # [B, L]
        tokens = torch.zeros(len(slots), self.lookahead, dtype=torch.long)
        count = torch.zeros(len(slots), dtype=torch.long)
        limits = Lengths(step.depth, self.settings["max_spec_factor"], self.settings["min_token_prob"])
        for number, (length, tenant) in enumerate(zip(lengths, step.tenants, strict=True)):
            guess = self.cache.guess(table[number, :length], tenant, limits) if emits[number] else SuffixGuess()
            count[number] = len(guess.tokens)
            tokens[number, : len(guess.tokens)] = torch.tensor(guess.tokens, dtype=torch.long)
        return Draft(tokens.to(device), count.to(device))
