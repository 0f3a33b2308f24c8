"""How a drafter's config.json is read, whatever its dialect. Every community keeps its fields in other places, under
other names: all of them are looked at, each field says where it was read, and two that disagree are an error."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from outrider.models.base import Target
from outrider.types import Resolved

# every name that the mask token's id goes by; a mask stands for tokens that are drafted in one pass
MASK_TOKEN_KEYS = ("mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
_LAYER = "transformer_layer_config"  # where speculators describes the layers
_NESTED = ("eagle_config", "dflash_config", "dspark_config", _LAYER)


class Reader:
    """Looks fields up in a config.json and in what is nested in it, and notes where each was found."""

    def __init__(self, config: dict[str, Any], tensors: Iterable[str | None] = ()) -> None:
        self.places = dict(_places(config))
        self.is_speculators = "speculators_model_type" in config
        if self.is_speculators and _LAYER not in self.places:
            raise ValueError(f"a speculators config.json needs {_LAYER}: the file is incomplete")
        self.layer: dict[str, Any] = self.places.get(_LAYER, config)  # what describes the layers
        self.tensors = {name for name in tensors if name is not None}  # canonical names
        self.provenance: dict[str, Resolved] = {}

    def found(self, *keys: str) -> dict[str, Any]:
        """Every place that gives a field under any of its names, and its value there."""
        return {
            f"{place} {key}": values[key]
            for place, values in self.places.items()
            for key in keys
            if values.get(key) is not None
        }

    def get(self, *keys: str, default: Any = None) -> Any:
        """A field under any of its names, in any place; noted under the first name, unless there is none of it."""
        found = self.found(*keys)
        values = list(found.values())
        if any(value != values[0] for value in values[1:]):
            said = ", ".join(f"{place} says {value!r}" for place, value in found.items())
            raise ValueError(f"{keys[0]} is given twice and differs: {said}; remove the wrong one")
        if values:
            return self.note(keys[0], values[0], " and ".join(found))
        return default if default is None else self.note(keys[0], default, "default")

    def has(self, name: str, tensor: str, *keys: str) -> bool:
        """Whether a tensor is there, which config.json may confirm under one of the keys but not deny."""
        there = tensor in self.tensors
        for place, value in self.found(*keys).items():
            if bool(value) != there:
                raise ValueError(
                    f"{place} says {value}, but the tensors say {there} ({tensor}): one of them belongs to another "
                    "model"
                )
        return self.note(name, there, "tensors")

    def note(self, name: str, value: Any, source: str) -> Any:
        """Keeps where a field was read, for doctor, and returns its value."""
        self.provenance[name] = Resolved(value, source)
        return value

    def mask_token(self) -> Resolved:
        """The id of the token that stands for those to be drafted, and where it was read."""
        token = self.get(*MASK_TOKEN_KEYS)
        if not isinstance(token, int) or isinstance(token, bool):
            raise ValueError(
                f"config.json must give the mask token's id as one of {', '.join(MASK_TOKEN_KEYS)}, not {token!r}: it "
                "stands for the tokens that are drafted in one pass, which a checkpoint without one was not trained for"
            )
        return self.provenance[MASK_TOKEN_KEYS[0]]


def _places(config: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    text = config.get("text_config")  # of a whole model that reads images too
    outer = {"config.json": config} | ({"text_config": text} if isinstance(text, dict) else {})
    for place, values in outer.items():
        yield place, values
        for name in _NESTED:
            if isinstance(values.get(name), dict):
                yield (name if values is config else f"{place} {name}"), values[name]


class Vocabularied(Protocol):
    """A drafter's config, as far as its vocabulary goes."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def draft_vocab_size(self) -> int: ...
    @property
    def maps_vocabulary(self) -> bool: ...
    @property
    def own_embedding(self) -> bool: ...
    @property
    def own_head(self) -> bool: ...


def check_vocabulary(config: Vocabularied, target: Target, *, has_head: bool | None = None) -> None:
    """Raises ValueError where drafts cannot be said in the target's tokens, or what is shared does not fit.
    `has_head`: where a head need not be a tensor of its own."""
    if config.draft_vocab_size != target.vocab_size and not config.maps_vocabulary:
        raise ValueError(
            f"draft_vocab_size is {config.draft_vocab_size} and the target's vocabulary {target.vocab_size}, but there "
            "is no d2t tensor to map one to the other: the checkpoint is incomplete, or belongs to another target"
        )
    if not config.own_embedding and config.hidden_size != target.embed.hidden_size:
        raise ValueError(
            "the drafter has no embed_tokens.weight, and cannot share the target's: its hidden_size is "
            f"{config.hidden_size}, the target's {target.embed.hidden_size}"
        )
    sizes, shared = (config.draft_vocab_size, config.hidden_size), (target.vocab_size, target.head.hidden_size)
    if not (config.own_head if has_head is None else has_head) and sizes != shared:
        raise ValueError(
            "the drafter has no lm_head.weight, and its vocabulary or hidden size differ from the target's, so it "
            "cannot share the target's head"
        )


def check_fc_width(width: int, taps: tuple[int, ...], hidden_size: int) -> None:
    """Raises ValueError where fc.weight, which takes `width` inputs, is not made for taps of this hidden size."""
    expected = len(taps) * hidden_size
    if width != expected:
        raise ValueError(
            f"fc.weight takes {width} inputs, but {len(taps)} taps {list(taps)} of a target of hidden size "
            f'{hidden_size} give {expected}: set "taps" in speculative_config, or this drafter belongs to another '
            "target"
        )
