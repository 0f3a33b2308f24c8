"""Qwen3: Llama with a norm on every query and key head, and an explicit head size."""

from dataclasses import replace
from typing import Any

from outrider.layers.attention import AttentionShape
from outrider.layers.block import DecoderBlock
from outrider.layers.rotary import Rotary
from outrider.models.base import targets
from outrider.models.llama import Llama
from outrider.models.qwen2 import windowed_layers


@targets.register("Qwen3ForCausalLM")
class Qwen3(Llama):
    def attention_shape(self, config: dict[str, Any]) -> AttentionShape:
        # The family's default head size is 128, whatever hidden_size / num_attention_heads says.
        shape = super().attention_shape({"head_dim": 128, **config})
        return replace(shape, head_norm_eps=self.eps)

    def block(self, number: int, shape: AttentionShape, rotary: Rotary) -> DecoderBlock:
        window = shape.window if windowed_layers(self.config)[number] else 0
        return super().block(number, replace(shape, window=window), rotary)
