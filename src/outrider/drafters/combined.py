"""Several methods in one: "ngram+eagle3" takes what the text itself suggests, and asks the model drafter otherwise.
Any names joined by "+": all but the last draft from text alone, and the first with something to say is heard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from outrider.config import SpeculativeConfig
from outrider.drafters.base import Drafter, Reading, drafters
from outrider.models.base import Target
from outrider.types import Checkpoint, Draft, Hidden, Resolved, Step, Verdict, Weight

BETWEEN = "+"
# A shorter proposal is no reason to do without the last drafter's. Measured with the embedded pair and K = 5, tokens a
# round on (chat, repetitive) prompts: EAGLE-3 alone 2.85, 3.02; with n-grams of at least 1 token 2.84, 3.06; 3 tokens
# 2.90, 3.16; 4 tokens 2.89, 3.17; with suffixes of 1 token 2.41, 2.38; 3 tokens 2.90, 3.06; 4 tokens 2.89, 3.16.
LEAST = 4


class Combined(Drafter):
    """Subclasses, one for each combination, say which methods it is made of. The last one may have layers and a
    checkpoint; whoever is heard, it follows the text in every round, so that its cache is always right."""

    methods: tuple[str, ...]
    drafts_in_parallel = True  # if the last one does

    def __init__(self, parts: Sequence[Drafter]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)
        self.lookahead = max(part.lookahead for part in parts)
        self.taps, self.num_carried = self.last.taps, self.last.num_carried
        self.reads_last = self.last.reads_last
        self.recordable = all(part.recordable for part in parts)

    @classmethod
    def build(cls, settings: SpeculativeConfig, target: Target, checkpoint: Checkpoint | None) -> Combined:
        for method in cls.methods[:-1]:
            if not drafters[method].reads_tokens_only:
                usable = ", ".join(sorted(name for name in drafters if drafters[name].reads_tokens_only))
                raise ValueError(
                    f"method {BETWEEN.join(cls.methods)}: {method} does not draft from text alone, so it must come last"
                    f" (what can come before: {usable})"
                )
        text_settings = replace(settings, model=None)
        parts = [drafters[name].build(replace(text_settings, method=name), target, None) for name in cls.methods[:-1]]
        method = cls._meant(settings, checkpoint)
        if settings.parallel_drafting and not drafters[method].drafts_in_parallel:
            raise ValueError(f"method {method} has no use for parallel_drafting: remove it")
        return cls([*parts, drafters[method].build(replace(settings, method=method), target, checkpoint)])

    @classmethod
    def _meant(cls, settings: SpeculativeConfig, checkpoint: Checkpoint | None) -> str:
        """The last method, or the one that its name stands for."""
        config = checkpoint.config if checkpoint is not None else {}
        named = cls.methods[-1]
        settings = replace(settings, method=named)
        return next((name for name in drafters if drafters[name].replaces(named, settings, config)), named)

    @classmethod
    def supports(cls, target: type[Target]) -> bool:
        return all(drafters[method].supports(target) for method in cls.methods)

    @property
    def last(self) -> Drafter:
        last = self.parts[-1]
        assert isinstance(last, Drafter)
        return last

    # drafting

    def learn(self, tokens: Sequence[int], tenant: str | None) -> None:
        for part in self.parts:
            assert isinstance(part, Drafter)
            part.learn(tokens, tenant)

    def propose(self, step: Step, hidden: Hidden, verdict: Verdict) -> Draft:
        heard = Draft(torch.zeros_like(step.num_drafts)[:, None], torch.zeros_like(step.num_drafts))
        least = min(LEAST, max(step.depth, 1))
        for part in self.parts[:-1]:
            assert isinstance(part, Drafter)
            heard = self._first(heard, part.propose(step, hidden, verdict), least)
        if self.ranks is None and _nobody_is_left(heard, step, least):
            step = replace(step, shape=replace(step.shape, depth=0))
        return self._first(heard, self.last.propose(step, hidden, verdict), least)

    def _first(self, first: Draft, second: Draft, least: int) -> Draft:
        """For each request the first of two drafts, if it is long enough, the longer one, or of a prediction."""
        keep = (first.count >= least) | (first.count >= second.count)  # [B]
        if first.predicted is not None:
            keep = keep | first.predicted
        tokens = torch.where(keep[:, None], self._wide(first.tokens), self._wide(second.tokens))
        # predictions go before all others: where one is heard, nothing that comes later is
        predicted = first.predicted if first.predicted is not None else second.predicted
        return Draft(tokens, torch.where(keep, first.count, second.count), predicted)

    def _wide(self, tokens: Tensor) -> Tensor:
        return F.pad(tokens, (0, self.lookahead - tokens.shape[1]))

    # the checkpoint is the last one's

    def weights(self) -> dict[str, Weight]:
        number = len(self.parts) - 1
        return {f"parts.{number}.{name}": weight for name, weight in self.last.weights().items()}

    def canonical(self, name: str) -> str:
        return self.last.canonical(name)

    def ignores(self, name: str) -> bool:
        return self.last.ignores(name)

    def check(self) -> None:
        self.last.check()

    def provenance(self) -> dict[str, Resolved]:
        found: dict[str, Resolved] = {}
        for method, part in zip(self.methods, self.parts, strict=True):
            assert isinstance(part, Drafter)
            found |= {f"{method}: {name}": resolved for name, resolved in part.provenance().items()}
        return found

    def readings(self) -> list[Reading]:
        return []  # told apart by how well they draft, which others would hide: ask about the last drafter alone


def _nobody_is_left(heard: Draft, step: Step, least: int) -> bool:
    """Whether every request has its draft already: asked only where the answer is at hand, without waiting for a
    device."""
    if heard.count.device.type != "cpu":
        return False
    done = (heard.count >= least) | ~step.emits
    return bool((done if heard.predicted is None else done | heard.predicted).all())


@drafters.derive
def combination(name: str) -> type[Drafter] | None:
    """The class for names joined by "+", where all of them are known."""
    methods = tuple(name.split(BETWEEN))
    if len(methods) < 2 or not all(method in drafters for method in methods):
        return None
    last = drafters[methods[-1]]
    attributes = {
        "methods": methods,
        "reads_tokens_only": last.reads_tokens_only,
        "weights_in_target": last.weights_in_target,
        "needs_tokenizer_of_target": last.needs_tokenizer_of_target,
        "own_settings": {name: value for method in methods for name, value in drafters[method].own_settings.items()},
    }
    return type("Combined", (Combined,), attributes)
