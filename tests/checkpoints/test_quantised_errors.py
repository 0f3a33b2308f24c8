"""Quantised checkpoints that are incomplete, damaged or of a kind that is not supported: what is wrong is named."""

import re
from typing import Any

import pytest
import torch
from quantised_packing import WAYS, Memory, Tensors, compressed, example

from outrider.checkpoints.loader import building
from outrider.checkpoints.quantised import QuantisedCheckpoint, dequantised

PARTS = [(way, part) for way in WAYS for part in example(way)[0]]


def broken(tensors: Tensors, quantization: dict[str, Any], *words: str) -> None:
    """Opening or reading fails, and the message holds these words and says what to do."""
    with pytest.raises(ValueError) as caught:
        dequantised(Memory(tensors, quantization)).tensor("x.weight")
    for word in (*words, "memory"):
        assert word in str(caught.value)
    assert re.search(r"download|remove|Give a checkpoint|repair", str(caught.value))


@pytest.mark.parametrize(("way", "part"), PARTS)
def test_a_missing_part(way: str, part: str) -> None:
    """All parts are needed. Without the weight itself what is left is surplus; without another part it is missing."""
    tensors, quantization = example(way)
    del tensors[part]
    weight = {"x.weight", "x.weight_packed", "x.qweight"}
    if part in weight:
        broken(tensors, quantization, f"has {next(iter(tensors))}, but not the weight")
    elif "x.weight" in tensors:
        broken(tensors, quantization, "x.weight is torch.", "no scale")
    else:
        broken(tensors, quantization, f"comes without {part}")


@pytest.mark.parametrize(
    ("way", "part", "named"),
    [(way, part, part) for way, part in PARTS if part not in ("x.weight", "x.weight_shape", "x.g_idx")]
    + [("packed", "x.weight_shape", "x.weight_scale"), ("gptq", "x.g_idx", "x.qweight")],
)
def test_a_part_of_another_shape(way: str, part: str, named: str) -> None:
    tensors, quantization = example(way)
    tensors[part] = torch.cat([tensors[part], tensors[part][:1]])
    if (way, part) == ("awq", "x.qweight"):
        named = "x.qzeros"  # nothing else tells how many columns there are
    broken(tensors, quantization, f"{named} has shape")


def test_a_part_that_lies_on_its_side() -> None:
    tensors, quantization = example("int8")
    tensors["x.weight_scale"] = tensors["x.weight_scale"].T
    broken(tensors, quantization, "x.weight_scale has shape (1, 32)", "(32, 64)", "blocks of 1 x 64")
    tensors, quantization = example("awq")
    tensors["x.qweight"] = tensors["x.qweight"][None]
    broken(tensors, quantization, "x.qweight has shape (1, 64, 4)", "2 dimensions")


def test_a_weight_that_is_there_twice() -> None:
    for way in ("gptq", "packed"):
        tensors, quantization = example(way)
        broken(tensors | {"x.weight": torch.ones(32, 64)}, quantization, "x.weight", "twice")
    tensors, quantization = example("fp8")
    tensors["x.weight_scale"] = torch.ones(())
    broken(tensors, quantization, "x.weight_scale", "x.weight_scale_inv", "remove one")


@pytest.mark.parametrize("way", ["fp8", "int8", "packed", "gptq", "awq"])
def test_a_weight_of_another_type(way: str) -> None:
    tensors, quantization = example(way)
    weight = next(iter(tensors))
    tensors[weight] = tensors[weight].to(torch.float16)
    broken(tensors, quantization, weight, "torch.float16")


def test_groups_that_do_not_exist() -> None:
    tensors, quantization = example("gptq")
    tensors["x.g_idx"][0] = 2
    broken(tensors, quantization, "x.g_idx", "groups 0 to 2 of 2")


def test_an_order_of_columns_that_config_denies() -> None:
    tensors, quantization = example("gptq")
    broken(tensors, {**quantization, "desc_act": False}, "x.g_idx", "desc_act is off")


@pytest.mark.parametrize(
    ("quantization", "words"),
    [
        ({}, ["quant_method 'missing'", "fp8, compressed-tensors, gptq, awq, mxfp4"]),
        ({"quant_method": "bitsandbytes"}, ["quant_method 'bitsandbytes'"]),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, ["quant_method 'modelopt'"]),
        ({"quant_method": 4}, ["quant_method 4", "a str"]),
        ({"quant_method": "fp8", "weight_block_size": [128]}, ["weight_block_size [128]"]),
        ({"quant_method": "fp8", "weight_block_size": 128}, ["weight_block_size 128"]),
        ({"quant_method": "gptq"}, ["bits 0", "2, 4, 8"]),
        ({"quant_method": "gptq", "bits": 3}, ["bits 3"]),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, ["group_size 0"]),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, ["checkpoint_format 'marlin'"]),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, ["is_marlin_format"]),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"-:a": {}, "+:b": {"bits": 8}}}, ["dynamic ['+:b']"]),
        ({"quant_method": "awq", "bits": 8}, ["bits 8"]),
        ({"quant_method": "awq", "version": "gemv"}, ["version 'gemv'", "gemm"]),
        ({"quant_method": "awq", "backend": "llm-awq"}, ["backend 'llm-awq'"]),
        (compressed("nvfp4-pack-quantized"), ["config_groups.group_0", "format 'nvfp4-pack-quantized'"]),
        (compressed("marlin-24"), ["format 'marlin-24'", "pack-quantized"]),
        (compressed("pack-quantized", num_bits=3), ["group_0.weights", "num_bits 3"]),
        (compressed("float-quantized", num_bits=4, type="float"), ["num_bits 4"]),
        (compressed("int-quantized", type="complex"), ["type 'complex'"]),
        (compressed("int-quantized", strategy="tensor_group", group_size=16), ["strategy 'tensor_group'"]),
        (compressed("int-quantized", strategy="group"), ["group_size 0"]),
        (compressed("int-quantized", strategy="block"), ["block_structure []"]),
        ({**compressed("pack-quantized"), "sparsity_config": {"format": "sparse-24-bitmask"}}, ["sparse-24-bitmask"]),
        (
            {**compressed("pack-quantized"), "transform_config": {"config_groups": {"u": {}}}},
            ["transform_config ['u']"],
        ),
    ],
)
def test_what_is_not_supported(quantization: dict[str, Any], words: list[str]) -> None:
    broken({"x.weight": torch.ones(2, 2)}, quantization, "quantization_config", *words)


@pytest.mark.parametrize("value", ["fp8", [], 3])
def test_a_config_that_makes_no_sense(value: object) -> None:
    broken({"x.weight": torch.ones(2, 2)}, value, "quantization_config", repr(value))


def test_where_the_config_is_looked_for() -> None:
    tensors, quantization = example("fp8")
    checkpoint = Memory(tensors, quantization)
    assert dequantised(checkpoint).config is checkpoint.config
    checkpoint.config = {"text_config": checkpoint.config}
    assert dequantised(checkpoint).names() == ["x.weight"]
    for config in ({"text_config": {}}, {"quantization_config": None}, {"text_config": None}):
        checkpoint.config = config
        assert dequantised(checkpoint) is checkpoint
        with pytest.raises(ValueError, match="no quantization_config"):
            QuantisedCheckpoint(checkpoint)


@pytest.mark.parametrize("way", [*WAYS, "mxfp4"])
def test_defaults_of_torch_do_not_matter(way: str) -> None:
    """A drafter's checkpoint is opened while others are in force, for the models that are being built."""
    blocks = {"x.weight_blocks": torch.full((1, 4, 2, 16), 0x25), "x.weight_scales": torch.full((1, 4, 2), 120)}
    experts = {name: tensor.to(torch.uint8) for name, tensor in blocks.items()}, {"quant_method": "mxfp4"}
    stored = Memory(*(experts if way == "mxfp4" else example(way)))
    expected = dequantised(stored).tensor("x.weight")
    with building(torch.device("meta"), torch.bfloat16):
        tensor = dequantised(stored).tensor("x.weight")
    assert tensor.dtype == torch.float32
    assert torch.equal(tensor, expected)


def test_closing_and_unknown_names() -> None:
    inner = Memory(*example("fp8"))
    checkpoint = dequantised(inner)
    with pytest.raises(ValueError, match=r"no tensor 'x\.weight_scale_inv'"):
        checkpoint.tensor("x.weight_scale_inv")
    checkpoint.close()
    assert inner.tensors == {}
    inner = Memory({"x.weight_scale_inv": torch.ones(1)}, {"quant_method": "fp8"})
    with pytest.raises(ValueError, match="but not the weight it belongs to"):
        dequantised(inner)
    assert inner.tensors == {}, "what cannot be read is closed"
