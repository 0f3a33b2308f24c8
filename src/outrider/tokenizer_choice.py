"""Which tokenizer a pair speaks with, whether a draft model speaks with the same, and which tokens end a text."""

from __future__ import annotations

from outrider.checkpoints.checkpoint import load_tokenizer
from outrider.config import EngineConfig
from outrider.hub import TOKENIZER_PATTERNS, located
from outrider.tokenizer import Tokenizer
from outrider.types import Checkpoint


def tokenizer_of(config: EngineConfig, checkpoint: Checkpoint) -> Tokenizer | None:
    """The one that was asked for, or the one that the target comes with."""
    if config.skip_tokenizer_init:
        return None
    if config.tokenizer is None:
        return load_tokenizer(checkpoint)
    found = Tokenizer.from_directory(located(config.tokenizer, patterns=TOKENIZER_PATTERNS))
    if found is None:
        raise ValueError(
            f"{config.tokenizer} holds no tokenizer.json: give the directory or the hub id of one that does"
        )
    return found


def check_same_tokenizer(target: Tokenizer | None, drafter: Tokenizer | None) -> None:
    if target is not None and drafter is not None and target.fingerprint() != drafter.fingerprint():
        raise ValueError(
            "the draft model's tokenizer is not the target's: their token ids mean different text; choose a draft "
            "model of the same family"
        )


def end_ids_of(checkpoint: Checkpoint, tokenizer: Tokenizer | None) -> frozenset[int]:
    """generation_config.json knows best which tokens end a text, then config.json, then the tokenizer."""
    for config in (checkpoint.generation_config, checkpoint.config, checkpoint.config.get("text_config") or {}):
        found = config.get("eos_token_id")
        if found is not None:
            return frozenset(found if isinstance(found, list) else [found])
    if tokenizer is not None and tokenizer.eos_token_id is not None:
        return frozenset([tokenizer.eos_token_id])
    return frozenset()
