"""Weights of 16 bits, and others that have a smaller form which loses nothing: on a CPU they have no floats. The same
bits, in half the memory or less."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from older_processors import MARCHES, use_older_processor
from quantised_models import WAYS, quantise_model, save
from safetensors.torch import load_file, save_file
from samples import drafter_settings, guide

from outrider import LLM, SamplingParams
from outrider.kernels import native, native_library
from outrider.kernels.activation import silu_mul
from outrider.kernels.moe import ExpertWeights, experts
from outrider.kernels.packed import AFFINE4, BFLOAT16, FLOAT16, SCALED8, SCALED_FP8, PackedStack, pack, pack_quantised
from outrider.kernels.quantised import Kind, Quantised, pack_numbers, part_for
from outrider.layers import packing
from outrider.layers.linear import Linear, has_memory
from outrider.layers.packing import held_bytes, mixtures, packable, refill
from outrider.llm import total_speculation

pytestmark = pytest.mark.skipif(native_library.library() is None, reason="no C compiler, so no native kernels")
PROMPTS = [list(range(20, 41)), [7, 8, 9], list(range(60, 75))]
NARROW = {"bfloat16": BFLOAT16, "float16": FLOAT16}
SMALL: dict[str, Any] = {"max_model_len": 64, "page_size": 4, "device": "cpu", "dtype": "float32"}
PARAMS = SamplingParams(temperature=0.8, seed=1, max_tokens=12, logprobs=2, ignore_eos=True)
FAMILIES = [("bfloat16", family) for family in tiny.FAMILIES]
FAMILIES += [("float16", family) for family in ("llama3", "gpt_oss", "gemma4", "deepseek_v3", "nemotron_h_latent")]
Said = list[tuple[tuple[int, ...], object]]


def narrowed(source: Path, directory: Path, dtype: str) -> Path:
    """The same checkpoint with its matrices in 16 bits."""
    shutil.copytree(source, directory)
    tensors = load_file(directory / "model.safetensors")
    tensors = {name: each.to(getattr(torch, dtype)) if each.dim() > 1 else each for name, each in tensors.items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return directory


def said(llm: LLM) -> Said:
    outputs = llm.generate(PROMPTS, PARAMS)
    return [(tuple(each.outputs[0].token_ids), each.outputs[0].logprobs) for each in outputs]


def answers(path: Path, speculative: dict[str, Any] | None = None, **options: Any) -> Said:
    with LLM(path, speculative, **{**SMALL, **options}) as llm:
        return said(llm)


@pytest.mark.parametrize(("dtype", "family"), FAMILIES)
def test_every_family_says_the_same_without_floats(
    dtype: str, family: str, target_path: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = narrowed(target_path(family), tmp_path / "narrow", dtype)
    with LLM(path, None, **SMALL) as llm:
        expected = said(llm)
        assert all(layer.packed is None for layer in packable(llm.target)), "too small to be worth it"
        floats = held_bytes(llm.target)
    monkeypatch.setattr(packing, "SMALL_MODEL", 0)
    assert answers(path) == expected
    drafter = drafter_settings("eagle3", tmp_path, target_path, family)
    with LLM(path, {**drafter, "num_speculative_tokens": 3, "adaptive": False, "force": True}, **SMALL) as llm:
        assert {layer.packed.kind for layer in packable(llm.target)} == {NARROW[dtype]}
        assert not any(has_memory(layer.weight) for layer in packable(llm.target))
        for routed in mixtures(llm.target):
            assert routed.packed.keys() == {routed.up, routed.down}
            assert not has_memory(routed.up)
        assert held_bytes(llm.target) < (0.6 if mixtures(llm.target) else 0.75) * floats
        assert llm.budget.weight_bytes == held_bytes(llm.target, llm.drafter)
        texts = [prompt + list(ids) for prompt, (ids, _) in zip(PROMPTS, expected, strict=True)]
        guide(llm.drafter, texts, llm.target.vocab_size)
        outputs = llm.generate(PROMPTS, PARAMS)
    assert [(tuple(each.outputs[0].token_ids), each.outputs[0].logprobs) for each in outputs] == expected
    total = total_speculation(outputs)
    assert 0 < total.accepted < total.drafted


def test_drafts_are_the_same_where_the_embedding_is_narrow(
    target_path: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A head that reads the target's embedding, in one native call and step by step."""
    path = narrowed(target_path("smollm2"), tmp_path / "narrow", "bfloat16")
    drafter = {**drafter_settings("eagle3", tmp_path, target_path, "smollm2"), "adaptive": False, "force": True}
    params = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, trace=True)

    def drafted() -> list[Any]:
        with LLM(path, drafter, **SMALL) as llm:
            found = [output.outputs[0].trace for output in llm.generate(PROMPTS, params)]
            assert llm.drafter._chain is not None
            return found

    expected = drafted()
    monkeypatch.setattr(packing, "SMALL_MODEL", 0)
    assert drafted() == expected


@pytest.mark.parametrize("kind", [AFFINE4, SCALED8])
def test_floats_that_came_from_fewer_bits(
    kind: int, target_path: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The embedding too, which is looked up, and experts."""
    source = target_path("qwen3_moe")
    torch.manual_seed(0)
    tensors = {
        name: in_steps(each, kind) if each.dim() == 2 and not name.endswith("mlp.gate.weight") else each
        for name, each in load_file(source / "model.safetensors").items()
    }
    path = save(tmp_path / "steps", json.loads((source / "config.json").read_text()), tensors)
    expected = answers(path)
    monkeypatch.setattr(packing, "SMALL_MODEL", 0)
    with LLM(path, None, **SMALL) as llm:
        kinds = {layer.packed.kind for layer in packable(llm.target) if layer.packed is not None}
        assert kind in kinds
        assert llm.target.embed.packed.kind == kind
        assert {form.matrix.kind for routed in mixtures(llm.target) for form in routed.packed.values()} == {kind}
        assert said(llm) == expected


def in_steps(weight: torch.Tensor, kind: int) -> torch.Tensor:
    """The nearest numbers that such a form can hold."""
    blocks = weight.float().reshape(-1, 32)
    if kind == SCALED8:
        scale = (blocks.abs().amax(1, keepdim=True) / 127).half().float()
        levels = (blocks / scale).round().clamp(-127, 127)
        levels[:, 0] = 127
        return (levels * scale).view(weight.shape)
    offset = blocks.amin(1, keepdim=True).half().float()
    scale = ((blocks.amax(1, keepdim=True) - offset) / 15).half().float()
    levels = ((blocks - offset) / scale).round().clamp(0, 15)
    levels[:, 0], levels[:, 1] = 0, 15
    return (levels * scale + offset).view(weight.shape)


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from([BFLOAT16, FLOAT16, AFFINE4, SCALED8]),
    num_rows=st.integers(1, 70),
    depth=st.integers(1, 130),
    ids=st.lists(st.integers(0, 10**6), max_size=60),
    seed=st.integers(0, 100),
)
def test_rows_are_looked_up_as_they_were(kind: int, num_rows: int, depth: int, ids: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    weight = torch.randn(num_rows, depth)
    if kind in (AFFINE4, SCALED8):
        weight = in_steps(torch.randn(num_rows, 32 * (1 + depth // 32)), kind)
    else:
        weight = weight.bfloat16().float() if kind == BFLOAT16 else (weight * 1e-4).half().float()
    packed, chosen = pack(weight), torch.tensor(ids, dtype=torch.long) % num_rows
    assert packed is not None
    assert packed.kind == kind
    assert torch.equal(native.look_up(weight, packed, chosen), weight[chosen])
    assert torch.equal(native.dense(weight, packed), weight)


def bilinear(gate_up: torch.Tensor) -> torch.Tensor:
    """None that the native call knows."""
    gate, up = gate_up.chunk(2, dim=-1)
    return gate * up


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from([BFLOAT16, FLOAT16, AFFINE4, SCALED8]),
    num_rows=st.integers(1, 20),
    num_experts=st.integers(1, 6),
    sizes=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    other_activation=st.booleans(),
    seed=st.integers(0, 100),
)
def test_experts_answer_as_those_in_floats_do(
    kind: int, num_rows: int, num_experts: int, sizes: tuple[int, int], other_activation: bool, seed: int
) -> None:
    torch.manual_seed(seed)
    hidden, inner = 32 * sizes[0], 32 * sizes[1]
    stacks = []
    for shape in ((num_experts, 2 * inner, hidden), (num_experts, hidden, inner)):
        stack = torch.randn(shape) / 8
        halves = {BFLOAT16: torch.bfloat16, FLOAT16: torch.float16}
        stacks.append(stack.to(halves[kind]).float() if kind in halves else in_steps(stack, kind))
    forms = [pack(stack.flatten(0, 1)) for stack in stacks]
    packed = [PackedStack(form, tuple(stack.shape)) for form, stack in zip(forms, stacks, strict=True)]  # type: ignore[arg-type]
    assert all(form.matrix.kind == kind for form in packed)
    ids = torch.rand(num_rows, num_experts).topk(min(2, num_experts)).indices
    given = torch.randn(num_rows, hidden), ids, torch.rand(ids.shape)
    activation = bilinear if other_activation else silu_mul
    with torch.inference_mode():
        wanted = experts(*given, ExpertWeights(*stacks), activation)
        assert torch.equal(experts(*given, ExpertWeights(*packed), activation), wanted)


def test_a_model_that_is_refilled_says_something_else(
    target_path: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draft models run all layers in one native call, which must learn where their weights are now."""
    monkeypatch.setattr(packing, "SMALL_MODEL", 0)
    path = narrowed(target_path("llama"), tmp_path / "narrow", "bfloat16")
    with LLM(path, None, **SMALL, enable_prefix_caching=False) as llm:
        before = said(llm)
        parameters = dict(llm.target.named_parameters())
        name, layer = next((n, each) for n, each in llm.target.named_modules() if isinstance(each, Linear))
        kept = native.dense(layer.weight, layer.packed)
        refill(llm.target, {f"{name}.weight": torch.randn(layer.weight.shape)})
        assert has_memory(parameters[f"{name}.weight"]), "which has no smaller form"
        assert said(llm) != before
        refill(llm.target, {f"{name}.weight": kept})
        assert not has_memory(parameters[f"{name}.weight"])
        assert said(llm) == before


def test_what_a_drafter_has_of_the_target_is_noticed(
    target_path: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An embedding that a drafter's file holds once more is not kept twice, in whatever form the target has it."""
    path = narrowed(target_path("llama"), tmp_path / "narrow", "bfloat16")
    embedding = load_file(path / "model.safetensors")["model.embed_tokens.weight"]
    tensors = tiny.eagle3_tensors(64, 64, 3, tiny.VOCAB, own_embedding=True)
    tensors["embed_tokens.weight"] = embedding
    head = tiny.save_eagle3(tmp_path / "head", tensors)
    for small_model in (packing.SMALL_MODEL, 0):
        monkeypatch.setattr(packing, "SMALL_MODEL", small_model)
        with LLM(path, {"method": "eagle3", "model": str(head), "force": True}, **SMALL) as llm:
            assert llm.drafter.embed is llm.target.embed


@pytest.mark.parametrize("family", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("way", WAYS)
def test_a_quantised_file_stays_narrow(way: str, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for columns in an odd order. Numbers are those of the dense checkpoint."""
    quantised, dense = quantise_model(tmp_path, way, family)
    expected = answers(dense)
    with LLM(quantised, None, **SMALL) as llm:
        floats = held_bytes(llm.target)
        assert said(llm) == expected
    monkeypatch.setattr(packing, "SMALL_MODEL", 0)
    drafter = {"method": "ngram", "prompt_lookup_min": 1, "num_speculative_tokens": 3, "adaptive": False}
    with LLM(quantised, drafter, **SMALL) as llm:
        kinds = {layer.packed.kind for layer in packable(llm.target) if layer.packed is not None}
        kinds |= {form.matrix.kind for routed in mixtures(llm.target) for form in routed.packed.values()}
        wanted = {"fp8": {SCALED_FP8}, "int8": {SCALED8}}.get(way, {AFFINE4})
        assert kinds == wanted or (way == "gptq" and kinds <= wanted)
        assert way == "gptq" or held_bytes(llm.target) < (0.75 if family == "llama" else 0.65) * floats
        texts = [prompt + list(ids) for prompt, (ids, _) in zip(PROMPTS, expected, strict=True)]
        guide(llm.drafter, texts, llm.target.vocab_size)
        outputs = llm.generate(PROMPTS, PARAMS)
    assert [tuple(each.outputs[0].token_ids) for each in outputs] == [ids for ids, _ in expected]
    total = total_speculation(outputs)
    assert 0 < total.accepted < total.drafted


def random_numbers(kind: Kind, num_rows: int, group: int, num_groups: int, has_offset: bool, seed: int) -> Quantised:
    """group 0: a scale for all of a row."""
    generator = torch.Generator().manual_seed(seed)
    num_columns = 32 * num_groups if kind is Kind.FP4 else (group or 96) * num_groups
    shape = num_rows, num_columns // 32 if kind is Kind.FP4 else num_groups if group else 1
    numbers = torch.randint(0, 2**kind.num_bits, (num_rows, num_columns), generator=generator).to(torch.uint8)
    if kind is Kind.FP8:
        numbers[numbers & 0x7F == 0x7F] = 0  # which are none
    if kind is Kind.FP4:
        return pack_numbers(kind, numbers, torch.randint(110, 130, shape, generator=generator).to(torch.uint8))
    scale = (torch.rand(shape, generator=generator) * 0.02 + 1e-4).half().float()
    zero = torch.randint(0, 16, shape, generator=generator) if has_offset else None
    return pack_numbers(kind, numbers, scale, None if zero is None else -zero * scale)


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    kind=st.sampled_from(list(Kind)),
    num_rows=st.integers(1, 40),
    group=st.sampled_from([32, 64, 96, 128, 0]),
    num_groups=st.integers(1, 14),
    has_offset=st.booleans(),
    num_products=st.sampled_from([1, 2, 3, 5, 8, 9, 16, 17, 40]),
    seed=st.integers(0, 1000),
)
def test_numbers_in_few_bits_are_the_same_on_a_cpu(
    kind: Kind, num_rows: int, group: int, num_groups: int, has_offset: bool, num_products: int, seed: int
) -> None:
    if group == 96 and part_for(96 * num_groups, 96, kind) is None:
        return
    weight = random_numbers(kind, num_rows, group, num_groups, has_offset, seed)
    packed = pack_quantised(weight)
    if has_offset and kind in (Kind.INT8, Kind.FP8):
        assert packed is None
        return
    assert packed is not None
    dense = weight.dense(torch.float32)
    assert torch.equal(native.dense(dense, packed), dense)
    x = torch.randn(num_products, weight.num_columns, generator=torch.Generator().manual_seed(seed))
    assert torch.equal(native.linear(x, dense, None, packed), native.linear(x, dense))


@pytest.mark.parametrize("march", [None, *MARCHES])
def test_long_rows_of_few_bits_on_every_processor(
    march: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if march is not None:
        use_older_processor(march, tmp_path, monkeypatch)
    for kind, group in [(Kind.INT4, 64), (Kind.UINT4, 128), (Kind.INT8, 0), (Kind.FP8, 0), (Kind.FP8, 128)]:
        weight = random_numbers(kind, 37, group, 1400 // (group or 96), kind is Kind.UINT4, seed=1)
        packed, dense = pack_quantised(weight), weight.dense(torch.float32)
        assert packed is not None
        assert torch.equal(native.dense(dense, packed), dense)
        for num_products in (1, 4, 5, 30):
            x = torch.randn(num_products, weight.num_columns, generator=torch.Generator().manual_seed(0))
            assert torch.equal(native.linear(x, dense, None, packed), native.linear(x, dense))


def test_numbers_that_are_none_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "SMALL_MODEL", 0)
    quantised, _ = quantise_model(tmp_path, "fp8")
    for path in quantised.glob("*.safetensors"):
        tensors = load_file(path)
        name = next((each for each in tensors if each.endswith("q_proj.weight")), None)
        if name is not None:
            tensors[name].view(torch.uint8)[3, 5] = 0x7F
            save_file(tensors, path, {"format": "pt"})
            break
    with pytest.raises(ValueError, match=r"q_proj\.weight holds numbers that are none|q_proj\.weight.* NaN"):
        LLM(quantised, None, **SMALL)
