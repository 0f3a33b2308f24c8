"""config.json with one value changed, for every family and every drafter that has one. By hand, all of them:

PYTHONPATH=src:tests:tests/drafters python tests/config_mutations.py
"""

from __future__ import annotations

import json
import math
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tiny
import torch
from samples import METHODS, drafter_settings, sample_target, suits

from outrider import LLM, SamplingParams
from outrider.checkpoints.config_check import KEYS

VALUES = (None, "x", -1, 0, 1, 3, 1000, 1e30, [], {}, True, math.nan, -math.inf, 10**30, 10**9, [None], 0.5, ["x"] * 4)
# errors that name a tensor that the changed config does not describe, or where a config is read
OTHERS = (
    "has shape",
    "lacks tensor",
    "nothing uses",
    "do not fit",
    "speculative_config",
    "per_layer_config",
    "the weights of target and drafter need",
)
MAX_SECONDS = 60  # of one: none may hang
Spec = Callable[[Path], tuple[Path, dict[str, Any] | None]]


@dataclass(frozen=True)
class Subject:
    """A checkpoint whose config is changed, and how it is opened."""

    name: str
    path: Path
    opened: Spec

    def attempt(self, path: Path) -> None:
        """Loads the checkpoint there, and says something."""
        params = SamplingParams(max_tokens=3, min_tokens=2, temperature=0, logprobs=1)
        with LLM(*self.opened(path), max_model_len=32, max_num_seqs=2, device="cpu") as llm:
            (output,) = llm.generate([[5, 6, 7, 8, 5, 6]], params)
        answer = output.outputs[0]
        assert len(answer.token_ids) >= 2
        assert all(math.isfinite(entry.logprob) for row in answer.logprobs or () for entry in row.values())


def subjects(directory: Path) -> Iterator[Subject]:
    made: dict[str, Path] = {}

    def target(family: str = "llama", **overrides: Any) -> Path:
        key = f"{family} {sorted(overrides.items())}"
        if key not in made:
            made[key] = tiny.save_target(directory / f"target-{len(made)}", family, **overrides)
        return made[key]

    for family in tiny.FAMILIES:
        yield Subject(family, target(family), lambda path: (path, None))
    for method in METHODS:
        family = next(each for each in ("llama", *tiny.FAMILIES) if suits(method, each))
        folder = directory / method
        folder.mkdir()
        path, settings = sample_target(method, folder, target, family), drafter_settings(method, folder, target, family)
        if method == "mtp":
            yield Subject(method, path, lambda changed, settings=settings: (changed, settings))
        elif "model" in settings:
            yield Subject(
                method,
                Path(settings["model"]),
                lambda changed, path=path, settings=settings: (path, {**settings, "model": str(changed)}),
            )


def read_keys(config: dict[str, Any], outer: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Where every key stands that is read."""
    for key, value in config.items():
        if key in KEYS or "per_layer_config" in outer:
            yield (*outer, key)
        if isinstance(value, dict) and (key in KEYS or "per_layer_config" in outer) and key != "vision_config":
            yield from read_keys(value, (*outer, key))


def changed(config: dict[str, Any], place: tuple[str, ...], value: Any) -> dict[str, Any]:
    copy = json.loads(json.dumps(config))
    inner = copy
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return copy


def faults_of(subject: Subject, copy: Path, chance: random.Random, share: float) -> tuple[int, list[str]]:
    """How many mutations were tried, and those that neither work nor are refused by a ValueError with a name in it."""
    shutil.copytree(subject.path, copy)
    config = json.loads((copy / "config.json").read_text())
    faults, count = [], 0
    for place in read_keys(config):
        for value in VALUES:
            if chance.random() >= share:
                continue
            (copy / "config.json").write_text(json.dumps(changed(config, place, value)))
            what, begin = f"{subject.name}: {'.'.join(place)} = {value!r}", time.perf_counter()
            count += 1
            try:
                subject.attempt(copy)
            except ValueError as error:
                if not any(name in str(error) for name in (*KEYS, *OTHERS)):
                    faults.append(f"{what}: names no key: {error}")
            except Exception as error:
                faults.append(f"{what}: {error!r}")
            if time.perf_counter() - begin > MAX_SECONDS:
                faults.append(f"{what}: takes too long")
    return count, faults


def main() -> int:
    torch.set_num_threads(1)
    total, bad = 0, 0
    with tempfile.TemporaryDirectory() as directory:
        for subject in subjects(Path(directory)):
            count, faults = faults_of(subject, Path(directory, f"copy-{subject.name}"), random.Random(0), 1.0)
            total, bad = total + count, bad + len(faults)
            print(f"{subject.name}: {count} mutations, {len(faults)} bad", *faults, sep="\n  ", flush=True)
    print(f"{total} mutations, {bad} bad")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
