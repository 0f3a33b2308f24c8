"""Other readings of a drafter's weights, tried one after the other: which of them agrees with the target?
Drafts of two readings are compared place by place, so that a small difference already counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

from outrider.agreement import Agreement
from outrider.doctor.diagnosis import Tried
from outrider.drafters.base import Drafter, Reading
from outrider.layers.attention import SelfAttention
from outrider.layers.rotary import Rotary
from outrider.models.base import Target

MIN_GAIN = 0.05  # draft tokens a round: less is not worth a word
MIN_DEVIATIONS = 3.0
CERTAIN = 99.0  # deviations where nothing varies
MAX_FAULTS = 3  # that may add up
ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor")

# a drafter, what the reading is called, and when it may be given up
Measure = Callable[[Drafter, str, Callable[[Agreement], bool]], Agreement]


@dataclass(frozen=True)
class ReadingTrial:
    """A reading while it lasts: some are another drafter, some turn a screw of this one and turn it back."""

    name: str
    advice: str
    enter: Callable[[Drafter], AbstractContextManager[Drafter]]


def trials(drafter: Drafter, target: Target) -> list[ReadingTrial]:
    """The drafter's own readings, and those that make sense for every drafter."""
    return [*map(_trial, drafter.readings()), *rope_trials(drafter, target)]


def _trial(reading: Reading) -> ReadingTrial:
    @contextmanager
    def enter(drafter: Drafter) -> Iterator[Drafter]:
        yield reading.apply(drafter)

    return ReadingTrial(reading.name, reading.advice, enter)


# rotary frequencies


def rope_settings(config: dict[str, Any]) -> dict[str, Any]:
    """What a target's config.json says about its rotary frequencies."""
    for place in (config, config.get("text_config") or {}):
        found = {key: place[key] for key in ROPE_KEYS if place.get(key) is not None}
        by_kind_of_layer = any(isinstance(value, dict) for value in found.get("rope_parameters", {}).values())
        if found:
            return {} if by_kind_of_layer else found  # a drafter's layer is of no kind: there is none to take
    return {}


def differing_rotaries(drafter: Drafter, target: Target) -> list[tuple[Rotary, Rotary]]:
    """The drafter's own frequencies, each with what the target's settings make of the same head size, where they
    differ from everything the target uses."""
    settings = rope_settings(target.config)
    theirs = {id(layer.rotary): layer.rotary for layer in target.modules() if isinstance(layer, SelfAttention)}
    own = {id(layer.rotary): layer for layer in drafter.modules() if isinstance(layer, SelfAttention)}
    pairs = []
    for layer in own.values():
        if settings and not any(_alike(layer.rotary, other) for other in theirs.values()):
            other = Rotary.from_config(_without_axes(target.config | settings), layer.shape.head_dim)
            if not _alike(layer.rotary, other):
                pairs.append((layer.rotary, other))
    return pairs


def _alike(left: Rotary, right: Rotary) -> bool:
    mine, other = left.inv_freq.cpu(), right.inv_freq.cpu()
    return mine.shape == other.shape and mine.allclose(other, rtol=1e-4) and left.scaling == right.scaling


def _without_axes(config: dict[str, Any]) -> dict[str, Any]:
    """Sections of M-RoPE are made for the target's own head size; a drafter that counts tokens has none."""
    cut = {
        key: {name: value for name, value in config[key].items() if name != "mrope_section"}
        for key in ("rope_scaling", "rope_parameters")
        if config.get(key)
    }
    return config | cut


def rope_trials(drafter: Drafter, target: Target) -> list[ReadingTrial]:
    pairs = differing_rotaries(drafter, target)
    if not pairs:
        return []

    @contextmanager
    def enter(drafter: Drafter) -> Iterator[Drafter]:
        before = [(rotary, vars(rotary).copy()) for rotary, _ in differing_rotaries(drafter, target)]
        for rotary, other in differing_rotaries(drafter, target):
            vars(rotary).update(vars(other))
        try:
            yield drafter
        finally:
            for rotary, settings in before:
                vars(rotary).update(settings)

    said = ", ".join(f"{key} {value}" for key, value in rope_settings(target.config).items())
    return [
        ReadingTrial(
            "rotary frequencies of the target",
            f"write the target's rotary settings into the drafter's config.json: {said}",
            enter,
        )
    ]


# which is better


def compare(found: Agreement, before: Agreement, lookahead: int) -> tuple[float, float]:
    """How many more draft tokens are right at a place, and how many standard deviations that is. Drafts at
    neighbouring places are about the same tokens, so as many as overlap are one piece of evidence together."""
    old = {(place.text, place.context_len): place.agreed for place in before.places}
    pieces: dict[tuple[int, int], list[int]] = {}
    for place in found.places:
        known = old.get((place.text, place.context_len))
        if known is not None:
            piece = (place.text, place.context_len // (1 + lookahead))
            pieces.setdefault(piece, []).append(place.agreed - known)
    num_places = sum(map(len, pieces.values()))
    if len(pieces) < 2:
        return 0.0, 0.0
    mean = sum(map(sum, pieces.values())) / num_places
    spread = sum((sum(gains) - mean * len(gains)) ** 2 for gains in pieces.values())
    error = math.sqrt(spread * len(pieces) / (len(pieces) - 1)) / num_places
    return mean, mean / error if error else math.copysign(CERTAIN, mean) if mean else 0.0


def mean_where_shared(found: Agreement, other: Agreement) -> float:
    """The accept length of `found` over the places that both drafted at."""
    shared = {(place.text, place.context_len) for place in other.places}
    places = tuple(place for place in found.places if (place.text, place.context_len) in shared)
    return Agreement(places, found.texts).mean_accept_length


@dataclass(frozen=True)
class Search:
    """Tries readings, keeps the best if it is better beyond doubt, and goes on from there: faults may add up."""

    target: Target
    measure: Measure

    def run(self, drafter: Drafter, before: Agreement) -> tuple[list[Tried], list[Tried]]:
        """What was tried on the drafter as it was read, and the readings that together make it better, if any do."""
        tried: list[Tried] = []
        remedy: list[Tried] = []
        with ExitStack() as stack:
            for _ in range(MAX_FAULTS):
                candidates = trials(drafter, self.target)
                results = [self._try(trial, drafter, before) for trial in candidates]
                tried = tried or results
                better = [number for number, each in enumerate(results) if each.is_better]
                if not better:
                    break
                best = max(better, key=lambda number: results[number].gain)
                remedy.append(results[best])
                before = results[best].agreement
                drafter = stack.enter_context(candidates[best].enter(drafter))
        return tried, remedy

    def _try(self, trial: ReadingTrial, drafter: Drafter, before: Agreement) -> Tried:
        def hopeless(found: Agreement) -> bool:
            gain, deviations = compare(found, before, drafter.lookahead)
            return gain < 0 and deviations < -MIN_DEVIATIONS

        with trial.enter(drafter) as other:
            found = self.measure(other, trial.name, hopeless)
        gain, deviations = compare(found, before, drafter.lookahead)
        is_better = gain >= MIN_GAIN and deviations >= MIN_DEVIATIONS
        as_read = mean_where_shared(before, found)
        return Tried(trial.name, trial.advice, found, as_read, gain, deviations, is_better)
