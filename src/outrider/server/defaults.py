"""What holds for requests that do not say otherwise: the checkpoint's own sampling settings, and seeds."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from outrider.generation_config import SAMPLING_KEYS, default_sampling
from outrider.sampling_params import SamplingParams

MAX_TOKENS = "max_new_tokens"


@dataclass(frozen=True)
class ServerDefaults:
    """`settings` are in the names of generation_config.json."""

    settings: Mapping[str, float | int] = field(default_factory=dict)
    seed: int | None = None  # of the server; None: every request has a fresh one

    def sampling(self) -> dict[str, float | int]:
        """The defaults of requests, as arguments of SamplingParams."""
        return {name: value for name, value in self.settings.items() if name != MAX_TOKENS}

    @property
    def max_tokens(self) -> int | None:
        """Tokens of an answer in a chat; None: until the context is full."""
        found = self.settings.get(MAX_TOKENS)
        return None if found is None else int(found)

    def seeds(self) -> Callable[[], int | None]:
        """One after another, for requests that have none: the same after every start."""
        if self.seed is None:
            return lambda: None
        made = random.Random(self.seed)
        return lambda: made.getrandbits(63)


def chosen_defaults(source: str, checkpoint: Path, overriding: str | None, seed: int | None) -> ServerDefaults:
    """`source`: auto reads the checkpoint's generation_config.json, vllm nothing; else it is a directory with such a
    file. `overriding`: a JSON object whose values count more. Raises ValueError for values that no request may have."""
    if source not in ("auto", "vllm") and not (Path(source).expanduser() / "generation_config.json").is_file():
        raise ValueError(f"--generation-config {source}: give auto, vllm, or a directory with a generation_config.json")
    found: dict[str, Any] = {}
    if source != "vllm":
        found = dict(default_sampling(checkpoint if source == "auto" else Path(source).expanduser()))
    found |= _overriding(overriding)
    defaults = ServerDefaults(found, seed)
    arguments: dict[str, Any] = {**defaults.sampling(), "max_tokens": defaults.max_tokens}
    SamplingParams(**arguments)  # which checks them
    return defaults


def _overriding(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        given = json.loads(text)
    except ValueError as error:
        raise ValueError(f"--override-generation-config is not valid JSON ({error})") from None
    unknown = sorted(set(given) - set(SAMPLING_KEYS)) if isinstance(given, dict) else [text]
    if unknown:
        known = ", ".join(SAMPLING_KEYS)
        raise ValueError(f"--override-generation-config takes an object of {known}; not {', '.join(unknown)}")
    return {name: value for name, value in given.items() if value is not None}
