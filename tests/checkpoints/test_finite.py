"""What no weight can be is refused while it loads, and named: NaN, infinities, whole, boolean and complex numbers."""

from collections.abc import Callable
from pathlib import Path

import gguf
import numpy
import pytest
import tiny
import torch
from gguf_files import tiny_model, write_model
from harness import load_target
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider import LLM
from outrider.checkpoints.finite import SCALES, FiniteCheck, scales_are_finite
from outrider.checkpoints.gguf_file import TENSOR_TYPES
from outrider.kernels.packed import Blocks
from outrider.layers import packing

QUERY = "model.layers.1.self_attn.k_proj.weight"  # one of three that make a parameter


def changed(path: Path, copy: Path, name: str, change: Callable[[Tensor], Tensor]) -> Path:
    copy.mkdir()
    tensors = load_file(path / "model.safetensors")
    tensors[name] = change(tensors[name])
    save_file(tensors, copy / "model.safetensors")
    (copy / "config.json").write_text((path / "config.json").read_text())
    return copy


def with_one(value: float) -> Callable[[Tensor], Tensor]:
    def change(tensor: Tensor) -> Tensor:
        tensor.view(-1)[tensor.numel() // 2] = value
        return tensor

    return change


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("name", [QUERY, "model.norm.weight", "model.embed_tokens.weight"])
def test_a_weight_that_is_no_number_is_named(
    name: str, value: float, target_path: Callable[..., Path], tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"tensor {name} holds (NaN|an infinite number)"):
        load_target(changed(target_path(), tmp_path / "copy", name, with_one(value)))


def test_tensors_that_are_reshaped_as_they_load_are_named(target_path: Callable[..., Path], tmp_path: Path) -> None:
    name = "model.layers.2.mlp.experts.gate_up_proj"
    with pytest.raises(ValueError, match=rf"tensor {name} holds NaN"):
        load_target(changed(target_path("gpt_oss"), tmp_path / "nan", name, with_one(float("nan"))))
    with pytest.raises(ValueError, match=rf"tensor {name} holds int16"):
        load_target(changed(target_path("gpt_oss"), tmp_path / "int", name, lambda tensor: tensor.to(torch.int16)))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int64, torch.uint8, torch.bool, torch.complex64])
def test_other_kinds_of_numbers_are_no_weights(
    dtype: torch.dtype, target_path: Callable[..., Path], tmp_path: Path
) -> None:
    path = changed(target_path(), tmp_path / "copy", QUERY, lambda tensor: tensor.to(dtype))
    with pytest.raises(ValueError, match=rf"tensor {QUERY} holds {str(dtype)[6:]}, where floating.*save it as"):
        load_target(path)


def test_drafters_too(target_path: Callable[..., Path], tmp_path: Path) -> None:
    head = tiny.save_eagle3(tmp_path / "head", draft_vocab=200)
    broken = changed(head, tmp_path / "broken", "fc.weight", with_one(float("nan")))
    with pytest.raises(ValueError, match=r"tensor fc\.weight holds NaN"):
        LLM(target_path(), {"method": "eagle3", "model": str(broken), "force": True})


def test_numbers_beyond_the_dtype_say_which_dtype(target_path: Callable[..., Path], tmp_path: Path) -> None:
    path = changed(target_path(), tmp_path / "copy", "model.norm.weight", with_one(1e6))
    with LLM(path, None, max_model_len=16):
        pass
    with pytest.raises(ValueError, match=r"model\.norm\.weight.*beyond what torch\.float16.*another dtype"):
        LLM(path, None, dtype="float16", max_model_len=16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_no_place_is_overlooked(dtype: torch.dtype) -> None:
    """Whatever lane of a vector instruction it falls into."""
    for size in (1, 7, 33, 257):
        for place in range(size):
            for value in (float("nan"), float("inf")):
                weight = torch.ones(size, dtype=dtype)
                weight[place] = value
                check = FiniteCheck(Fake(weight))  # type: ignore[arg-type]
                check.note(weight, ("it",))
                with pytest.raises(ValueError, match="tensor it holds"):
                    check.complain()


class Fake:
    path = Path("somewhere")

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def tensor(self, name: str) -> Tensor:
        return self._tensor


@pytest.mark.parametrize("number", [number for number, (name, _, _) in TENSOR_TYPES.items() if name in SCALES])
def test_every_scale_of_a_block_is_looked_at(number: int) -> None:
    """A block whose scale is no number gives no numbers, and others give numbers, as the gguf package reads them."""
    name, length, size = TENSOR_TYPES[number]
    clean = torch.randint(0, 256, (4, 3 * size), dtype=torch.uint8, generator=torch.Generator().manual_seed(number))
    blocks = clean.view(-1, size)
    for place in SCALES[name]:
        blocks[:, place + 1] &= 0x3B  # a scale that is neither infinite nor large
    assert scales_are_finite(Blocks(clean, number, 3 * length))
    kind = gguf.GGMLQuantizationType(number)
    assert numpy.isfinite(gguf.quants.dequantize(clean.numpy(), kind)).all()
    for place in SCALES[name]:
        for bits in (0x7C, 0x7E, 0xFC, 0xFF):
            broken = clean.clone()
            broken.view(-1, size)[5, place + 1] = bits
            assert not scales_are_finite(Blocks(broken, number, 3 * length))
            with numpy.errstate(invalid="ignore"):
                assert not numpy.isfinite(gguf.quants.dequantize(broken.numpy(), kind)).all()


@pytest.mark.parametrize("keeps", [True, False])
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1", "F16"])
def test_gguf_files_too(kind: str, keeps: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether blocks are kept as they are, or expanded."""
    monkeypatch.setattr(packing, "SMALL_MODEL", 0 if keeps else 2**40)
    path = write_model(tmp_path / "model.gguf", tiny_model("llama", tie_word_embeddings=False), "llama", (kind,))
    with LLM(path, None, max_model_len=16):
        pass
    reader = gguf.GGUFReader(path)
    entry = next(each for each in reader.tensors if each.name == "blk.1.ffn_up.weight")
    content = bytearray(path.read_bytes())
    content[entry.data_offset : entry.data_offset + 2] = b"\x00\x7e"  # a NaN in half precision
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"tensor model\.layers\.1\.mlp\.up_proj\.weight holds"):
        LLM(path, None, max_model_len=16)
