"""Quantised checkpoints: what slow and obvious code packs in each format reads back exactly.
References that are not ours: transformers' own code for fp8 and mxfp4, and its models after it dequantised them."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from quantised_models import mxfp4_model, quantise_model, save
from quantised_packing import (
    WAYS,
    Memory,
    Tensors,
    compressed,
    example,
    pack_awq,
    pack_compressed,
    pack_gptq,
    random_numbers,
    random_scale,
)
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, _dequantize_fp8_weight
from transformers.integrations.mxfp4 import FP4_VALUES, convert_moe_packed_tensors

from outrider import LLM, SamplingParams
from outrider.checkpoints.checkpoint import open_checkpoint
from outrider.checkpoints.quantised import QuantisedCheckpoint, dequantised

FEW = settings(max_examples=40, deadline=None)
SIZES = st.integers(1, 40)
SEEDS = st.integers(0, 2**32 - 1)


def read(tensors: Tensors, quantization: dict[str, Any], name: str = "x.weight") -> Tensor:
    checkpoint = dequantised(Memory(tensors, quantization))
    assert checkpoint.names() == [name]
    tensor = checkpoint.tensor(name)
    assert checkpoint.shape(name) == tuple(tensor.shape)
    assert tensor.dtype == torch.float32
    return tensor


def expected(values: Tensor, scale: Tensor, zero: Tensor | float, group_of: Callable[[int, int], Any]) -> Tensor:
    """The weight [N, K], each number on its own. Doubles hold these products exactly, so it is rounded once."""
    num_rows, num_columns = values.shape
    dense = torch.zeros(num_rows, num_columns)
    for n in range(num_rows):
        for k in range(num_columns):
            place = group_of(n, k)
            offset = float(zero[place]) if isinstance(zero, Tensor) else zero
            dense[n, k] = (float(values[n, k]) - offset) * float(scale[place])
    return dense


# Each format gives back its numbers


@FEW
@given(SEEDS, SIZES, SIZES, st.integers(1, 9), st.integers(1, 9), st.integers(0, 3))
def test_fp8_blocks(seed: int, num_rows: int, num_columns: int, rows: int, columns: int, num_experts: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    grid = (-(-num_rows // rows), -(-num_columns // columns))
    stack = (num_experts,) if num_experts else ()
    values = torch.randn(*stack, num_rows, num_columns, generator=generator).to(torch.float8_e4m3fn)
    scale = random_scale(generator, *stack, *grid)
    config = {"quant_method": "fp8", "weight_block_size": [rows, columns], "activation_scheme": "dynamic"}
    tensor = read({"x.weight": values, "x.weight_scale_inv": scale}, config)
    assert torch.equal(tensor, _dequantize_fp8_weight(values, scale, [rows, columns], torch.float32))
    if not stack:
        assert torch.equal(tensor, expected(values.float(), scale, 0, lambda n, k: (n // rows, k // columns)))


@pytest.mark.parametrize("block_size", [{"weight_block_size": [4, 8]}, {"weight_block_size": None}, {}])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (12,), (12, 1)])
@pytest.mark.parametrize("suffix", ["weight_scale", "weight_scale_inv"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_scales_of_rows_and_tensors(block_size, shape: tuple[int, ...], suffix: str, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(12, 16, generator=generator).to(torch.float8_e4m3fn)
    scale = random_scale(generator, *shape, dtype=dtype)
    tensors = {"x.weight": values, f"x.{suffix}": scale, "x.input_scale": torch.ones(())}
    tensor = read(tensors, {"quant_method": "fp8", **block_size})
    assert torch.equal(tensor, values.float() * scale.float().reshape(-1, 1))


def test_fp8_block_size_is_128_unless_given() -> None:
    values = torch.randn(130, 300).to(torch.float8_e4m3fn)
    scale = random_scale(torch.Generator(), 2, 3)
    tensor = read({"x.weight": values, "x.weight_scale_inv": scale}, {"quant_method": "fp8"})
    assert torch.equal(tensor, _dequantize_fp8_weight(values, scale, [128, 128], torch.float32))


@pytest.mark.parametrize("dtype", [torch.float8_e8m0fnu, torch.uint8])
def test_fp8_scales_that_are_powers_of_two(dtype: torch.dtype) -> None:
    exponents = torch.tensor([[0, 1, 126], [127, 130, 200]], dtype=torch.uint8)
    values = torch.randn(4, 6).to(torch.float8_e4m3fn)
    tensors = {"x.weight": values, "x.weight_scale_inv": exponents.view(dtype)}
    tensor = read(tensors, {"quant_method": "fp8", "weight_block_size": [2, 2]})
    scale = torch.tensor([[2.0 ** (float(byte) - 127) for byte in row] for row in exponents])
    assert torch.equal(tensor, expected(values.float(), scale, 0, lambda n, k: (n // 2, k // 2)))
    theirs = Fp8Dequantize(None)._dequantize_one(values, tensors["x.weight_scale_inv"], torch.float32)
    assert torch.equal(tensor, theirs)


@pytest.mark.parametrize("shape", [(3,), (3, 1, 1), (3, 4, 1), (3, 4), ()])
def test_fp8_stacked_experts(shape: tuple[int, ...]) -> None:
    values = torch.randn(3, 4, 8).to(torch.float8_e4m3fn)
    scale = random_scale(torch.Generator(), *shape)
    tensor = read({"e.up": values, "e.up_scale_inv": scale}, {"quant_method": "fp8"}, "e.up")
    assert torch.equal(tensor, values.float() * scale.reshape(*shape, *[1] * (3 - len(shape))))


@pytest.mark.parametrize(
    ("strategy", "shape", "block"),
    [
        ({"strategy": "tensor"}, (1,), (12, 20)),
        ({"strategy": "channel"}, (12, 1), (1, 20)),
        ({"strategy": "block", "block_structure": [5, 8]}, (3, 3), (5, 8)),
        ({"strategy": "group", "group_size": 4}, (12, 5), (1, 4)),
        ({"group_size": 4}, (12, 5), (1, 4)),
        ({"group_size": -1}, (12, 1), (1, 20)),
        ({}, (), (12, 20)),
    ],
)
@pytest.mark.parametrize("layout", ["float-quantized", "int-quantized", "naive-quantized"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_unpacked(strategy: dict, shape: tuple, block: tuple, layout: str, symmetric: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    kind = "float" if layout == "float-quantized" else "int"
    values = random_numbers(generator, 8, 12, 20) - 128
    values = values.to(torch.int8) if kind == "int" else (values / 8).to(torch.float8_e4m3fn)
    scale = random_scale(generator, *shape, dtype=torch.bfloat16)
    zero = random_numbers(generator, 4, *shape).to(values.dtype)
    tensors = {"x.weight": values, "x.weight_scale": scale, "x.input_scale": torch.ones(1)}
    if not symmetric:
        tensors |= {"x.weight_zero_point": zero, "x.input_zero_point": torch.zeros(1)}
    tensor = read(tensors, compressed(layout, num_bits=8, type=kind, symmetric=symmetric, **strategy))
    grid = (-(-12 // block[0]), -(-20 // block[1]))
    offset = 0 if symmetric else zero.reshape(grid)
    place_of = lambda n, k: (n // block[0], k // block[1])  # noqa: E731
    assert torch.equal(tensor, expected(values, scale.reshape(grid), offset, place_of))


@FEW
@given(SEEDS, st.sampled_from([2, 4, 8]), SIZES, st.integers(1, 5), st.integers(1, 9), st.integers(0, 3))
def test_compressed_tensors_packed(seed: int, bits: int, num_rows: int, groups: int, size: int, way: int) -> None:
    """way: symmetric; zero points; zero points and columns in any order; the same, and one group."""
    generator = torch.Generator().manual_seed(seed)
    groups, size = (1, groups * size) if way == 3 else (groups, size)
    values = random_numbers(generator, bits, num_rows, groups * size)
    scale = random_scale(generator, num_rows, groups, dtype=torch.bfloat16)
    zero = random_numbers(generator, bits, num_rows, groups) if way else None
    tensors = pack_compressed(values, scale, zero, bits)
    order = torch.arange(groups * size) // size
    if way >= 2:
        order = order[torch.randperm(groups * size, generator=generator)]
        tensors["x.weight_g_idx"] = order.int()
    args = {"strategy": "channel"} if way == 3 else {"strategy": "group", "group_size": size}
    tensor = read(tensors, compressed("pack-quantized", num_bits=bits, type="int", symmetric=not way, **args))
    offset = 2 ** (bits - 1) if zero is None else zero
    assert torch.equal(tensor, expected(values, scale, offset, lambda n, k: (n, int(order[k]))))


def test_compressed_tensors_packed_odds_and_ends() -> None:
    """Experts in a stack, zero points that are not packed, and an order that was never changed."""
    values = random_numbers(torch.Generator().manual_seed(0), 4, 2, 8, 16)
    scale = random_scale(torch.Generator(), 2, 8, 4)
    zero = random_numbers(torch.Generator().manual_seed(1), 4, 2, 8, 4)
    dense = torch.stack([expected(values[e], scale[e], zero[e], lambda n, k: (n, k // 4)) for e in range(2)])
    experts = [pack_compressed(values[e], scale[e], zero[e], 4) for e in range(2)]
    stacked = {name: torch.stack([expert[name] for expert in experts]) for name in experts[0]}
    stacked["x.weight_shape"] = torch.tensor([2, 8, 16])
    stacked["x.weight_g_idx"] = torch.full((16,), -1, dtype=torch.int32)
    config = compressed("pack-quantized", num_bits=4, type="int", symmetric=False, strategy="group", group_size=4)
    assert torch.equal(read(stacked, config), dense)
    stacked["x.weight_zero_point"] = (zero - 8).to(torch.int8)
    assert torch.equal(read(stacked, config), dense)


def test_compressed_tensors_groups() -> None:
    """The name of a module counts more than a pattern, and a pattern more than a class."""
    names = ["model.layers.0.mlp.down_proj", "model.layers.0.mlp.up_proj", "model.layers.0.self_attn.q_proj"]
    values = random_numbers(torch.Generator().manual_seed(0), 4, 8, 8)
    config = compressed("pack-quantized", num_bits=4, type="int", strategy="channel")
    config["config_groups"] |= {
        "group_1": {"targets": ["re:.*mlp.*"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel"}},
        "group_2": {
            "targets": [names[0]],
            "weights": {"num_bits": 8, "type": "float", "strategy": "tensor"},
            "format": "float-quantized",
        },
        "group_3": {"targets": ["Attention"], "weights": None},
    }
    scale = torch.rand(8, 1)
    tensors = {f"{names[0]}.weight": values.to(torch.float8_e4m3fn), f"{names[0]}.weight_scale": torch.ones(1)}
    for name, bits in ((names[1], 8), (names[2], 4)):
        tensors |= {name + part[1:]: tensor for part, tensor in pack_compressed(values, scale, None, bits).items()}
    tensors["model.layers.0.self_attn.k_scale"] = torch.ones(1)
    tensors["lm_head.weight"] = torch.randn(4, 4).bfloat16()
    checkpoint = dequantised(Memory(tensors, config))
    assert checkpoint.names() == [f"{name}.weight" for name in [*names, "lm_head"]]
    assert torch.equal(checkpoint.tensor(f"{names[0]}.weight"), values.float())
    assert torch.equal(checkpoint.tensor(f"{names[1]}.weight"), (values - 128) * scale)
    assert torch.equal(checkpoint.tensor(f"{names[2]}.weight"), (values - 8) * scale)
    assert checkpoint.tensor("lm_head.weight") is tensors["lm_head.weight"]
    config["config_groups"]["group_2"]["targets"] = ["re:.*down.*"]
    with pytest.raises(ValueError, match=r"down_proj\.weight_scale belongs to 2 config_groups"):
        dequantised(Memory(tensors, config)).tensor(f"{names[0]}.weight")


@FEW
@given(SEEDS, st.sampled_from([2, 4, 8]), SIZES, SIZES, st.integers(-1, 12).filter(bool), st.integers(0, 3))
def test_gptq(seed: int, bits: int, num_rows: int, num_columns: int, size: int, way: int) -> None:
    """way: plain; without g_idx; second version; with columns in any order."""
    generator = torch.Generator().manual_seed(seed)
    num_columns = -(-num_columns // 16) * 16 if way == 1 else num_columns
    length = num_columns if size == -1 else size
    num_groups = -(-num_columns // length)
    values = random_numbers(generator, bits, num_rows, num_columns)
    scale = random_scale(generator, num_rows, num_groups, dtype=torch.float16)
    zero = random_numbers(generator, bits, num_rows, num_groups).clamp(min=0 if way == 2 else 1)
    groups = [k // length for k in range(num_columns)]
    if way == 3:
        groups = [groups[k] for k in torch.randperm(num_columns, generator=generator).tolist()]
    tensors = pack_gptq(values, scale, zero, bits, groups, v1=way != 2)
    if way == 1:
        del tensors["x.g_idx"]
    config: dict[str, Any] = {"quant_method": "gptq", "bits": bits, "group_size": size, "sym": False}
    config |= {"checkpoint_format": "gptq_v2" if way == 2 else "gptq", "desc_act": way == 3}
    assert torch.equal(read(tensors, config), expected(values, scale, zero, lambda n, k: (n, groups[k])))


def test_gptq_zero_points_that_borrow() -> None:
    """Version 1 takes 0x11111111 off a whole word, so that a zero point of 0 borrows from its neighbour."""
    values, scale = torch.zeros(8, 8, dtype=torch.long), torch.ones(8, 1)
    zero = torch.tensor([[0], [0], [3], [0], [15], [0], [1], [0]])
    tensors = pack_gptq(values, scale, zero, 4, [0] * 8, v1=False)
    tensors["x.qzeros"] = tensors["x.qzeros"] - 0x11111111
    tensor = read(tensors, {"quant_method": "gptq", "bits": 4, "group_size": -1})
    assert torch.equal(tensor, -zero.float().expand(8, 8))


def test_gptq_biases_that_no_model_asked_for() -> None:
    """AutoGPTQ gave every layer a bias, of zeros where the model has none."""
    tensors, quantization = example("gptq")
    biases = {"x.bias": torch.zeros(32), "norm.bias": torch.zeros(32)}
    assert dequantised(Memory(tensors | biases, quantization)).names() == ["x.weight", "norm.bias"]
    biases["x.bias"][3] = 1
    assert dequantised(Memory(tensors | biases, quantization)).names() == ["x.weight", "x.bias", "norm.bias"]


@FEW
@given(SEEDS, st.integers(1, 5), st.integers(1, 6), st.integers(1, 9), st.booleans())
def test_awq(seed: int, words: int, groups: int, size: int, whole: bool) -> None:
    generator = torch.Generator().manual_seed(seed)
    groups, size = (1, groups * size) if whole else (groups, size)
    values = random_numbers(generator, 4, words * 8, groups * size)
    scale = random_scale(generator, words * 8, groups, dtype=torch.float16)
    zero = random_numbers(generator, 4, words * 8, groups)
    config = {"quant_method": "awq", "bits": 4, "group_size": -1 if whole else size, "version": "GEMM"}
    tensor = read(pack_awq(values, scale, zero), config)
    assert torch.equal(tensor, expected(values, scale, zero, lambda n, k: (n, k // size)))


@FEW
@given(SEEDS, st.integers(1, 3), SIZES, st.integers(1, 4))
def test_mxfp4(seed: int, num_experts: int, num_rows: int, num_blocks: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    codes = random_numbers(generator, 4, num_experts, num_rows, num_blocks, 32)
    blocks = codes[..., 0::2] + 16 * codes[..., 1::2]
    scales = torch.randint(0, 250, (num_experts, num_rows, num_blocks), generator=generator).to(torch.uint8)
    tensors = {"e.up_blocks": blocks.to(torch.uint8), "e.up_scales": scales}
    tensor = read(tensors, {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, "e.up")
    numbers = torch.tensor(FP4_VALUES, dtype=torch.float64)[codes] * 2.0 ** (scales.double() - 127)[..., None]
    assert torch.equal(tensor, numbers.flatten(2).transpose(1, 2).float())
    theirs = convert_moe_packed_tensors(tensors["e.up_blocks"], scales, dtype=torch.float32)
    assert torch.equal(tensor, theirs)


# Whole models


def answers(path: Path) -> list[list[int]]:
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    with LLM(path, max_model_len=64) as llm:
        tokens = [output.outputs[0].token_ids for output in llm.generate([[5, 6, 7], [9] * 5], params)]
    assert all(len(answer) == 24 for answer in tokens)
    return tokens


@pytest.mark.parametrize("way", WAYS)
def test_a_model_says_what_its_dense_numbers_say(tmp_path: Path, way: str) -> None:
    quantised, dense = quantise_model(tmp_path, way)
    ours, plain = open_checkpoint(quantised), open_checkpoint(dense)
    assert isinstance(ours, QuantisedCheckpoint)
    assert not isinstance(plain, QuantisedCheckpoint)
    assert sorted(ours.names()) == sorted(plain.names())
    assert all(torch.equal(ours.tensor(name), plain.tensor(name)) for name in plain.names())
    assert answers(quantised) == answers(dense)


def test_transformers_reads_the_same_fp8_numbers(tmp_path: Path) -> None:
    quantised, _ = quantise_model(tmp_path, "fp8")
    theirs = AutoModelForCausalLM.from_pretrained(quantised, dtype=torch.float32).state_dict()
    ours = open_checkpoint(quantised)
    assert sorted(ours.names()) == sorted(theirs)
    assert all(torch.equal(ours.tensor(name), tensor) for name, tensor in theirs.items())


def test_transformers_reads_the_same_mxfp4_numbers(tmp_path: Path) -> None:
    """A gpt-oss as it is published, and what transformers makes of it on a machine without kernels for it."""
    path, settings, shapes = mxfp4_model(tmp_path / "quantised")
    ours = open_checkpoint(path)
    assert {name: ours.shape(name) for name in ours.names()} == shapes
    theirs = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()
    assert sorted(theirs) == sorted(shapes)
    assert all(torch.equal(ours.tensor(name), tensor) for name, tensor in theirs.items())
    assert answers(path) == answers(save(tmp_path / "dense", settings, theirs))


def test_a_model_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quantised, _ = quantise_model(tmp_path, "int8")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **options: str(quantised))
    assert isinstance(open_checkpoint("org/name"), QuantisedCheckpoint)
