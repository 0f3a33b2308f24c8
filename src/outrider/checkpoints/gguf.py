"""A GGUF file, shown as a Hugging Face checkpoint: config, tensor names, weights."""

import math
import mmap
import re
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from outrider.checkpoints.config_check import checked_config
from outrider.checkpoints.gguf_architectures import ARCHITECTURES, MODEL_NAMES
from outrider.checkpoints.gguf_file import REQUIRED, HeaderReader, TensorEntry
from outrider.checkpoints.gguf_weights import (
    PLAIN_TYPES,
    check_readable,
    empty_for,
    in_halves,
    read_blocks,
    read_into,
    read_tensor,
    read_tiles,
)
from outrider.host_memory import LARGE_PAGE, Arena
from outrider.kernels.packed import PART_BYTES, TILE_ROWS, Blocks, Tiles

MOST_OF_TILES = 4 * 2**30  # bytes side by side: several machines may share a model that is too large for one


class GgufCheckpoint:
    """A GGUF file behind the interface of a checkpoint."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._arena = Arena()  # of matrices as they are stored
        with self.path.open("rb") as file:
            if self.path.stat().st_size == 0:
                raise ValueError(f"{self.path} is empty; download the file again")
            # a private mapping, as torch wants memory that could be written to; nobody writes
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        self.metadata, entries = HeaderReader(self._memory, self.path).read()
        self._family = self.metadata.get("general.architecture", str)
        if self._family not in ARCHITECTURES:
            known = ", ".join(sorted(ARCHITECTURES))
            raise ValueError(f"{self.path}: GGUF of {self._family!r} cannot be read, only {known}; use safetensors")
        self._architecture = ARCHITECTURES[self._family]
        rope_factors = entries.pop("rope_freqs.weight", None)
        self._entries = {self._translate(name): entry for name, entry in entries.items()}
        check_readable(list(self._entries.values()))
        self.config = checked_config(self._read_config(rope_factors), self.path)
        self.generation_config = self._read_generation_config()

    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def tensor(self, name: str) -> torch.Tensor:
        """A copy of the tensor as the model's own checkpoint has it; quantised ones come in float32."""
        out = empty_for(self._entry(name))
        self.read_into(name, out)
        return out

    def read_into(self, name: str, out: torch.Tensor) -> None:
        """Fills a dense tensor of the same shape, of any device and dtype, without a copy of the whole."""
        entry, num_heads = self._entry(name), self._checked_rope_heads(name)
        assert out.shape == entry.shape, (name, out.shape, entry.shape)
        if len(entry.shape) > 1:
            read_into(self._memory, entry, out, num_heads)
            return
        vector = in_halves(read_tensor(self._memory, entry)[:, None], num_heads)[:, 0]
        if self._architecture.norm_offset and name.endswith("norm.weight"):
            vector = vector - self._architecture.norm_offset  # in the stored precision, before it is rounded
        out.copy_(vector)

    def in_blocks(self, name: str) -> bool:
        """Whether this is a quantised matrix."""
        entry = self._entry(name)
        return len(entry.shape) == 2 and entry.type_name not in PLAIN_TYPES

    def blocks(self, name: str) -> Blocks:
        """A quantised matrix as it is stored, with the rows in the order of the model's own checkpoint."""
        return read_blocks(self._memory, self._entry(name), self._checked_rope_heads(name), self._arena)

    def tiles(self, name: str) -> Tiles:
        """A quantised matrix of the file, laid out for dot products in whole numbers."""
        return read_tiles(self._memory, self._entry(name), self._checked_rope_heads(name), self._arena_of_tiles)

    @cached_property
    def _arena_of_tiles(self) -> Arena:
        """One chunk, if it can be: tiles are for CPUs, where all of them stay for as long as the model does."""
        sizes = (self._held(name, entry, tiled=True) for name, entry in self._entries.items() if self.in_blocks(name))
        return Arena(min(sum(sizes) + LARGE_PAGE, MOST_OF_TILES))  # a few bytes lie between them

    def held_bytes(self, *, tiled: bool) -> int:
        """What the tensors take in memory where quantised matrices stay as they are, or are tiled. Others are
        float32 at most."""
        return sum(self._held(name, entry, tiled) for name, entry in self._entries.items())

    def _held(self, name: str, entry: TensorEntry, tiled: bool) -> int:
        if not self.in_blocks(name):
            return math.prod(entry.shape) * 4
        num_rows, row_len = entry.shape
        in_tiles = -(-num_rows // TILE_ROWS) * Tiles.tile_bytes(entry.type_number, row_len)
        return (in_tiles if tiled else entry.num_bytes) + PART_BYTES

    def close(self) -> None:
        self._memory.close()

    def _entry(self, name: str) -> TensorEntry:
        if name not in self._entries:
            raise ValueError(f"{self.path} has no tensor {name!r}; check that the file is the model you mean")
        return self._entries[name]

    def _translate(self, name: str) -> str:
        """The Hugging Face name of a tensor."""
        stem, _, kind = name.rpartition(".")
        if stem in MODEL_NAMES:
            return f"{MODEL_NAMES[stem]}.{kind}"
        layer = re.fullmatch(r"blk\.([0-9]+)\.(\w+)", stem)
        if layer is None or layer[2] not in self._architecture.layer_names:
            raise ValueError(f"{self.path}: {self._family!r} has no tensor {name!r} here; use safetensors instead")
        return f"model.layers.{layer[1]}.{self._architecture.layer_names[layer[2]]}.{kind}"

    def _checked_rope_heads(self, name: str) -> int:
        num_heads, num_rows = self._num_rope_heads(name), self.shape(name)[0]
        if num_heads and num_rows % (2 * num_heads):
            raise ValueError(f"{self.path}: {num_rows} rows of {name!r} are not {num_heads} heads; convert it again")
        return num_heads

    def _num_rope_heads(self, name: str) -> int:
        """The number of heads whose rows were permuted in this tensor, 0 where none were."""
        if not self._architecture.interleaved_rope:
            return 0
        if ".q_proj." in name:
            return self.config["num_attention_heads"]
        return self.config["num_key_value_heads"] if ".k_proj." in name else 0

    def _setting(self, key: str, kind: type, default: Any = REQUIRED) -> Any:
        return self.metadata.get(f"{self._family}.{key}", kind, default)

    def _read_config(self, rope_factors: TensorEntry | None) -> dict[str, Any]:
        hidden_size = self._setting("embedding_length", int)
        num_heads = self._setting("attention.head_count", int)
        head_dim = self._setting("attention.key_length", int, hidden_size // max(num_heads, 1))
        rotary_dim = self._setting("rope.dimension_count", int, head_dim)
        if min(num_heads, head_dim) < 1 or rotary_dim != head_dim:
            heads = f"{num_heads} heads of {head_dim} with {rotary_dim} rotated"
            raise ValueError(f"{self.path}: {heads} cannot be read from GGUF; use safetensors instead")
        config = {
            "architectures": [self._architecture.class_name],
            "model_type": self._architecture.model_type,
            "hidden_size": hidden_size,
            "intermediate_size": self._setting("feed_forward_length", int),
            "num_hidden_layers": self._setting("block_count", int),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._setting("attention.head_count_kv", int, num_heads),
            "head_dim": head_dim,
            "max_position_embeddings": self._setting("context_length", int),
            "rms_norm_eps": self._setting("attention.layer_norm_rms_epsilon", float),
            "rope_theta": self._setting("rope.freq_base", float, self._architecture.rope_theta),
            "rope_scaling": self._read_rope_scaling(rope_factors),
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self._entries,
            "mlp_bias": "model.layers.0.mlp.up_proj.bias" in self._entries,
            "tie_word_embeddings": "lm_head.weight" not in self._entries,
            "vocab_size": self.shape("model.embed_tokens.weight")[0],
            "bos_token_id": self.metadata.get("tokenizer.ggml.bos_token_id", int, None),
            "eos_token_id": self.metadata.get("tokenizer.ggml.eos_token_id", int, None),
        }
        return config | self._architecture.read_settings(self.metadata, config)

    def _read_rope_scaling(self, factors: TensorEntry | None) -> dict[str, Any] | None:
        if factors is not None:  # Llama 3: each of rope's frequencies is divided by its factor
            return {"rope_type": "llama3_factors", "factors": read_tensor(self._memory, factors).float().tolist()}
        kind = self._setting("rope.scaling.type", str, "none")
        if kind == "none":
            return None
        factor = self._setting("rope.scaling.factor", float)
        if kind == "linear":
            return {"rope_type": "linear", "factor": factor}
        if kind != "yarn" or factor <= 0:
            raise ValueError(
                f"{self.path}: rope scaling {kind!r} by {factor} cannot be read from GGUF; use safetensors"
            )
        attention = self._setting("rope.scaling.attn_factor", float, 1.0)
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": self._setting("rope.scaling.original_context_length", int),
            "attention_factor": attention * (1.0 + 0.1 * math.log(max(factor, 1.0))),
            "beta_fast": self._setting("rope.scaling.yarn_beta_fast", float, 32.0),
            "beta_slow": self._setting("rope.scaling.yarn_beta_slow", float, 1.0),
        }

    def _read_generation_config(self) -> dict[str, Any]:
        keys = [f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom")]
        ends = [self.metadata.get(key, int) for key in keys if key in self.metadata.values]
        tokens = self.metadata.get("tokenizer.ggml.tokens", list, [])
        if self._architecture.turn_end in tokens:
            ends.append(tokens.index(self._architecture.turn_end))
        return {"eos_token_id": list(dict.fromkeys(ends))} if ends else {}
