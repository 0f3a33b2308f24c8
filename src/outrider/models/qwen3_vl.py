"""Qwen3-VL: Qwen3 with rotary positions of three axes that take turns, and an image's deeper features added to the
residual stream after the first layers."""

from typing import Any

from torch import Tensor

from outrider.layers.attention import AttentionShape
from outrider.layers.block import DecoderBlock
from outrider.layers.narrow import all_rows
from outrider.layers.rotary import Rotary
from outrider.models.base import nested_text, targets
from outrider.models.qwen2_5_vl import QwenVL, qwen_vision
from outrider.models.qwen3 import Qwen3
from outrider.types import Batch


class DeepstackBlock(DecoderBlock):
    """After it, the features of its level are added where images are."""

    level: int

    def forward(self, x: Tensor, batch: Batch) -> Tensor:
        if batch.features is None:
            return super().forward(x, batch)
        with all_rows(batch):
            x = super().forward(x, batch)
        is_image, values = batch.features.at(self.level)
        return x + values.to(x.dtype) * is_image


@targets.register("Qwen3VLForConditionalGeneration")
class Qwen3VL(QwenVL, Qwen3):
    def __init__(self, config: dict[str, Any]) -> None:
        self._num_levels = len(config.get("vision_config", {}).get("deepstack_visual_indexes") or ())
        super().__init__(_always_turns(nested_text(config)))
        self._vision = qwen_vision(config)

    def block(self, number: int, shape: AttentionShape, rotary: Rotary) -> DecoderBlock:
        block = super().block(number, shape, rotary)
        if number >= self._num_levels:
            return block
        deep = DeepstackBlock(block.attention, block.mlp, self.eps)
        deep.level = 1 + number  # level 0 is what is embedded
        return deep


def _always_turns(config: dict[str, Any]) -> dict[str, Any]:
    """The family's sections take turns, whether or not the config says so."""
    key = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    return {**config, key: {**(config.get(key) or {}), "mrope_interleaved": True}} if config.get(key) else config
