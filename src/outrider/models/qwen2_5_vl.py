"""Qwen2.5-VL: Qwen2 whose rotary positions have three axes, so that an image's tokens know their row and column."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from outrider.models.base import Target, Vision, nested_text, require, targets
from outrider.models.qwen2 import Qwen2


def grid_positions(ids: Sequence[int], grids: Tensor, image_token: int, merge: int) -> Tensor:
    """Rotary positions [3, n]: a text token's are all the same, an image's token counts by frame, row and column.

    grids [images, 3] are frames, rows and columns of patches; `merge` x `merge` patches make one token. After an
    image, text goes on as if the image had been as long as its longer side.
    """
    parts: list[Tensor] = []
    done = now = 0  # tokens placed, and the position of the next
    for frames, rows, columns in grids.tolist():
        begin = list(ids).index(image_token, done)
        parts.append(torch.arange(now, now + begin - done).expand(3, -1))
        now += begin - done
        sizes = (frames, rows // merge, columns // merge)
        axes = torch.meshgrid(*(torch.arange(size) for size in sizes), indexing="ij")
        parts.append(now + torch.stack([axis.flatten() for axis in axes]))
        now += max(rows, columns) // merge
        done = begin + sizes[0] * sizes[1] * sizes[2]
    parts.append(torch.arange(now, now + len(ids) - done).expand(3, -1))
    return torch.cat(parts, dim=1)


def qwen_vision(config: dict[str, Any]) -> Vision | None:
    """How images enter a prompt of any Qwen-VL."""
    if "vision_config" not in config:
        return None
    (image_token,) = require(config, "image_token_id")
    merge = config["vision_config"].get("spatial_merge_size", 2)

    def positions(ids: Sequence[int], inputs: Mapping[str, Any]) -> Tensor:
        return grid_positions(ids, inputs["image_grid_thw"], image_token, merge)

    return Vision(
        image_token=image_token,
        marker=image_token,
        expand=lambda count, text_of: text_of(image_token) * count,
        positions=positions,
    )


class QwenVL(Target):
    """What all targets of the family share, beside a text model that says the rest."""

    ignored = (*Target.ignored, r"^(model\.)?visual\.")
    _vision: Vision | None

    @property
    def num_position_axes(self) -> int:
        return 3

    @property
    def vision(self) -> Vision | None:
        return self._vision

    def canonical(self, name: str) -> str:
        """Newer checkpoints have the language model under a name of its own."""
        return re.sub(r"^model\.language_model\.", "model.", name)


@targets.register("Qwen2_5_VLForConditionalGeneration")
class Qwen25VL(QwenVL, Qwen2):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(nested_text(config))
        self._vision = qwen_vision(config)
