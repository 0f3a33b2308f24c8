"""What fewer bits would cost a drafter: its own matrices are rounded, and it drafts at the same places of a text."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from outrider.agreement import Agreement
from outrider.doctor.diagnosis import Tried
from outrider.doctor.readings import Measure, compare, mean_where_shared
from outrider.drafters.base import Drafter
from outrider.kernels.packed import HALVES
from outrider.kernels.quantised import ROUNDED_TO, Kind, Quantised, quantise
from outrider.layers.embedding import Embedding, Head
from outrider.layers.linear import Linear
from outrider.layers.packing import dense, packable, refill


def rounded_weights(drafter: Drafter, kind: Kind) -> dict[str, Tensor]:
    """Those of its own parameters that `"quantization"` would round, as the numbers that they would stand for. Empty
    where it has few bits already, or no matrix that can be rounded."""
    found = {}
    for name, layer in _multiplied(drafter).items():
        form = quantise(dense(layer).detach(), kind)
        if form is not None:
            found[name] = form.dense(layer.weight.dtype)
    return found


def _multiplied(drafter: Drafter) -> dict[str, Linear | Head]:
    """By the names of their weights, where these are numbers of 16 bits or more."""
    layers = packable(drafter)
    forms = [layer.packed for layer in layers if layer.packed is not None]
    if any(isinstance(form, Quantised) or form.kind not in HALVES.values() for form in forms):
        return {}
    looked_up = {layer.weight for layer in layers if isinstance(layer, Embedding)}
    found = {layer.weight: layer for layer in layers if isinstance(layer, Linear | Head)}
    return {
        name: found[parameter]
        for name, parameter in drafter.named_parameters()
        if parameter in found and parameter not in looked_up
    }


@contextmanager
def rounded(drafter: Drafter, kind: Kind) -> Iterator[None]:
    """For a while the drafter has so many bits."""
    weights = rounded_weights(drafter, kind)
    layers = _multiplied(drafter)
    before = {name: dense(layers[name]).detach().clone() for name in weights}
    refill(drafter, weights)
    try:
        yield
    finally:
        refill(drafter, before)


def num_roundings(drafter: Drafter) -> int:
    return len(ROUNDED_TO) if rounded_weights(drafter, Kind.FP8) else 0


def try_few_bits(drafter: Drafter, before: Agreement, measure: Measure) -> list[Tried]:
    """How it drafts in each number of bits, beside how it drafts as it is."""
    tried = []
    for name in ROUNDED_TO if num_roundings(drafter) else ():
        with rounded(drafter, Kind(name)):
            found = measure(drafter, f"in {name}", lambda agreement: False)
        gain, deviations = compare(found, before, drafter.lookahead)
        advice = f'"quantization": "{name}" in speculative_config, on a GPU'
        tried.append(Tried(name, advice, found, mean_where_shared(before, found), gain, deviations))
    return tried
