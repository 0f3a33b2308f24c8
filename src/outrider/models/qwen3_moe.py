"""Qwen3-MoE: Qwen3's attention; instead of an MLP, most layers have many small experts, of which a row takes a few."""

from dataclasses import replace
from typing import Any

from outrider.layers.attention import AttentionShape, SelfAttention
from outrider.layers.block import DecoderBlock
from outrider.layers.moe import Experts, ExpertShape, MixtureMLP, SoftmaxRouter, experts_by_number
from outrider.layers.rotary import Rotary
from outrider.models.base import refuse, require, targets
from outrider.models.llama import Llama
from outrider.types import Weight


@targets.register("Qwen3MoeForCausalLM")
class Qwen3Moe(Llama):
    def __init__(self, config: dict[str, Any]) -> None:
        refuse(config, "mlp_bias", False)
        # transformers writes num_local_experts where published checkpoints say num_experts
        super().__init__({"num_experts": config.get("num_local_experts"), **config})

    def attention_shape(self, config: dict[str, Any]) -> AttentionShape:
        shape = super().attention_shape(config)
        # All layers have the window or none: max_window_layers, which configs still carry, is Qwen2's.
        window = shape.window if config.get("use_sliding_window", False) else 0
        return replace(shape, window=window, head_norm_eps=self.eps)

    def block(self, number: int, shape: AttentionShape, rotary: Rotary) -> DecoderBlock:
        if self.is_dense(number):
            return super().block(number, shape, rotary)
        return DecoderBlock(SelfAttention(shape, rotary), self.mixture(shape.hidden_size), self.eps)

    def is_dense(self, number: int) -> bool:
        step = self.config.get("decoder_sparse_step", 1)
        return number in (self.config.get("mlp_only_layers") or []) or (number + 1) % step != 0

    def mixture(self, hidden_size: int) -> MixtureMLP:
        count, num_chosen, size = require(self.config, "num_experts", "num_experts_per_tok", "moe_intermediate_size")
        renormalise = bool(self.config.get("norm_topk_prob", False))
        router = SoftmaxRouter(hidden_size, count, num_chosen, renormalise=renormalise)
        return MixtureMLP(router, Experts(ExpertShape(count, hidden_size, size)))

    def weights(self) -> dict[str, Weight]:
        weights = super().weights()
        for number, block in enumerate(self.layers):
            assert isinstance(block, DecoderBlock)
            if isinstance(block.mlp, MixtureMLP):
                name, source = f"layers.{number}.mlp.", f"model.layers.{number}.mlp."
                weights[f"{name}router.gate.weight"] = Weight((f"{source}gate.weight",))
                weights |= experts_by_number(block.mlp.experts.shape, f"{source}experts.", f"{name}experts.")
        return weights
