"""Slow and obvious packers for quantised checkpoints, straight from the description of each format.
`values` [N, K] and `zero` are integers from 0 to 2 ** bits - 1; the weight is called x until a caller renames it."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

Tensors = dict[str, Tensor]
AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # nibble i of a word belongs to column AWQ_ORDER[i]


class Memory:
    """A checkpoint that is not on disk."""

    path = Path("memory")
    generation_config: dict[str, Any] = {}  # noqa: RUF012

    def __init__(self, tensors: Tensors, quantization: dict[str, Any]) -> None:
        self.tensors, self.config = tensors, {"quantization_config": quantization}

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def tensor(self, name: str) -> Tensor:
        return self.tensors[name]

    def close(self) -> None:
        self.tensors = {}


def random_numbers(generator: torch.Generator, bits: int, *shape: int) -> Tensor:
    return torch.randint(0, 2**bits, shape, generator=generator)


def random_scale(generator: torch.Generator, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.rand(shape, generator=generator) * 0.1 + 0.01).to(dtype)


def pack_row(numbers: list[int], bits: int, order: list[int] | None = None) -> list[int]:
    """int32 words of these numbers, the first in the lowest bits; order: which number lies in which place."""
    per_word = 32 // bits
    numbers = numbers + [0] * (-len(numbers) % per_word)
    words = []
    for start in range(0, len(numbers), per_word):
        word = 0
        for place in range(per_word):
            word += numbers[start + (order[place] if order else place)] << (bits * place)
        words.append(word - 2**32 if word >= 2**31 else word)
    return words


def pack(matrix: Tensor, dim: int, bits: int, order: list[int] | None = None) -> Tensor:
    if dim == 0:
        return pack(matrix.T, 1, bits, order).T.contiguous()
    return torch.tensor([pack_row(row, bits, order) for row in matrix.tolist()], dtype=torch.int32)


def pack_gptq(values: Tensor, scale: Tensor, zero: Tensor, bits: int, groups: list[int], v1: bool = True) -> Tensors:
    """values [N, K], scale and zero [N, G]."""
    return {
        "x.qweight": pack(values.T, 0, bits),
        "x.scales": scale.T.contiguous(),
        "x.qzeros": pack((zero - 1 if v1 else zero).T, 1, bits),
        "x.g_idx": torch.tensor(groups, dtype=torch.int32),
    }


def pack_awq(values: Tensor, scale: Tensor, zero: Tensor) -> Tensors:
    return {
        "x.qweight": pack(values.T, 1, 4, AWQ_ORDER),
        "x.scales": scale.T.contiguous(),
        "x.qzeros": pack(zero.T, 1, 4, AWQ_ORDER),
    }


def pack_compressed(values: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> Tensors:
    packed = {
        "x.weight_packed": pack(values, 1, bits),
        "x.weight_scale": scale,
        "x.weight_shape": torch.tensor(values.shape),
    }
    return packed if zero is None else packed | {"x.weight_zero_point": pack(zero, 0, bits)}


def compressed(layout: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
        "sparsity_config": {},
        "transform_config": {},
        "kv_cache_scheme": None,
    }


def quantise_fp8(weight: Tensor) -> tuple[Tensors, Tensor]:
    scale = torch.stack([block.abs().amax() for row in weight.split(16) for block in row.split(32, 1)])
    scale = (scale / 448).reshape(-(-weight.shape[0] // 16), -1)
    spread = scale.repeat_interleave(16, 0).repeat_interleave(32, 1)[: weight.shape[0], : weight.shape[1]]
    values = (weight / spread).to(torch.float8_e4m3fn)
    return {"x.weight": values, "x.weight_scale_inv": scale}, values.float() * spread


def quantise_int8(weight: Tensor) -> tuple[Tensors, Tensor]:
    scale = weight.abs().amax(1, keepdim=True) / 127
    values = (weight / scale).round().to(torch.int8)
    return {"x.weight": values, "x.weight_scale": scale}, values.float() * scale


def quantise_int4(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Values, scale and zero in groups of 32, and the dense result."""
    groups = weight.unflatten(1, (-1, 32))
    low, high = groups.amin(-1), groups.amax(-1)
    scale = (high - low) / 15
    zero = (-low / scale).round().clamp(1, 15).long()
    values = (groups / scale[..., None] + zero[..., None]).round().clamp(0, 15).long()
    dense = (values - zero[..., None]).float() * scale[..., None]
    return values.flatten(1), scale, zero, dense.flatten(1)


def quantise_packed(weight: Tensor) -> tuple[Tensors, Tensor]:
    values, scale, zero, dense = quantise_int4(weight)
    return pack_compressed(values, scale, zero, 4), dense


def quantise_gptq(weight: Tensor) -> tuple[Tensors, Tensor]:
    """Groups are made of columns far apart, as with desc_act."""
    order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0))
    values, scale, zero, dense = quantise_int4(weight[:, order])
    back = order.argsort()
    return pack_gptq(values[:, back], scale, zero, 4, (back // 32).tolist()), dense[:, back]


def quantise_awq(weight: Tensor) -> tuple[Tensors, Tensor]:
    values, scale, zero, dense = quantise_int4(weight)
    return pack_awq(values, scale, zero), dense


INT4 = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32}
WAYS: dict[str, tuple[Callable[[Tensor], tuple[Tensors, Tensor]], dict[str, Any]]] = {
    "fp8": (quantise_fp8, {"quant_method": "fp8", "weight_block_size": [16, 32]}),
    "int8": (quantise_int8, compressed("int-quantized", num_bits=8, type="int", strategy="channel")),
    "packed": (quantise_packed, compressed("pack-quantized", **INT4)),
    "gptq": (quantise_gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True}),
    "awq": (quantise_awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}),
}


def example(way: str) -> tuple[Tensors, dict[str, Any]]:
    """The stored tensors of one small weight, and the config that goes with them."""
    quantise, quantization = WAYS[way]
    return quantise(torch.randn(32, 64, generator=torch.Generator().manual_seed(0)))[0], quantization
