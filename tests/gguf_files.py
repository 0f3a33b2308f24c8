"""GGUF files for the tests, written with the gguf package from tiny random transformers models."""

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy
import pytest
import torch
from gguf_blocks import random_bytes

LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA3_LAYER_NAMES = LAYER_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}
MODEL_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def minimal_writer(path: Path, family: str = "llama") -> gguf.GGUFWriter:
    """A file with every setting that a model needs, and no tensors yet."""
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(1)
    writer.add_context_length(128)
    writer.add_embedding_length(32)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-5)
    return writer


def add_embedding(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("token_embd.weight", numpy.arange(8 * 32, dtype=numpy.float32).reshape(8, 32))


def finish(writer: gguf.GGUFWriter) -> Path:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return writer.path


def minimal_file(tmp_path: Path) -> Path:
    writer = minimal_writer(tmp_path / "model.gguf")
    add_embedding(writer)
    return finish(writer)


def interleave(weight: numpy.ndarray, num_heads: int) -> numpy.ndarray:
    """llama.cpp's order of q and k rows: the two halves that rope rotates together, row by row."""
    heads = numpy.split(weight, num_heads)
    return numpy.concatenate([numpy.stack(numpy.split(head, 2), axis=1).reshape(head.shape) for head in heads])


def gguf_name(name: str, family: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in MODEL_NAMES:
        return f"{MODEL_NAMES[stem]}.{kind}"
    _, _, layer, rest = stem.split(".", 3)
    layer_names = GEMMA3_LAYER_NAMES if family == "gemma3" else LAYER_NAMES
    return f"blk.{layer}.{layer_names[rest]}.{kind}"


def gguf_array(name: str, tensor: torch.Tensor, model, family: str) -> numpy.ndarray:
    """The tensor as llama.cpp's converter changes it."""
    array = tensor.numpy()
    if family == "llama" and "q_proj" in name:
        return interleave(array, model.config.num_attention_heads)
    if family == "llama" and "k_proj" in name:
        return interleave(array, model.config.num_key_value_heads)
    return array + 1 if family == "gemma3" and name.endswith("norm.weight") else array


def model_writer(path: Path, model, family: str, types: Sequence[str] = ("F32",)) -> gguf.GGUFWriter:
    """A file with the settings that all families have, and with the tensors: matrices in these types by turns."""
    config = model.config
    writer = gguf.GGUFWriter(path, family)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(config.head_dim)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters.get("full_attention", config.rope_parameters)["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    turns = itertools.cycle(types)
    for name, tensor in model.state_dict().items():
        if not (name == "lm_head.weight" and config.tie_word_embeddings):
            array = gguf_array(name, tensor, model, family)
            kind = gguf.GGMLQuantizationType[next(turns) if array.ndim > 1 else "F32"]
            writer.add_tensor(gguf_name(name, family), quantised(array, kind), raw_dtype=kind)
    return writer


def quantised(array: numpy.ndarray, kind: gguf.GGMLQuantizationType) -> numpy.ndarray:
    """The gguf package cannot make nested blocks; numbers were random anyway."""
    if kind.name.endswith("_K"):
        return random_bytes(kind.value, *array.shape, seed=array.size)
    return gguf.quants.quantize(array, kind)


def write_model(path: Path, model, family: str, types: Sequence[str] = ("F32",)) -> Path:
    return finish(model_writer(path, model, family, types))


def tiny_model(family: str, **options: object):
    transformers = pytest.importorskip("transformers")
    config_class, model_class = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "gemma3": (transformers.Gemma3TextConfig, transformers.Gemma3ForCausalLM),
    }[family]
    sizes = {"vocab_size": 48, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 5e5}
    config = config_class(**{**sizes, **heads, "rms_norm_eps": 1e-6, "rope_parameters": rope, **options})
    torch.manual_seed(0)
    model = model_class(config)
    for parameter in model.parameters():  # norms and biases too, which begin as ones and zeros
        # In steps of 1/64, so that adding one to a norm and taking it away again loses nothing.
        parameter.data.normal_().mul_(64).round_().div_(64)
    return model


def real_file(variable: str, model: str) -> Path:
    """The path that an environment variable holds; the test is skipped without it."""
    path = os.environ.get(variable)
    if not path:
        pytest.skip(f"set {variable} to the path of a {model} GGUF to run this")
    return Path(path)
