"""Sampling filters of your own: one number for each request says which tokens may be drawn. A class that is registered
here, or named by an entry point of the group outrider.filters, is asked for in SamplingParams(extra_args={NAME: 1})."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from outrider.registry import Registry

if TYPE_CHECKING:
    from outrider.types import Sampling

filters: Registry[type[Filter]] = Registry("sampling filter", "outrider.filters")


class Filter:
    """Which tokens of a row may be drawn. It is part of the target's choice, so it must look at nothing but its row."""

    off: float = 0.0  # the number of requests that do not ask for it: their rows are left alone
    low: float = 0.0  # the numbers that may be asked for
    high: float = 1.0

    @staticmethod
    def keeps(probs: Tensor, value: Tensor) -> Tensor:
        """probs [R, V] at each row's temperature, value [R] -> what may be drawn [R, V], bool. The likeliest token may
        always be. Rounds are recorded with it: it must not ask the host anything."""
        raise NotImplementedError


def check_filters(given: Mapping[str, float]) -> None:
    """Raises ValueError for names that nobody registered, and for numbers out of range."""
    for name, value in given.items():
        found = filters[name]
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not (found.low <= value <= found.high or value == found.off):
            raise ValueError(f"{name} must be a number between {found.low:g} and {found.high:g}, not {value!r}")


def without_dropped(logits: Tensor, sampling: Sampling, rows: Tensor, least: float) -> Tensor:
    """Logits [R, V] with -inf where a filter of somebody's own keeps a token from being drawn. Rows whose temperature
    is at most `least` are greedy, and left alone."""
    temperature = sampling.temperature[rows, None]
    probs = (logits.float() / temperature.clamp(min=least)).softmax(-1)
    dropped = torch.zeros_like(probs, dtype=torch.bool)
    for name, values in sampling.extra.items():
        value = values[rows]
        dropped |= ~filters[name].keeps(probs, value) & (value != filters[name].off)[:, None]
    dropped &= temperature > least
    dropped.scatter_(-1, probs.argmax(-1, keepdim=True), False)
    return logits.masked_fill(dropped, -torch.inf)
