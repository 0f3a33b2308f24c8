"""gpt-oss: attention with sinks, windowed in every other layer, and experts with biases in all layers.
Experts lie stacked and transposed in the checkpoint, gate and up alternating; they are put right as they load."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from outrider.kernels.activation import ClampedSwish
from outrider.kernels.quantised import Quantised, joined
from outrider.layers.attention import AttentionShape, SelfAttention
from outrider.layers.block import DecoderBlock
from outrider.layers.moe import Experts, ExpertShape, MixtureMLP, SoftmaxRouter, rows_in_order
from outrider.layers.norm import RMSNorm
from outrider.layers.rotary import Rotary
from outrider.models.base import of_layers, require, targets
from outrider.models.llama import Llama
from outrider.types import Weight

# what a config.json of the family need not say
DEFAULTS = {
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000.0,
    "attention_bias": True,
    "swiglu_alpha": 1.702,
    "swiglu_limit": 7.0,
}


@targets.register("GptOssForCausalLM")
class GptOss(Llama):
    def __init__(self, config: dict[str, Any]) -> None:
        if not (config.get("rope_parameters") or config.get("rope_scaling")):
            raise ValueError("config.json lacks rope_scaling (or rope_parameters): gpt-oss is not itself without")
        super().__init__({**DEFAULTS, "num_local_experts": config.get("num_experts"), **config})
        for module in self.modules():
            if isinstance(module, RMSNorm):
                module.wide = True  # the weight multiplies before rounding to 16 bits

    def attention_shape(self, config: dict[str, Any]) -> AttentionShape:
        return replace(super().attention_shape(config), sinks=True)

    def block(self, number: int, shape: AttentionShape, rotary: Rotary) -> DecoderBlock:
        window = shape.window if self.layer_type(number) == "sliding_attention" else 0
        attention = SelfAttention(replace(shape, window=window), rotary)
        return DecoderBlock(attention, self.mixture(shape.hidden_size), self.eps)

    def layer_type(self, number: int) -> str:
        kinds = ("sliding_attention", "full_attention")
        given = self.config.get("layer_types")
        num_layers = self.config["num_hidden_layers"]
        kind = of_layers(self.config, "layer_types", num_layers)[number] if given else kinds[number % 2]
        if kind not in kinds:
            raise ValueError(f"config.json: layer_types has {kind!r}; supported are {' and '.join(kinds)}")
        return kind

    def mixture(self, hidden_size: int) -> MixtureMLP:
        count, num_chosen, size = require(self.config, "num_local_experts", "num_experts_per_tok", "intermediate_size")
        activation = ClampedSwish(self.config["swiglu_alpha"], self.config["swiglu_limit"])
        shape = ExpertShape(count, hidden_size, size, bias=True, activation=activation)
        # the chosen share one between them by the softmax of their logits alone
        router = SoftmaxRouter(hidden_size, count, num_chosen, renormalise=True, bias=True)
        return MixtureMLP(router, Experts(shape))

    def weights(self) -> dict[str, Weight]:
        weights = super().weights()
        for number in range(self.num_layers):
            name, source = f"layers.{number}.mlp.", f"model.layers.{number}.mlp."
            weights |= {
                f"{name}router.gate.weight": Weight((f"{source}router.weight",)),
                f"{name}router.gate.bias": Weight((f"{source}router.bias",)),
                f"{name}experts.up": Weight((f"{source}experts.gate_up_proj",), _up, self._up_in_few_bits),
                f"{name}experts.up_bias": Weight((f"{source}experts.gate_up_proj_bias",), _up_bias),
                f"{name}experts.down": Weight((f"{source}experts.down_proj",), _down, joined),
                f"{name}experts.down_bias": Weight((f"{source}experts.down_proj_bias",)),
            }
        return weights

    def _up_in_few_bits(self, parts: list[Quantised]) -> Quantised | None:
        """MXFP4 has outputs first: [E * 2 I, H], gate and up alternating."""
        return rows_in_order(self.config["num_local_experts"], parts, lambda rows: _up_bias([rows]))


def _up(tensors: list[Tensor]) -> Tensor:
    """[E, H, 2 I] -> [E, 2 I, H]."""
    return _up_bias(tensors).mT


def _up_bias(tensors: list[Tensor]) -> Tensor:
    """[..., 2 I] with gate and up alternating -> [..., 2 I], first all of gate, then all of up."""
    (both,) = tensors
    return torch.cat([both[..., 0::2], both[..., 1::2]], dim=-1)


def _down(tensors: list[Tensor]) -> Tensor:
    """[E, I, H] -> [E, H, I]."""
    (down,) = tensors
    return down.mT
