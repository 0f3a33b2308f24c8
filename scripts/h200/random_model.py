"""A checkpoint with random weights, written in seconds: for servers, which take folders and no shapes.

    PYTHONPATH=src python scripts/h200/random_model.py FOLDER [--shape llama-3.1-8b]

FOLDER/target is a Llama of that shape with a tokenizer of made-up words ("w17" is token 17), FOLDER/eagle3 an EAGLE-3
head for it. Good for timing with a made-up acceptance, and for nothing else: all matrices are cut from one block of
random numbers, since drawing eight billion of them takes longer than whatever is to be timed."""

from __future__ import annotations

import argparse
import json
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from outrider.bench.random_pair import DRAFT_VOCABULARY, shape_of

BLOCK = 2**25 + 8  # numbers; no multiple of a row, so that rows differ
ITEM = {"BF16": 2, "I64": 8}
NUM_THREADS = 8
Shapes = dict[str, tuple[str, tuple[int, ...]]]  # of a name: kind, and shape


def layer(config: dict[str, Any], prefix: str, width: int) -> Shapes:
    """A decoder layer whose attention reads `width` numbers."""
    size, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    keys = config["num_key_value_heads"] * (size // heads)
    shapes = {
        "input_layernorm": (size,),
        "post_attention_layernorm": (size,),
        "self_attn.q_proj": (size, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (size, size),
        "mlp.gate_proj": (inner, size),
        "mlp.up_proj": (inner, size),
        "mlp.down_proj": (size, inner),
    }
    return {f"{prefix}{name}.weight": ("BF16", shape) for name, shape in shapes.items()}


def target_shapes(config: dict[str, Any]) -> Shapes:
    size, vocabulary = config["hidden_size"], config["vocab_size"]
    found: Shapes = dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), ("BF16", (vocabulary, size)))
    found["model.norm.weight"] = ("BF16", (size,))
    for number in range(config["num_hidden_layers"]):
        found |= layer(config, f"model.layers.{number}.", size)
    return found


def head_shapes(config: dict[str, Any], vocabulary: int) -> Shapes:
    size = config["hidden_size"]
    norms: Shapes = dict.fromkeys(("norm.weight", "midlayer.hidden_norm.weight"), ("BF16", (size,)))
    matrices: Shapes = {"fc.weight": ("BF16", (size, 3 * size)), "lm_head.weight": ("BF16", (vocabulary, size))}
    return {**norms, **matrices, **layer(config, "midlayer.", 2 * size), "d2t": ("I64", (vocabulary,))}


def write_weights(path: Path, shapes: Shapes, block: bytes) -> None:
    """A safetensors file: norms are ones, whole numbers zeros, matrices pieces of the block."""
    header, end = {}, 0
    for name, (kind, shape) in shapes.items():
        begin, end = end, end + ITEM[kind] * torch.Size(shape).numel()
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    ones = torch.ones(2**16, dtype=torch.bfloat16).view(torch.int16).numpy().tobytes()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.flush()
        base, number = 8 + len(text), file.fileno()
        os.truncate(number, base + end)  # what is not written is zero

        def write(name: str) -> None:
            kind, shape = shapes[name]
            place, stop = (base + offset for offset in header[name]["data_offsets"])
            while kind == "BF16" and place < stop:
                piece = memoryview(block if len(shape) > 1 else ones)[: stop - place]
                place += os.pwrite(number, piece, place)

        with ThreadPoolExecutor(NUM_THREADS) as pool:
            list(pool.map(write, shapes))


def write_tokenizer(folder: Path, vocabulary: int) -> None:
    words = {("<unk>", "<s>", "</s>")[number] if number < 3 else f"w{number}": number for number in range(vocabulary)}
    model = {"type": "WordLevel", "vocab": words, "unk_token": "<unk>"}
    tokenizer = {"version": "1.0", "added_tokens": [], "pre_tokenizer": {"type": "WhitespaceSplit"}, "model": model}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"unk_token": "<unk>", "eos_token": "</s>"}))


def write_pair(folder: Path, shape: str) -> tuple[Path, Path]:
    """The folders of a target and of a head for it."""
    ends = {"bos_token_id": 1, "eos_token_id": 2, "torch_dtype": "bfloat16", "model_type": "llama"}
    config = {"tie_word_embeddings": False, "hidden_act": "silu", **shape_of(shape), **ends}
    if config["architectures"] != ["LlamaForCausalLM"] or config["tie_word_embeddings"]:
        raise ValueError(f"{shape} is no Llama with a head of its own: only those can be written")
    vocabulary = min(DRAFT_VOCABULARY, config["vocab_size"])
    head = {**config, "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1}
    head["draft_vocab_size"] = vocabulary
    numbers = torch.randn(BLOCK, generator=torch.Generator().manual_seed(0)).mul_(0.02).to(torch.bfloat16)
    block = numbers.view(torch.int16).numpy().tobytes()
    places = folder / "target", folder / "eagle3"
    for place, what, shapes in zip(
        places, (config, head), (target_shapes(config), head_shapes(config, vocabulary)), strict=True
    ):
        place.mkdir(parents=True, exist_ok=True)
        (place / "config.json").write_text(json.dumps(what))
        write_weights(place / "model.safetensors", shapes, block)
    write_tokenizer(places[0], config["vocab_size"])
    return places


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", default="llama-3.1-8b")
    given = parser.parse_args()
    for place in write_pair(given.folder, given.shape):
        print(place)


if __name__ == "__main__":
    main()
