"""What can be seen without drafting: weights, vocabularies, tokenizers, rotary settings, positions.
Then, with text at hand: whether the drafter can say what the target says, and whether long contexts harm it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from outrider.agreement import MIN_PLACES, Agreement
from outrider.checkpoints.checkpoint import load_tokenizer, open_checkpoint
from outrider.doctor.diagnosis import FAULT, GOOD, NOTE, ContextBucket, Finding
from outrider.doctor.readings import differing_rotaries, rope_settings
from outrider.drafters.base import Drafter
from outrider.layers.packing import numbers
from outrider.models.base import Target
from outrider.tokenizer import Tokenizer

PADDING = 0.05  # of the draft ids: so many may stand for nothing of their own
COVERAGE_EXPECTED, COVERAGE_NEEDED = 0.95, 0.5  # of the target's own words
LONG_CONTEXT_KEEPS = 0.6  # of the accepted draft tokens a round: less is suspicious


@dataclass(frozen=True)
class DrafterFiles:
    """What the drafter's own checkpoint carries, where it has one."""

    config: dict[str, Any]
    tokenizer: Tokenizer | None

    @classmethod
    def of(cls, model: str | None) -> DrafterFiles:
        if model is None:
            return cls({}, None)
        checkpoint = open_checkpoint(model)
        try:
            return cls(checkpoint.config, load_tokenizer(checkpoint))
        finally:
            checkpoint.close()

    @property
    def max_positions(self) -> int | None:
        layers = (self.config, self.config.get("transformer_layer_config") or {})
        found = [place["max_position_embeddings"] for place in layers if place.get("max_position_embeddings")]
        return int(found[0]) if found else None


def static_findings(
    drafter: Drafter, target: Target, tokenizer: Tokenizer | None, papers: DrafterFiles
) -> list[Finding]:
    return [
        *_weights(drafter),
        *_vocabulary(drafter, target),
        *_tokenizers(tokenizer, papers.tokenizer),
        *_rope(drafter, target),
        *_positions(target, papers),
    ]


def text_findings(
    drafter: Drafter, target: Target, agreement: Agreement, buckets: list[ContextBucket]
) -> list[Finding]:
    return [*_coverage(drafter, target, agreement), *_long_contexts(buckets)]


def _weights(drafter: Drafter) -> Iterator[Finding]:
    broken, empty, count = [], [], 0
    for name, each in numbers(drafter):
        count += each.numel()
        if each.is_floating_point() and not torch.isfinite(each).all():
            broken.append(name)
        elif each.is_floating_point() and not each.any() and not name.endswith("bias"):
            empty.append(name)
    if not count:
        return
    for names, what in ((broken, "holds numbers that are none (NaN or infinite)"), (empty, "is zero throughout")):
        if names:
            yield Finding(FAULT, "weights", f"{_some(names)} {what}: the file is damaged, or was never trained")
    if not broken and not empty:
        yield Finding(GOOD, "weights", f"{count / 1e6:.1f} M parameters, all of the expected shapes, all numbers")


def _vocabulary(drafter: Drafter, target: Target) -> Iterator[Finding]:
    ids = drafter.target_ids()
    if ids is None:
        yield Finding(GOOD, "vocabulary", f"the target's own {target.vocab_size} tokens")
        return
    num_distinct = len(ids.unique())
    if num_distinct < len(ids):
        again = len(ids) - num_distinct
        message = f"d2t sends {again} of {len(ids)} draft ids to tokens that others stand for: padding, or a wrong map"
        yield Finding(NOTE if again <= PADDING * len(ids) else FAULT, "vocabulary", message)
    else:
        yield Finding(GOOD, "vocabulary", f"{len(ids)} of the target's {target.vocab_size} tokens, each once")


def _tokenizers(target: Tokenizer | None, drafter: Tokenizer | None) -> Iterator[Finding]:
    if target is None:
        yield Finding(NOTE, "tokenizer", "the target has none, so that it cannot be asked anything in words")
    elif drafter is not None and drafter.fingerprint() == target.fingerprint():
        yield Finding(GOOD, "tokenizer", "the drafter's is the target's")
    elif drafter is not None:
        yield Finding(FAULT, "tokenizer", "the drafter's is not the target's: the same ids mean other text to it")


def _rope(drafter: Drafter, target: Target) -> Iterator[Finding]:
    if differing_rotaries(drafter, target):
        said = ", ".join(f"{key} {value}" for key, value in rope_settings(target.config).items())
        yield Finding(NOTE, "rotary", f"the drafter's frequencies are not those of the target ({said})")


def _positions(target: Target, papers: DrafterFiles) -> Iterator[Finding]:
    known = papers.max_positions
    if known is not None and known < target.max_len:
        message = f"the drafter's config.json names {known}, the target's {target.max_len}: beyond, it may be wrong"
        yield Finding(NOTE, "positions", message)


def _coverage(drafter: Drafter, target: Target, agreement: Agreement) -> Iterator[Finding]:
    ids = drafter.target_ids()
    said = [token for text in agreement.texts for token in text]
    if ids is None or not said:
        return
    can_say = torch.zeros(target.vocab_size, dtype=torch.bool)
    can_say[ids[(ids >= 0) & (ids < target.vocab_size)].cpu()] = True
    share = float(can_say[said].float().mean())
    level = GOOD if share >= COVERAGE_EXPECTED else NOTE if share >= COVERAGE_NEEDED else FAULT
    yield Finding(level, "coverage", f"{share:.1%} of the target's words are in the drafter's vocabulary")


def _long_contexts(buckets: list[ContextBucket]) -> Iterator[Finding]:
    known = [each for each in buckets if len(each.agreement.places) >= MIN_PLACES]
    if len(known) < 2:
        return
    short, long = (each.agreement.mean_accept_length - 1 for each in (known[0], known[-1]))
    if short > 0 and long < LONG_CONTEXT_KEEPS * short:
        message = (
            f"with {known[-1].low} tokens or more the accept length is {1 + long:.2f}, with fewer than "
            f"{known[0].high} {1 + short:.2f}: rotary settings, or training on short texts only"
        )
        yield Finding(NOTE, "long contexts", message)


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
