"""Tiny random targets of every family with drafters of every method, for the differential fuzz (outrider.certify.fuzz).
By hand, from the root of the repository:

    PYTHONPATH=src:tests:tests/drafters python tests/fuzz_pairs.py --requests 5000 --seed 1
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from replay import recorder_of
from samples import METHODS, drafter_settings, sample_target, suits

from outrider.certify.fuzz import FuzzReport, Truth, fuzz, try_world
from outrider.certify.trial import Failure, Pair
from outrider.config import EngineConfig, SpeculativeConfig
from outrider.engine.engine import Engine


class Pairs:
    """Makes pairs as they are asked for. Names are "family method"; a family stands for its kind of memory."""

    def __init__(self, directory: Path, device: str = "cpu") -> None:
        self._directory, self._device = directory, device
        self._made: dict[str, Path] = {}

    @staticmethod
    def names() -> list[str]:
        """Every family with a method, every method with a family, and all in another order than that of the lists."""
        found = []
        for number, family in enumerate(tiny.FAMILIES):
            fitting = [method for method in METHODS if suits(method, family)]
            found += [f"{family} {fitting[(number + turn) % len(fitting)]}" for turn in (0, 3, 7)]
        families = list(tiny.FAMILIES)
        for number, method in enumerate(METHODS):
            fitting = [family for family in families if suits(method, family)]
            found.append(f"{fitting[7 * number % len(fitting)]} {method}")
        return list(dict.fromkeys([*found, "qwen3 ngram+eagle3", "llama none", "nemotron_h none"]))

    def pair(self, name: str) -> Pair:
        family, method = name.split()
        folder = self._directory / name.replace(" ", "-")
        folder.mkdir(exist_ok=True)
        if method == "none":
            return Pair(name, EngineConfig(self._target(family), device=self._device), None)
        path = sample_target(method, folder, self._target, family)
        if method == "mtp":
            tiny.save_tokenizer(path)
        settings = drafter_settings(method.removeprefix("ngram+"), folder, self._target, family)
        if "+" in method:
            settings |= {"method": method}
        return Pair(name, EngineConfig(path, device=self._device), SpeculativeConfig.from_dict(settings))

    def _target(self, family: str, **overrides: Any) -> Path:
        key = f"{family}-{sorted(overrides.items())}"
        if key not in self._made:
            folder = self._directory / f"target-{len(self._made)}"
            self._made[key] = tiny.save_target(folder, family, **overrides)
            tiny.save_tokenizer(folder)
        return self._made[key]


def command(failure: Failure) -> str:
    """What shows the failure again."""
    numbers = ",".join(map(str, failure.numbers))
    return (
        "PYTHONPATH=src:tests:tests/drafters python tests/fuzz_pairs.py "
        f"--world {failure.world.seed} --pair '{failure.pair}' --only {numbers}"
    )


def told(report: FuzzReport) -> str:
    lines = [f"{name} {value:g}" for name, value in vars(report.figures).items()]
    for failure in report.failures:
        lines += ["", f"{failure.pair}, world {failure.world.seed}, request {failure.request}: {failure.what}"]
        lines += [repr(failure.world), command(failure)]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--world", help="one world, by its seed")
    parser.add_argument("--pair", help="family and method; all by turns where it is left out")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", help="numbers of the requests that are asked in the world")
    given = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        if given.device == "cpu":
            patch.setattr(Engine, "recorder", staticmethod(recorder_of))
        pairs = Pairs(Path(directory), given.device)
        if given.world is not None:
            pair = pairs.pair(given.pair)
            only = list(map(int, given.only.split(","))) if given.only else None
            figures, failure = try_world(given.world, pair, Truth(pair), only, records=True)
            report = FuzzReport(figures, [failure] if failure is not None else [])
        else:
            names = [given.pair] if given.pair else Pairs.names()
            made = [pairs.pair(name) for name in names]
            report = fuzz(made, given.seed, given.requests, records=True, progress=_show)
        print(told(report))
        return report.exit_status


def _show(what: str, done: int, total: int) -> None:
    print(f"\r{done} of {total} requests, {what:40}", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
