"""GGUF files of Gemma 3: the norms that were shifted, and a config that says what Hugging Face's would.
A real file is read too where OUTRIDER_TEST_GEMMA3_GGUF names one."""

from pathlib import Path
from typing import Any

import gguf
import pytest
import torch
from gguf_files import add_embedding, finish, minimal_writer, model_writer, real_file, tiny_model

from outrider.checkpoints.checkpoint import load_tokenizer, open_checkpoint
from outrider.detokenizer import Detokenizer

SLIDING, FULL = "sliding_attention", "full_attention"
ROPE = {
    FULL: {"rope_type": "linear", "factor": 8.0, "rope_theta": 5e5},
    SLIDING: {"rope_type": "default", "rope_theta": 20000.0},
}
OPTIONS = {
    "num_hidden_layers": 7,
    "sliding_window": 16,
    "query_pre_attn_scalar": 8,
    "rope_parameters": ROPE,
    "final_logit_softcapping": 30.0,
}


def gemma3_file(path: Path, model: Any) -> Path:
    writer = model_writer(path, model, "gemma3")
    writer.add_value_length(model.config.head_dim)
    writer.add_sliding_window(model.config.sliding_window)
    writer.add_final_logit_softcapping(model.config.final_logit_softcapping)
    writer.add_float32("gemma3.rope.freq_base_swa", ROPE[SLIDING]["rope_theta"])
    writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
    writer.add_rope_scaling_factor(ROPE[FULL]["factor"])
    return finish(writer)


def test_a_model_comes_back_under_its_own_names(tmp_path: Path) -> None:
    model = tiny_model("gemma3", **OPTIONS)
    checkpoint = open_checkpoint(gemma3_file(tmp_path / "model.gguf", model))
    expected = {name: tensor for name, tensor in model.state_dict().items() if name != "lm_head.weight"}
    assert sorted(checkpoint.names()) == sorted(expected)
    for name, tensor in expected.items():
        assert torch.equal(checkpoint.tensor(name), tensor), name
    # transformers makes the same config of it, rope of both kinds and the types of the layers included.
    config = type(model.config)(**checkpoint.config).to_dict()
    same = model.config.to_dict().keys() - {"architectures", "bos_token_id", "eos_token_id"}
    assert {key: config[key] for key in same} == {key: model.config.to_dict()[key] for key in same}
    assert checkpoint.config["architectures"] == ["Gemma3ForCausalLM"]
    assert checkpoint.config["tie_word_embeddings"] is True
    assert "hidden_act" not in checkpoint.config


def test_transformers_reads_the_same_weights(tmp_path: Path) -> None:
    """Its own GGUF reader takes the one away from the norms independently."""
    model = tiny_model("gemma3", **OPTIONS)
    path = gemma3_file(tmp_path / "model.gguf", model)
    reference = type(model).from_pretrained(tmp_path, gguf_file="model.gguf", dtype=torch.float32).state_dict()
    checkpoint = open_checkpoint(path)
    assert sorted(reference.keys() - {"lm_head.weight"}) == sorted(checkpoint.names())
    assert all(torch.equal(checkpoint.tensor(name), reference[name]) for name in checkpoint.names())


# Settings


def gemma3_config(tmp_path: Path, num_layers: int, **settings: Any) -> dict[str, Any]:
    """The config of a file with these settings, whose names have "__" for "."."""
    writer = minimal_writer(tmp_path / "model.gguf", "gemma3")
    add_embedding(writer)
    writer.kv_data[0]["gemma3.block_count"].value = num_layers
    add = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
    for name, value in settings.items():
        add[type(value)](f"gemma3.{name.replace('__', '.')}", value)
    return open_checkpoint(finish(writer)).config


def test_defaults(tmp_path: Path) -> None:
    config = gemma3_config(tmp_path, 13, attention__sliding_window=512)
    assert config["layer_types"] == [SLIDING, SLIDING, SLIDING, SLIDING, SLIDING, FULL] * 2 + [SLIDING]
    expected = {
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 512,
        "rope_theta": 1e6,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "query_pre_attn_scalar": 8,
        "final_logit_softcapping": None,
        "rms_norm_eps": 1e-5,
    }
    assert config == config | expected


@pytest.mark.parametrize(
    ("pattern", "layer_types"),
    [
        (1, [FULL] * 4),
        (3, [SLIDING, SLIDING, FULL, SLIDING]),
        (0, [SLIDING] * 4),
        ([True, False, False, True], [SLIDING, FULL, FULL, SLIDING]),
    ],
)
def test_the_file_may_say_which_layers_slide(tmp_path: Path, pattern: Any, layer_types: list[str]) -> None:
    settings = {"attention__sliding_window": 64, "attention__sliding_window_pattern": pattern}
    assert gemma3_config(tmp_path, 4, **settings)["layer_types"] == layer_types


def test_a_pattern_of_another_length(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="sliding_window_pattern' is not of 4 layers"):
        gemma3_config(tmp_path, 4, attention__sliding_window=64, attention__sliding_window_pattern=[True, False])


def test_a_number_of_layers_that_cannot_be(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="damaged: it has 4000000000 layers"):
        gemma3_config(tmp_path, 4_000_000_000)


@pytest.mark.parametrize("settings", [{}, {"attention__sliding_window": 0}])
def test_no_window(tmp_path: Path, settings: dict[str, int]) -> None:
    config = gemma3_config(tmp_path, 7, **settings)
    assert config["layer_types"] == [FULL] * 7
    assert config["sliding_window"] == config["max_position_embeddings"] == 128


def test_the_27b_scales_its_queries_in_its_own_way(tmp_path: Path) -> None:
    settings = {"attention__sliding_window": 64, "attention__key_length": 16}
    assert gemma3_config(tmp_path, 61, **settings)["query_pre_attn_scalar"] == 16
    assert gemma3_config(tmp_path, 62, **settings)["query_pre_attn_scalar"] == 32 // 4


# Tokenizers


def test_the_tokenizer_of_a_file(tmp_path: Path) -> None:
    writer = minimal_writer(tmp_path / "model.gguf", "gemma3")
    add_embedding(writer)
    pieces = {"ab": 0.0, "▁ab": -1.0, "▁": -2.0, "a": -3.0, "b": -4.0}
    controls = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
    plain = ["\n", "\n\n", "  ", "   "]  # the converter writes user-defined spaces as spaces
    letters = [f"<0x{byte:02X}>" for byte in range(256)]
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([*controls, *plain, *pieces, *letters])
    writer.add_token_scores([-1000.0] * 10 + list(pieces.values()) + [0.0] * 256)
    writer.add_token_types([3] * 6 + [4] * 4 + [1] * len(pieces) + [6] * 256)
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    writer.add_add_space_prefix(False)
    checkpoint = open_checkpoint(finish(writer))
    assert checkpoint.generation_config == {"eos_token_id": [1, 5]}  # a turn's end is no key of the file
    tokenizer = load_tokenizer(checkpoint)
    assert tokenizer is not None
    text = "<start_of_turn>ab ab   ab\n\n\nc<end_of_turn>"
    ids = tokenizer.encode(text)
    tokens = ["<bos>", "<start_of_turn>", "ab", " ab", "   ", "ab", "\n\n", "\n", "c", "<end_of_turn>"]
    assert [tokenizer.token(id) for id in ids] == tokens
    assert tokenizer.decode(ids, skip_special_tokens=False) == "<bos>" + text
    assert tokenizer.decode(ids) == "ab ab   ab\n\n\nc"


# A real file


def test_a_real_model() -> None:
    path = real_file("OUTRIDER_TEST_GEMMA3_GGUF", "Gemma 3")
    checkpoint = open_checkpoint(path)
    config = checkpoint.config
    assert config["architectures"] == ["Gemma3ForCausalLM"]
    assert len(checkpoint.names()) == 2 + 13 * config["num_hidden_layers"]
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    reference = model.state_dict()
    assert all(torch.equal(checkpoint.tensor(name), reference[name]) for name in checkpoint.names())
    ours, theirs = transformers.Gemma3TextConfig(**config).to_dict(), model.config.to_dict()
    same = ["rope_parameters", "layer_types", "sliding_window", "query_pre_attn_scalar", "hidden_activation"]
    assert {key: ours[key] for key in same} == {key: theirs[key] for key in same}


def test_a_real_tokenizer() -> None:
    tokenizer = load_tokenizer(open_checkpoint(real_file("OUTRIDER_TEST_GEMMA3_GGUF", "Gemma 3")))
    assert tokenizer is not None
    # What sentencepiece itself makes of this text.
    text = "<start_of_turn>user\nWhy is 1729  special?\n\n\n\tnaïve 你好 👍🏽\u0378<end_of_turn>"
    ids = [2364, 107, 11355, 563, 236743, 236770, 236832, 236778, 236819, 138, 18146, 236881, 109, 255968]
    ids += [1789, 238527, 560, 43758, 237389, 103712, 242713, 443, 422]
    assert tokenizer.encode(text) == [2, 105, *ids, 106]
    for sample in [text, "def f(x):\n\n    return 3", " " * 70 + "\n" * 40 + "x", "e\u0301 १२३४ \t\r\n  \0"]:
        ids = tokenizer.encode(sample, add_special_tokens=False)
        assert tokenizer.decode(ids, skip_special_tokens=False) == sample
        detokenizer = Detokenizer(tokenizer, skip_special_tokens=False)
        assert "".join(map(detokenizer.add, ids)) + detokenizer.finish() == sample
