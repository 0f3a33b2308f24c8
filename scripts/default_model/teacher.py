"""The teacher: SmolLM2-135M-Instruct read from a GGUF file, network and tokenizer."""

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from default_model.llama import Llama, LlamaShape

TENSOR_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


@dataclass(frozen=True)
class Teacher:
    """The teacher's network (float32, on the CPU) and its tokenizer."""

    network: Llama
    tokenizer: Tokenizer
    end_of_turn: int


def _shape(reader: gguf.GGUFReader) -> LlamaShape:
    def field(name: str) -> float:
        return reader.fields["llama." + name].contents()

    num_heads = int(field("attention.head_count"))
    return LlamaShape(
        vocab_size=int(field("vocab_size")),
        hidden_size=int(field("embedding_length")),
        intermediate_size=int(field("feed_forward_length")),
        num_hidden_layers=int(field("block_count")),
        num_attention_heads=num_heads,
        num_key_value_heads=int(field("attention.head_count_kv")),
        head_dim=int(field("embedding_length")) // num_heads,
        rope_theta=field("rope.freq_base"),
        rms_norm_eps=field("attention.layer_norm_rms_epsilon"),
        max_position_embeddings=1024,
    )


def _checkpoint_name(name: str) -> str:
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, index, kind, suffix = name.split(".")
    return f"model.layers.{index}.{TENSOR_NAMES[kind]}.{suffix}"


def _restore_rope_order(weight: Tensor, head_dim: int) -> Tensor:
    """GGUF stores q and k with interleaved rotary pairs; Hugging Face keeps the two halves apart."""
    rows, columns = weight.shape
    return weight.view(rows // head_dim, head_dim // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _weights(reader: gguf.GGUFReader, shape: LlamaShape) -> dict[str, Tensor]:
    weights = {}
    for tensor in reader.tensors:
        values = np.array(gguf.quants.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)
        name = _checkpoint_name(tensor.name)
        weights[name] = torch.from_numpy(values)
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weights[name] = _restore_rope_order(weights[name], shape.head_dim)
    return weights


def _tokenizer(reader: gguf.GGUFReader) -> Tokenizer:
    tokens = reader.fields["tokenizer.ggml.tokens"].contents()
    kinds = reader.fields["tokenizer.ggml.token_type"].contents()
    merges = [tuple(merge.split(" ")) for merge in reader.fields["tokenizer.ggml.merges"].contents()]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    digits = pre_tokenizers.Digits(individual_digits=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == gguf.TokenType.CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in control])
    return tokenizer


def load_teacher(path: Path) -> Teacher:
    """Read a Llama-architecture GGUF file."""
    reader = gguf.GGUFReader(path)
    shape = _shape(reader)
    network = Llama(shape)
    network.load_state_dict(_weights(reader, shape), strict=True)
    end_of_turn = int(reader.fields["tokenizer.ggml.eos_token_id"].contents())
    return Teacher(network.eval(), _tokenizer(reader), end_of_turn)
