"""What can be found wrong before a weight is read: names that mean nothing, pairs that do not fit, a drafter where a
target belongs, a chat without a template, an image for a model that reads text. Loading may take minutes."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from outrider.checkpoints.checkpoint import is_hub_id, load_tokenizer, open_checkpoint
from outrider.checkpoints.loader import build_drafter, build_target, building, weights_in_target
from outrider.config import EngineConfig
from outrider.drafters.base import Sureness, drafters, recognised
from outrider.models.base import Target
from outrider.types import Checkpoint


def draft_values(name: str) -> dict[str, Any]:
    """What --draft means, as `speculative_config`: a method's name, or where a drafter's checkpoint is."""
    if name in drafters:
        return {"method": name}
    if not Path(name).expanduser().exists() and not is_hub_id(name):
        close = difflib.get_close_matches(name, list(drafters), n=1)
        meant = f" (did you mean {close[0]}?)" if close else ""
        raise ValueError(
            f"the drafter {name} is neither a method{meant} nor a checkpoint: give a directory, a hub id like "
            f"org/name, or one of {', '.join(sorted(drafters))}"
        )
    return {"model": name}


def check_drafter(config: EngineConfig) -> None:
    """Builds target and drafter without memory for weights: whatever the two configurations do not agree on is
    refused here, and not after minutes of plain decoding."""
    settings = config.speculative
    if settings is None:
        return
    checkpoint = open_checkpoint(config.model)
    other: Checkpoint | None = None
    try:
        target = _outline(checkpoint)
        if settings.model is not None:
            other = open_checkpoint(settings.model)
        with building(torch.device("cpu"), torch.float32), WithoutMemory():
            build_drafter(settings, target, checkpoint if weights_in_target(settings) else other)
    finally:
        checkpoint.close()
        if other is not None:
            other.close()


def check_chat(model: str | Path) -> None:
    """Raises ValueError for a target without a chat template."""
    checkpoint = open_checkpoint(model)
    try:
        tokenizer = load_tokenizer(checkpoint)
    finally:
        checkpoint.close()
    if tokenizer is None or not tokenizer.has_chat_template:
        raise ValueError(f"{model} has no chat template: use outrider generate --no-chat, or choose a chat model")


def check_images(model: str | Path) -> None:
    """Raises ValueError for a target that reads no images."""
    checkpoint = open_checkpoint(model)
    try:
        reads_images = _outline(checkpoint).vision is not None
    finally:
        checkpoint.close()
    if not reads_images:
        raise ValueError(f"{model} reads text only: leave out the image, or choose a model with a vision tower")


def refuse_drafter(model: str | Path, config: Mapping[str, Any]) -> None:
    """A drafter's checkpoint that was given as the target is told from a target by its config.json."""
    method, sureness = recognised(config)
    if sureness >= Sureness.BY_KEYS:
        raise ValueError(
            f"{model} is a drafter ({method}), not a target: give the target that it was trained for as the model, and "
            f'this beside it (--model TARGET --draft {model}, or speculative_config={{"model": "{model}"}})'
        )


def _outline(checkpoint: Checkpoint) -> Target:
    with building(torch.device("cpu"), torch.float32), WithoutMemory():
        return build_target(checkpoint)


class WithoutMemory(TorchFunctionMode):
    """Empty tensors, which is what parameters are before weights are read, take no memory inside. What is computed
    while a model is built, such as rotary frequencies, is: on torch's meta device it would import seconds' worth."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        settings = dict(kwargs or {})
        if func is torch.empty:
            settings["device"] = "meta"
        return func(*args, **settings)
