"""Llama 2 and 3, SmolLM2, Mistral: grouped-query attention, rotary positions, gated MLP, optional window."""

from typing import Any

from torch import nn

from outrider.layers.attention import AttentionShape, SelfAttention
from outrider.layers.block import DecoderBlock, block_weights
from outrider.layers.embedding import Embedding, Head
from outrider.layers.mlp import GatedMLP
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import Rotary
from outrider.models.base import Target, require, targets
from outrider.types import Weight


@targets.register("LlamaForCausalLM", "MistralForCausalLM")
class Llama(Target):
    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__(config)
        vocab_size, hidden_size, num_layers = require(config, "vocab_size", "hidden_size", "num_hidden_layers")
        if config.get("hidden_act", "silu") != "silu":
            raise ValueError(
                f"hidden_act {config['hidden_act']!r} is not supported for this architecture; only silu is"
            )
        self.embed = Embedding(vocab_size, hidden_size)
        shape = self.attention_shape(config)
        rotary = Rotary.from_config(config, shape.head_dim)
        self.layers = nn.ModuleList(self.block(number, shape, rotary) for number in range(num_layers))
        self.norm = RMSNorm(hidden_size, self.eps)
        tied = config.get("tie_word_embeddings", False)
        self.head = Head(vocab_size, hidden_size, tied=self.embed if tied else None)

    @property
    def eps(self) -> float:
        return self.config.get("rms_norm_eps", 1e-6)

    def attention_shape(self, config: dict[str, Any]) -> AttentionShape:
        hidden_size, num_heads = require(config, "hidden_size", "num_attention_heads")
        bias = bool(config.get("attention_bias", False))
        return AttentionShape(
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_dim=config.get("head_dim") or hidden_size // num_heads,
            window=config.get("sliding_window") or 0,
            qkv_bias=bias,
            output_bias=bias,
        )

    def block(self, number: int, shape: AttentionShape, rotary: Rotary) -> DecoderBlock:
        (intermediate_size,) = require(self.config, "intermediate_size")
        mlp = GatedMLP(shape.hidden_size, intermediate_size, bias=bool(self.config.get("mlp_bias", False)))
        return DecoderBlock(SelfAttention(shape, rotary), mlp, self.eps)

    def weights(self) -> dict[str, Weight]:
        weights = self.frame_weights()
        for number, block in enumerate(self.layers):
            assert isinstance(block, DecoderBlock)
            for name, weight in block_weights(block, f"model.layers.{number}.").items():
                weights[f"layers.{number}.{name}"] = weight
        return weights
