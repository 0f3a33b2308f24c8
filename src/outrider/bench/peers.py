"""Other engines that a benchmark can stand beside ours, on the very same weights.
One that is missing is named, not hidden."""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Self

import torch

from outrider.bench.sides import Prompts, Side, Timing
from outrider.registry import Registry


class PeerUnavailable(ValueError):  # noqa: N818  (it reads as what it says)
    """This peer cannot take part, and why."""


@dataclass(frozen=True)
class PeerOptions:
    """What a peer must know to be comparable."""

    model: str | Path
    dtype: torch.dtype
    device: torch.device
    max_len: int
    threads: int


class Peer:
    name: str
    pass_bytes: int = 0
    required: bool = False  # where it was asked for, it must be there

    @classmethod
    def open(cls, options: PeerOptions) -> Self:
        raise NotImplementedError

    def start_run(self) -> None:
        """Nothing is remembered from run to run."""

    def answer(self, prompts: Prompts, max_tokens: int) -> Timing:
        raise NotImplementedError

    def close(self) -> None:
        """Frees the weights."""


peers: Registry[type[Peer]] = Registry("peer")


def open_peers(names: Sequence[str], options: PeerOptions) -> tuple[list[Side], list[str]]:
    """The peers that can take part, and a note for each that cannot."""
    opened: list[Side] = []
    notes: list[str] = []
    for name in names:
        try:
            opened.append(peers[name].open(options))
        except PeerUnavailable as reason:
            if peers[name].required:
                raise
            notes.append(f"{name} is left out: {reason}")
    return opened, notes


def import_peer(module: str, package: str) -> ModuleType:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise PeerUnavailable(f"{package} is not installed ({error}): pip install {package}") from error


class Clock:
    """Starts when made; notes when the first token is there."""

    def __init__(self) -> None:
        self.first: float | None = None
        self.begin = time.perf_counter()

    def now(self) -> float:
        return time.perf_counter() - self.begin
