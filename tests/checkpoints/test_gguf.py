"""GGUF files written here with the gguf package, read back, and compared with the models they were made from.
A real file is read too where OUTRIDER_TEST_GGUF names one."""

import contextlib
import random
import struct
import sys
from pathlib import Path

import gguf
import numpy
import pytest
import torch
from gguf_files import (
    add_embedding,
    finish,
    interleave,
    minimal_file,
    minimal_writer,
    real_file,
    tiny_model,
    write_model,
)

from outrider.checkpoints import gguf as gguf_checkpoint
from outrider.checkpoints import gguf_weights
from outrider.checkpoints.checkpoint import load_tokenizer, open_checkpoint
from outrider.checkpoints.gguf import GgufCheckpoint
from outrider.checkpoints.gguf_file import TENSOR_TYPES
from outrider.checkpoints.gguf_weights import PLAIN_TYPES
from outrider.detokenizer import Detokenizer
from outrider.host_memory import LARGE_PAGE
from outrider.kernels import native, native_library
from outrider.kernels.packed import Blocks, pack_blocks

QUANTISED = [name for name, block_len, _ in TENSOR_TYPES.values() if block_len > 1]


# Models


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("llama", {"tie_word_embeddings": False, "attention_bias": True}),
        ("qwen2", {"tie_word_embeddings": False}),
        ("qwen3", {"tie_word_embeddings": True}),
    ],
)
def test_a_model_comes_back_under_its_own_names(tmp_path: Path, family: str, options: dict) -> None:
    model = tiny_model(family, **options)
    path = write_model(tmp_path / "model.gguf", model, family)
    checkpoint = open_checkpoint(path)
    tied = options["tie_word_embeddings"]
    expected = {name: tensor for name, tensor in model.state_dict().items() if not (tied and name == "lm_head.weight")}
    assert sorted(checkpoint.names()) == sorted(expected)
    for name, tensor in expected.items():
        assert checkpoint.shape(name) == tuple(tensor.shape)
        assert torch.equal(checkpoint.tensor(name), tensor), name
    config = model.config.to_dict()
    same = ["model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"]
    same += ["num_key_value_heads", "hidden_act", "max_position_embeddings", "rms_norm_eps"]
    assert {key: checkpoint.config[key] for key in same} == {key: config[key] for key in same}
    assert checkpoint.config["head_dim"] == 8
    assert checkpoint.config["architectures"] == [type(model).__name__]
    assert checkpoint.config["rope_theta"] == 5e5
    assert checkpoint.config["rope_scaling"] is None
    assert checkpoint.config["tie_word_embeddings"] is tied
    assert checkpoint.config["attention_bias"] is ("attention_bias" in options or family == "qwen2")
    checkpoint.close()


def test_transformers_reads_the_same_weights(tmp_path: Path) -> None:
    """Its own GGUF reader undoes the permutation independently."""
    model = tiny_model("llama", tie_word_embeddings=False)
    write_model(tmp_path / "model.gguf", model, "llama")
    reference = type(model).from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).state_dict()
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    assert sorted(reference) == sorted(checkpoint.names())
    assert all(torch.equal(checkpoint.tensor(name), tensor) for name, tensor in reference.items())


# Types


def random_blocks(type_name: str, num_rows: int, row_len: int) -> numpy.ndarray:
    """Raw bytes with half-precision scales that are small numbers, wherever in the block they lie."""
    block_len, block_bytes = next(sizes for name, *sizes in TENSOR_TYPES.values() if name == type_name)
    generator = numpy.random.default_rng(0)
    blocks = generator.integers(0, 256, (num_rows * row_len // block_len, block_bytes), dtype=numpy.uint8)
    scales = generator.normal(size=(len(blocks), 2)).astype(numpy.float16).view(numpy.uint8)
    blocks[:, :4] = scales
    blocks[:, -2:] = scales[:, :2]  # Q6_K keeps its scale last
    return blocks.reshape(num_rows, -1)


@pytest.mark.parametrize("type_name", QUANTISED)
def test_quantised_blocks_are_expanded(tmp_path: Path, type_name: str) -> None:
    kind = gguf.GGMLQuantizationType[type_name]
    blocks = random_blocks(type_name, 6, 512)
    writer = minimal_writer(tmp_path / "model.gguf", "qwen2")
    add_embedding(writer)
    writer.add_tensor("blk.0.ffn_down.weight", blocks, raw_dtype=kind)
    checkpoint = open_checkpoint(finish(writer))
    tensor = checkpoint.tensor("model.layers.0.mlp.down_proj.weight")
    assert tensor.dtype == torch.float32
    assert tensor.shape == checkpoint.shape("model.layers.0.mlp.down_proj.weight") == (6, 512)
    assert tensor.isfinite().all()
    assert tensor.std() > 0
    assert numpy.array_equal(tensor.numpy(), gguf.quants.dequantize(blocks, kind))
    checkpoint.close()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the reference multiplies infinities
@pytest.mark.parametrize("type_name", QUANTISED)
def test_every_block_means_what_the_reference_says(type_name: str) -> None:
    """Any bytes: scales that are negative, subnormal or zero, every level. Whatever the number of threads."""
    sizes = {name: (number, *others) for number, (name, *others) in TENSOR_TYPES.items()}
    type_number, block_len, block_bytes = sizes[type_name]
    blocks = numpy.random.default_rng(1).integers(0, 256, (64, 3 * block_bytes), dtype=numpy.uint8)
    blocks[:8, 1] &= 0x80  # subnormal scales, of both signs
    expected = torch.from_numpy(gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(type_number)))
    before = torch.get_num_threads()
    try:
        for num_threads in (1, 2, 3):
            torch.set_num_threads(num_threads)
            out = torch.full((64, 3 * block_len), 7.0)
            native.dequantise(Blocks(torch.from_numpy(blocks), type_number, 3 * block_len), out)
            assert torch.equal(out.nan_to_num(), expected.nan_to_num())
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("type_name", QUANTISED)
def test_linear_layers_take_blocks_as_they_are(type_name: str) -> None:
    """The same bits as with floats, at a depth that parts blocks in their middle, with rows of another type below."""
    numbers = {name: number for number, (name, *_) in TENSOR_TYPES.items()}
    parts, floats = [], []
    for name, num_rows in ((type_name, 37), ("Q8_0", 30), (type_name, 1)):
        stored = torch.from_numpy(random_blocks(name, num_rows, 2816))
        parts.append(Blocks(stored, numbers[name], 2816))
        floats.append(torch.from_numpy(gguf.quants.dequantize(stored.numpy(), gguf.GGMLQuantizationType[name])))
    weight, packed = torch.cat(floats), pack_blocks(parts)
    x = torch.randn(9, 2816, generator=torch.Generator().manual_seed(0))
    empty = torch.full((1,), torch.nan).expand(weight.shape)
    with torch.inference_mode():
        for num_rows in (1, 9):
            assert torch.equal(native.linear(x[:num_rows], empty, None, packed), native.linear(x[:num_rows], weight))
        for first in (1, 37, 50, 67):
            rest = native.linear(x, empty[first:], None, packed.rows_from(first))
            assert torch.equal(rest, native.linear(x, weight[first:]))
        ids = torch.tensor([[3, 0], [36, 3]])
        assert torch.equal(native.look_up(floats[0], pack_blocks(parts[:1]), ids), floats[0][ids])


@pytest.mark.parametrize("type_name", ["F32", "F16", "Q8_0", "Q4_K"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tensors_are_read_into_parts_of_others(
    tmp_path: Path, type_name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a head that lie in pairs as well, and in several pieces where there is a type to change."""
    monkeypatch.setattr(gguf_weights, "CHUNK", 700)
    kind = gguf.GGMLQuantizationType[type_name]
    values = numpy.random.default_rng(0).normal(size=(32, 256)).astype(numpy.float32)
    plain = type_name in PLAIN_TYPES
    stored = gguf.quants.quantize(values, kind) if plain else random_blocks(type_name, 32, 256)
    writer = minimal_writer(tmp_path / "model.gguf", "llama")
    add_embedding(writer)
    for name in ("blk.0.attn_q.weight", "blk.0.ffn_up.weight"):
        writer.add_tensor(name, stored, raw_dtype=kind)
    checkpoint = GgufCheckpoint(finish(writer))
    for name in ("self_attn.q_proj", "mlp.up_proj"):
        whole = torch.zeros(34, 256, dtype=dtype)
        checkpoint.read_into(f"model.layers.0.{name}.weight", whole[1:33])
        assert not whole[0].any()
        assert not whole[33].any()
        assert torch.equal(whole[1:33], checkpoint.tensor(f"model.layers.0.{name}.weight").to(dtype))
    pairs = checkpoint.tensor("model.layers.0.mlp.up_proj.weight").view(4, 4, 2, 256)
    halves = checkpoint.tensor("model.layers.0.self_attn.q_proj.weight").view(4, 2, 4, 256)
    assert torch.equal(halves, pairs.transpose(1, 2))
    checkpoint.close()


@pytest.mark.parametrize("type_name", ["Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0"])
def test_quantised_weights_are_near_the_original(tmp_path: Path, type_name: str) -> None:
    kind = gguf.GGMLQuantizationType[type_name]
    weight = numpy.random.default_rng(0).uniform(-1, 1, (32, 64)).astype(numpy.float32)
    writer = minimal_writer(tmp_path / "model.gguf")
    add_embedding(writer)
    writer.add_tensor("blk.0.attn_q.weight", gguf.quants.quantize(interleave(weight, 4), kind), raw_dtype=kind)
    tensor = open_checkpoint(finish(writer)).tensor("model.layers.0.self_attn.q_proj.weight")
    step = 2.0 / (2 ** int(type_name[1]) - 1)
    assert (tensor - torch.from_numpy(weight)).abs().max() < 1.2 * step


@pytest.mark.parametrize(
    ("type_name", "dtype"), [("F32", torch.float32), ("F16", torch.float16), ("BF16", torch.bfloat16)]
)
def test_plain_types_stay_as_they_are(tmp_path: Path, type_name: str, dtype: torch.dtype) -> None:
    kind = gguf.GGMLQuantizationType[type_name]
    weight = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)).to(dtype)
    writer = minimal_writer(tmp_path / "model.gguf")
    add_embedding(writer)
    writer.add_tensor("output.weight", gguf.quants.quantize(weight.float().numpy(), kind), raw_dtype=kind)
    tensor = open_checkpoint(finish(writer)).tensor("lm_head.weight")
    assert tensor.dtype == dtype
    assert torch.equal(tensor, weight)


def test_without_a_compiler_the_package_expands_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = minimal_file(tmp_path)
    writer = minimal_writer(tmp_path / "quantised.gguf")
    add_embedding(writer)
    writer.add_tensor("output.weight", random_blocks("Q8_0", 8, 32), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("blk.0.attn_q.weight", random_blocks("Q4_0", 32, 32), raw_dtype=gguf.GGMLQuantizationType.Q4_0)
    quantised = finish(writer)
    names = ("lm_head.weight", "model.layers.0.self_attn.q_proj.weight")
    fast = [open_checkpoint(quantised).tensor(name) for name in names]
    monkeypatch.setattr(native_library, "library", lambda: None)
    slow = [open_checkpoint(quantised).tensor(name) for name in names]
    assert all(map(torch.equal, fast, slow))
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert open_checkpoint(plain).tensor("model.embed_tokens.weight").shape == (8, 32)
    with pytest.raises(ValueError, match="pip install gguf"):
        open_checkpoint(quantised)


# Settings


def test_tiles_of_a_file_lie_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each chunk of memory more ends in a large page that is used in part."""
    writer = minimal_writer(tmp_path / "model.gguf")
    add_embedding(writer)
    for name, num_rows in (("attn_q", 40), ("attn_v", 7), ("ffn_up", 64)):
        blocks = random_blocks("Q4_K", num_rows, 512)
        writer.add_tensor(f"blk.0.{name}.weight", blocks, raw_dtype=gguf.GGMLQuantizationType.Q4_K)
    path = finish(writer)
    for most, num_chunks in ((2**40, 1), (1, 3)):
        monkeypatch.setattr(gguf_checkpoint, "MOST_OF_TILES", most)
        checkpoint = GgufCheckpoint(path)
        names = [name for name in checkpoint.names() if checkpoint.in_blocks(name)]
        tiles = [checkpoint.tiles(name).data for name in names]
        assert len(tiles) == 3
        assert len({each.untyped_storage().data_ptr() for each in tiles}) == num_chunks
        chunk = tiles[0].untyped_storage().nbytes()
        assert chunk < sum(each.numel() for each in tiles) + 3 * LARGE_PAGE, "and no more is asked for than is needed"
        checkpoint.close()


def test_defaults(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(minimal_file(tmp_path))
    expected = {"num_key_value_heads": 4, "head_dim": 8, "rope_theta": 10000.0, "rope_scaling": None, "vocab_size": 8}
    assert checkpoint.config == checkpoint.config | expected
    assert checkpoint.config["rms_norm_eps"] == 1e-5
    assert checkpoint.config["eos_token_id"] is None
    assert checkpoint.generation_config == {}


def test_llama3_rope_factors(tmp_path: Path) -> None:
    writer = minimal_writer(tmp_path / "model.gguf")
    add_embedding(writer)
    writer.add_tensor("rope_freqs.weight", numpy.array([1.0, 1.0, 4.5, 8.0], numpy.float32))
    checkpoint = open_checkpoint(finish(writer))
    assert checkpoint.config["rope_scaling"] == {"rope_type": "llama3_factors", "factors": [1.0, 1.0, 4.5, 8.0]}
    assert checkpoint.names() == ["model.embed_tokens.weight"]


def test_linear_rope_scaling(tmp_path: Path) -> None:
    writer = minimal_writer(tmp_path / "model.gguf")
    add_embedding(writer)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(2.5)
    assert open_checkpoint(finish(writer)).config["rope_scaling"] == {"rope_type": "linear", "factor": 2.5}


def test_yarn_rope_scaling(tmp_path: Path) -> None:
    writer = minimal_writer(tmp_path / "model.gguf", "qwen2")
    add_embedding(writer)
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(32768)
    scaling = open_checkpoint(finish(writer)).config["rope_scaling"]
    transformers = pytest.importorskip("transformers")
    config = transformers.Qwen2Config(
        hidden_size=32,
        num_attention_heads=4,
        max_position_embeddings=32768 * 4,
        rope_parameters={"rope_theta": 1e6, **scaling},
    )
    without = {key: value for key, value in config.rope_parameters.items() if key != "attention_factor"}
    plain = transformers.Qwen2Config(**{**config.to_dict(), "rope_parameters": without})
    initialise = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS["yarn"]
    ours, reference = initialise(config, "cpu"), initialise(plain, "cpu")
    assert scaling["original_max_position_embeddings"] == 32768
    assert torch.equal(ours[0], reference[0])
    assert ours[1] == pytest.approx(reference[1])


# What is wrong is named


def fails(path: Path, *words: str) -> None:
    with pytest.raises(ValueError) as caught:
        open_checkpoint(path)
    for word in (str(path), *words):
        assert word in str(caught.value)


def test_every_truncation_is_noticed(tmp_path: Path) -> None:
    path = minimal_file(tmp_path)
    content = path.read_bytes()
    for length in [*range(64), *range(64, len(content), 5), len(content) - 1]:
        path.write_bytes(content[:length])
        fails(path)


def test_a_damaged_header_is_a_value_error_and_nothing_else(tmp_path: Path) -> None:
    path = minimal_file(tmp_path)
    content = path.read_bytes()
    header_len = len(content) - 8 * 32 * 4
    chance = random.Random(0)
    refused = 0
    for _ in range(400):
        damaged = bytearray(content)
        for _ in range(chance.randint(1, 3)):
            damaged[chance.randrange(header_len)] = chance.choice([0, 1, 0x7F, 0xFF, chance.randrange(256)])
        path.write_bytes(damaged)
        with contextlib.suppress(ValueError):
            checkpoint = open_checkpoint(path)
            for name in checkpoint.names():
                assert checkpoint.tensor(name).shape == checkpoint.shape(name)
            continue
        refused += 1
    assert refused > 200


def replace(path: Path, old: bytes, new: bytes) -> None:
    content = path.read_bytes()
    assert content.count(old) == 1
    path.write_bytes(content.replace(old, new))


def tensor_info(*shape: int, kind: int, offset: int) -> bytes:
    return struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, kind, offset)


@pytest.mark.parametrize(
    ("info", "reason"),
    [
        (tensor_info(32, 9, kind=0, offset=0), "beyond the end"),
        (tensor_info(32, 8, kind=0, offset=32), "beyond the end"),
        (tensor_info(32, 8, kind=0, offset=2**64 - 32), "beyond the end"),
        (tensor_info(2**62, 2**62, kind=0, offset=0), "beyond the end"),
        (tensor_info(32, 7, kind=0, offset=1), "multiple of 32"),
        (tensor_info(16, 8, kind=8, offset=0), "blocks of 32"),
        (tensor_info(384, 8, kind=12, offset=0), "blocks of 256; download or convert"),
        (tensor_info(32, 0, kind=0, offset=0), "blocks of 1"),
        (tensor_info(32, 8, kind=16, offset=0), "type 16; only F32"),
    ],
)
def test_a_tensor_that_cannot_be(tmp_path: Path, info: bytes, reason: str) -> None:
    path = minimal_file(tmp_path)
    replace(path, tensor_info(32, 8, kind=0, offset=0), info)
    fails(path, "'token_embd.weight'", reason)


def test_a_file_that_is_no_gguf(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"")
    fails(path, "empty")
    path.write_bytes(b"PK" * 50)
    fails(path, "not a GGUF file")
    path.write_bytes(b"GGUF" + struct.pack("<I", 1) + b"\0" * 64)
    fails(path, "version 1")
    path.write_bytes(b"GGUF" + struct.pack(">I", 3) + b"\0" * 64)
    fails(path, "big-endian")


def test_a_model_that_cannot_be_read(tmp_path: Path) -> None:
    writer = minimal_writer(tmp_path / "family.gguf", "mamba")
    add_embedding(writer)
    fails(finish(writer), "'mamba'", "llama", "safetensors")
    writer = minimal_writer(tmp_path / "experts.gguf")
    add_embedding(writer)
    writer.add_tensor("blk.0.ffn_gate_exps.weight", numpy.zeros((2, 4, 32), numpy.float32))
    fails(finish(writer), "'blk.0.ffn_gate_exps.weight'")
    writer = minimal_writer(tmp_path / "embedding.gguf")
    writer.add_tensor("output.weight", numpy.zeros((4, 32), numpy.float32))
    fails(finish(writer), "'model.embed_tokens.weight'")
    writer = minimal_writer(tmp_path / "rotary.gguf")
    add_embedding(writer)
    writer.add_rope_dimension_count(4)
    fails(finish(writer), "4 rotated")
    writer = minimal_writer(tmp_path / "scaling.gguf")
    add_embedding(writer)
    writer.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE)
    writer.add_rope_scaling_factor(2.0)
    fails(finish(writer), "'longrope'")
    writer = minimal_writer(tmp_path / "split.gguf")
    add_embedding(writer)
    writer.add_uint16("split.count", 2)
    fails(finish(writer), "gguf-split --merge")


def test_a_setting_that_is_missing_or_of_another_kind(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "missing.gguf", "llama")
    add_embedding(writer)
    fails(finish(writer), "'llama.embedding_length'", "convert")
    writer = minimal_writer(tmp_path / "kind.gguf")
    add_embedding(writer)
    writer.add_head_count_kv([1, 2])
    fails(finish(writer), "'llama.attention.head_count_kv' is a list")


# Tokenizers


def test_the_tokenizer_of_a_file(tmp_path: Path) -> None:
    writer = minimal_writer(tmp_path / "model.gguf")
    add_embedding(writer)
    without = open_checkpoint(finish(writer))
    assert load_tokenizer(without) is None
    writer = minimal_writer(tmp_path / "tokenizer.gguf")
    add_embedding(writer)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(["<|end|>", "a", "b", "ab", "<|turn|>"])
    writer.add_token_types([3, 1, 1, 1, 3])
    writer.add_token_merges(["a b"])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_eot_token_id(4)
    writer.add_chat_template("{{ bos_token }}{{ messages[0].content }}")
    checkpoint = open_checkpoint(finish(writer))
    tokenizer = load_tokenizer(checkpoint)
    assert tokenizer is not None
    assert tokenizer.encode("abba<|turn|>") == [3, 2, 1, 4]
    assert tokenizer.chat([{"content": "a"}]) == "<|end|>a"
    assert (checkpoint.config["bos_token_id"], checkpoint.config["eos_token_id"]) == (0, 0)
    assert checkpoint.generation_config == {"eos_token_id": [0, 4]}


# A real file


@pytest.fixture(scope="module")
def real_path() -> Path:
    return real_file("OUTRIDER_TEST_GGUF", "SmolLM2-135M-Instruct")


def test_a_real_model(real_path: Path) -> None:
    checkpoint = GgufCheckpoint(real_path)
    config = checkpoint.config
    assert config["model_type"] == "llama"
    assert len(checkpoint.names()) == 2 + 9 * config["num_hidden_layers"]
    query = checkpoint.tensor("model.layers.0.self_attn.q_proj.weight")
    assert query.shape == (config["num_attention_heads"] * config["head_dim"], config["hidden_size"])
    assert query.isfinite().all()
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        real_path.parent, gguf_file=real_path.name, dtype=torch.float32
    ).state_dict()
    assert all(torch.equal(checkpoint.tensor(name), reference[name]) for name in checkpoint.names())


def test_a_real_tokenizer(real_path: Path) -> None:
    tokenizer = load_tokenizer(open_checkpoint(real_path))
    assert tokenizer is not None
    transformers = pytest.importorskip("transformers")
    reference = transformers.AutoTokenizer.from_pretrained(real_path.parent, gguf_file=real_path.name)
    messages = [{"role": "user", "content": "Why is 17 prime?"}]
    prompt = tokenizer.chat(messages)
    assert prompt == reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    for text in ["naïve: déjà vu 😀👍🏽 12345", "def f(x):\n\n    return 3", prompt]:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids, skip_special_tokens=False) == text
        assert ids == reference.encode(text)
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
        assert "".join(map(detokenizer.add, ids)) + detokenizer.finish() == text
