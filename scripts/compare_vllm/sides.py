"""What both sides share: the file that describes the cases, and a rule that overrides every other draft.
Nothing here imports an engine, so that it runs in either's virtualenv."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

NUM_TOKENS = 64  # generated for each prompt


@dataclass(frozen=True)
class Case:
    """One target with one drafter, and what each engine is to be told about them."""

    name: str
    target: str
    speculative: dict[str, Any]  # for both engines, in vLLM's names
    prompts: list[list[int]]
    vocab_size: int
    guided: bool = True  # override every other draft, so that random drafters see drafts accepted
    vllm: dict[str, Any] = field(default_factory=dict)  # for vLLM's LLM alone
    vllm_speculative: dict[str, Any] = field(default_factory=dict)  # more speculative settings, for vLLM alone
    outrider: dict[str, Any] = field(default_factory=dict)  # more speculative settings, for Outrider alone

    @property
    def depth(self) -> int:
        return int(self.speculative["num_speculative_tokens"])


def save_cases(directory: Path, cases: list[Case]) -> None:
    (directory / "cases.json").write_text(json.dumps([asdict(case) for case in cases], indent=1))


def load_cases(directory: Path, names: list[str]) -> list[Case]:
    cases = [Case(**case) for case in json.loads((directory / "cases.json").read_text())]
    return [case for case in cases if not names or any(name in case.name for name in names)]


def override(own: list[int], truth: list[int], length: int, vocab_size: int) -> list[int]:
    """The draft that is put to the target after `length` tokens. Where that is even, it is the target's own
    continuation with one wrong token, whose place wanders over the draft and past its end."""
    known = truth[length : length + len(own)]
    if length % 2 or len(known) < len(own):
        return own
    wrong = length // 2 % (len(own) + 1)
    return [(token + 1) % vocab_size if place == wrong else token for place, token in enumerate(known)]


def text_number(texts: list[list[int]], tokens: list[int]) -> int:
    """Which text begins with these tokens."""
    return next(number for number, text in enumerate(texts) if text[: len(tokens)] == tokens)
