"""A sample drafter of every registered method, and an oracle that is right with a chosen probability."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import tiny
import torch

from outrider.config import SpeculativeConfig
from outrider.drafters.base import Drafter, drafters, extend, no_draft, shifted
from outrider.models.base import Target
from outrider.types import Checkpoint, Draft, Hidden, Step, Verdict

METHODS = [name for name in drafters if name != "oracle"]


def drafter_settings(method: str, directory: Path, target: Callable[..., Path], family: str) -> dict[str, Any]:
    """speculative_config for a tiny drafter that goes with tiny targets of a family. One line per method."""
    if method == "ngram":
        return {"method": "ngram", "prompt_lookup_min": 1}
    if method == "draft_model":
        return {"method": "draft_model", "model": str(target(family, num_hidden_layers=3))}
    if method == "eagle3":
        return {"method": "eagle3", "model": str(tiny.save_eagle3(directory / "eagle3", draft_vocab=200))}
    if method == "oracle":
        return {"method": "oracle"}
    raise AssertionError(f"tests/samples.py has no sample of the method {method!r}: add one")


def told(step: Step, truth: list[list[int]], lookahead: int, skill: float, vocab_size: int) -> Draft:
    """Drafts from the true continuations, each token right with probability `skill`. Keyed by the text, so that the
    same text always gets the same draft."""
    rows, counts = [], []
    for slot in step.batch.slots.tolist():
        length = int(step.state.lengths[slot])
        text = step.state.tokens[slot, :length].tolist()
        (known, *_) = [each for each in truth if each[:length] == text] or [text]
        draft = (known[length:] + [0] * lookahead)[:lookahead]
        generator = torch.Generator().manual_seed(hash(tuple(text)) % 2**31)
        wrong = torch.rand(lookahead, generator=generator) > skill
        count = int(torch.randint(0, lookahead + 1, (), generator=generator))
        rows.append([(token + bool(w)) % vocab_size for token, w in zip(draft, wrong.tolist(), strict=True)])
        counts.append(min(count, step.depth))
    device = step.batch.slots.device
    count = torch.where(step.emits, torch.tensor(counts, device=device), 0)
    return Draft(torch.tensor(rows, device=device), count)


def guide(drafter: Drafter, truth: list[list[int]], vocab_size: int, skill: float = 0.7) -> None:
    """Wherever a text's length is even, the drafter's own proposal is replaced by one that is mostly right: a random
    drafter is always wrong, and would never be tried with accepted drafts."""
    propose = drafter.propose

    def guided(step: Step, hidden: Hidden, verdict: Verdict) -> Draft:
        own = propose(step, hidden, verdict)
        if not step.depth:
            return own
        other = told(step, truth, drafter.lookahead, skill, vocab_size)
        replaced = step.state.lengths[step.batch.slots] % 2 == 0
        return Draft(
            torch.where(replaced[:, None], other.tokens, own.tokens), torch.where(replaced, other.count, own.count)
        )

    drafter.propose = guided  # type: ignore[method-assign]


@drafters.register("oracle")
class Oracle(Drafter):
    """Knows the true continuations (told through `truth`) and gets a token right with probability `skill`.

    It asks for taps and follows the text like a real one, and checks that what it is handed is right."""

    truth: list[list[int]] = []  # noqa: RUF012
    skill = 0.7
    taps = (1, 3)

    def __init__(self, settings: SpeculativeConfig, target: Target) -> None:
        super().__init__()
        self.lookahead = settings.num_speculative_tokens
        self.vocab_size = target.vocab_size

    @classmethod
    def build(cls, settings: SpeculativeConfig, target: Target, checkpoint: Checkpoint | None) -> Oracle:
        return cls(settings, target)

    def propose(self, step: Step, hidden: Hidden, verdict: Verdict) -> Draft:
        extension = extend(step, 1)
        assert shifted(hidden, extension, step).shape[0] == len(extension.batch.input_ids)
        if not step.depth:
            return no_draft(step, self.lookahead)
        return told(step, self.truth, self.lookahead, self.skill, self.vocab_size)
