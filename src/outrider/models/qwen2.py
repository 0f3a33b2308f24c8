"""Qwen2 and Qwen2.5: Llama with biases on q, k and v, and a window that only upper layers use, if any do."""

from dataclasses import replace
from typing import Any

from outrider.layers.attention import AttentionShape
from outrider.layers.block import DecoderBlock
from outrider.layers.rotary import Rotary
from outrider.models.base import of_layers, targets
from outrider.models.llama import Llama


def windowed_layers(config: dict[str, Any]) -> list[bool]:
    """Which layers of a Qwen model attend within the sliding window."""
    num_layers = config["num_hidden_layers"]
    if not config.get("use_sliding_window", False) or not config.get("sliding_window"):
        return [False] * num_layers
    if config.get("layer_types"):
        return [kind == "sliding_attention" for kind in of_layers(config, "layer_types", num_layers)]
    return [number >= config.get("max_window_layers", 28) for number in range(num_layers)]


@targets.register("Qwen2ForCausalLM")
class Qwen2(Llama):
    def attention_shape(self, config: dict[str, Any]) -> AttentionShape:
        return replace(super().attention_shape(config), qkv_bias=True, output_bias=False)

    def block(self, number: int, shape: AttentionShape, rotary: Rotary) -> DecoderBlock:
        window = shape.window if windowed_layers(self.config)[number] else 0
        return super().block(number, replace(shape, window=window), rotary)
