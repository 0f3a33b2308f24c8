"""GGUF files, read strictly and shown as a Hugging Face checkpoint: config, tensor names, weights.
The container is read and checked here; the `gguf` package is only asked to expand quantised blocks."""

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy
import torch

# Type number -> (name, elements per block, bytes per block).
TENSOR_TYPES = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    30: ("BF16", 1, 2),
}
PLAIN_TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
FLOAT32, STRING, ARRAY = 6, 8, 9
MAX_DIMENSIONS = 4
REQUIRED = object()


@dataclass(frozen=True)
class Architecture:
    """What llama.cpp's converter did to one model family; another family is another entry in ARCHITECTURES."""

    model_type: str
    class_name: str
    layer_names: Mapping[str, str]
    interleaved_rope: bool = False  # q and k rows were permuted so that the pairs rope rotates are neighbours
    norm_offset: float = 0.0  # what was added to the weight of every norm
    settings: Mapping[str, Any] = field(default_factory=dict)  # config entries that hold for the whole family


MODEL_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LLAMA_LAYER_NAMES = {
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
QUERY_KEY_NORM_NAMES = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", LLAMA_LAYER_NAMES, interleaved_rope=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", LLAMA_LAYER_NAMES),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", LLAMA_LAYER_NAMES | QUERY_KEY_NORM_NAMES),
}


@dataclass(frozen=True)
class TensorEntry:
    """Where a tensor lies in the file, and how."""

    type_number: int
    shape: tuple[int, ...]  # torch's order, which is the reverse of the file's
    offset: int  # from the start of the file
    num_bytes: int

    @property
    def type_name(self) -> str:
        return TENSOR_TYPES[self.type_number][0]


class Metadata:
    """The file's keys and values; a value that is missing or of another kind is an error that names the key."""

    def __init__(self, values: dict[str, Any], path: Path) -> None:
        self.values = values
        self.path = path

    def get(self, key: str, kind: type, default: Any = REQUIRED) -> Any:
        value = self.values.get(key, default)
        if value is REQUIRED:
            raise ValueError(f"{self.path} lacks the key {key!r}; convert the model to GGUF again")
        if kind is float and type(value) is int:
            value = float(value)
        if key in self.values and type(value) is not kind:
            found = type(value).__name__
            raise ValueError(f"{self.path}: {key!r} is a {found}, not a {kind.__name__}; convert the model again")
        return value


class GgufCheckpoint:
    """A GGUF file behind the interface of a checkpoint."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        with self.path.open("rb") as file:
            if self.path.stat().st_size == 0:
                raise ValueError(f"{self.path} is empty; download the file again")
            self._memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self.metadata, entries = _HeaderReader(self._memory, self.path).read()
        self._family = self.metadata.get("general.architecture", str)
        if self._family not in ARCHITECTURES:
            known = ", ".join(sorted(ARCHITECTURES))
            raise ValueError(f"{self.path}: GGUF of {self._family!r} cannot be read, only {known}; use safetensors")
        self._architecture = ARCHITECTURES[self._family]
        rope_factors = entries.pop("rope_freqs.weight", None)
        self._entries = {self._translate(name): entry for name, entry in entries.items()}
        if any(entry.type_name not in PLAIN_TYPES for entry in self._entries.values()):
            _import_gguf()  # now, rather than halfway through the weights
        self.config = self._read_config(rope_factors)
        self.generation_config = self._read_generation_config()

    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        if name not in self._entries:
            raise ValueError(f"{self.path} has no tensor {name!r}; check that the file is the model you mean")
        return self._entries[name].shape

    def tensor(self, name: str) -> torch.Tensor:
        """A copy of the tensor: plain types as stored, quantised ones in float32."""
        shape = self.shape(name)
        tensor = self._read(self._entries[name])
        num_heads = self._num_rope_heads(name)
        if num_heads:
            if shape[0] % (2 * num_heads):
                raise ValueError(
                    f"{self.path}: {shape[0]} rows of {name!r} are not {num_heads} heads; convert it again"
                )
            pairs = tensor.view(num_heads, shape[0] // num_heads // 2, 2, *shape[1:])
            tensor = pairs.transpose(1, 2).reshape(shape)
        if self._architecture.norm_offset and name.endswith("norm.weight"):
            tensor = tensor - self._architecture.norm_offset
        return tensor

    def close(self) -> None:
        self._memory.close()

    def _read(self, entry: TensorEntry) -> torch.Tensor:
        raw = numpy.frombuffer(self._memory, numpy.uint8, entry.num_bytes, entry.offset)
        if entry.type_name in PLAIN_TYPES:
            return torch.from_numpy(raw.copy()).view(PLAIN_TYPES[entry.type_name]).view(entry.shape)
        return torch.from_numpy(_dequantise(raw, entry)).view(entry.shape)

    def _translate(self, name: str) -> str:
        """The Hugging Face name of a tensor."""
        stem, _, kind = name.rpartition(".")
        if stem in MODEL_NAMES:
            return f"{MODEL_NAMES[stem]}.{kind}"
        layer = re.fullmatch(r"blk\.([0-9]+)\.(\w+)", stem)
        if layer is None or layer[2] not in self._architecture.layer_names:
            raise ValueError(f"{self.path}: {self._family!r} has no tensor {name!r} here; use safetensors instead")
        return f"model.layers.{layer[1]}.{self._architecture.layer_names[layer[2]]}.{kind}"

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
        return {
            "architectures": [self._architecture.class_name],
            "model_type": self._architecture.model_type,
            "hidden_size": hidden_size,
            "intermediate_size": self._setting("feed_forward_length", int),
            "num_hidden_layers": self._setting("block_count", int),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._setting("attention.head_count_kv", int, num_heads),
            "head_dim": head_dim,
            "hidden_act": "silu",
            "max_position_embeddings": self._setting("context_length", int),
            "rms_norm_eps": self._setting("attention.layer_norm_rms_epsilon", float),
            "rope_theta": self._setting("rope.freq_base", float, 10000.0),
            "rope_scaling": self._read_rope_scaling(rope_factors),
            "attention_bias": "model.layers.0.self_attn.q_proj.bias" in self._entries,
            "mlp_bias": "model.layers.0.mlp.up_proj.bias" in self._entries,
            "tie_word_embeddings": "lm_head.weight" not in self._entries,
            "vocab_size": self.shape("model.embed_tokens.weight")[0],
            "bos_token_id": self.metadata.get("tokenizer.ggml.bos_token_id", int, None),
            "eos_token_id": self.metadata.get("tokenizer.ggml.eos_token_id", int, None),
            **self._architecture.settings,
        }

    def _read_rope_scaling(self, factors: TensorEntry | None) -> dict[str, Any] | None:
        if factors is not None:  # Llama 3: each of rope's frequencies is divided by its factor
            return {"rope_type": "llama3_factors", "factors": self._read(factors).float().tolist()}
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
        return {"eos_token_id": list(dict.fromkeys(ends))} if ends else {}


class _HeaderReader:
    """Reads everything before the weights, and checks that the weights it announces are there."""

    def __init__(self, memory: mmap.mmap, path: Path) -> None:
        self._memory = memory
        self._path = path
        self._position = 0

    def read(self) -> tuple[Metadata, dict[str, TensorEntry]]:
        if self._take(4) != b"GGUF":
            raise ValueError(f"{self._path} is not a GGUF file; give one, or a directory of safetensors")
        version = self._number("I")
        if version not in (2, 3):
            raise ValueError(f"{self._path} is GGUF version {version} (or big-endian); convert the model to version 3")
        num_tensors, num_values = self._number("Q"), self._number("Q")
        values: dict[str, Any] = {}
        for _ in range(num_values):
            key = self._string()
            if key in values:
                raise self._broken(f"the key {key!r} occurs twice")
            values[key] = self._value(self._number("I"))
        metadata = Metadata(values, self._path)
        if metadata.get("split.count", int, 1) > 1:
            raise ValueError(f"{self._path} is one part of a split model; join the parts with gguf-split --merge")
        return metadata, self._tensors(num_tensors, metadata.get("general.alignment", int, 32))

    def _tensors(self, num_tensors: int, alignment: int) -> dict[str, TensorEntry]:
        if alignment < 1 or alignment & (alignment - 1):
            raise self._broken(f"the alignment {alignment} is not a power of two")
        listed = [self._tensor_info() for _ in range(num_tensors)]
        data_start = -(-self._position // alignment) * alignment
        entries: dict[str, TensorEntry] = {}
        for name, type_number, shape, offset in listed:
            if name in entries:
                raise self._broken(f"the tensor {name!r} occurs twice")
            if offset % alignment:
                raise self._broken(f"the tensor {name!r} does not lie on a multiple of {alignment} bytes")
            _, block_len, block_bytes = TENSOR_TYPES[type_number]
            num_bytes = math.prod(shape) // block_len * block_bytes
            if data_start + offset + num_bytes > len(self._memory):
                raise self._broken(f"the tensor {name!r} ends beyond the end of the file")
            entries[name] = TensorEntry(type_number, shape, data_start + offset, num_bytes)
        return entries

    def _tensor_info(self) -> tuple[str, int, tuple[int, ...], int]:
        name = self._string()
        num_dimensions = self._number("I")
        if not 1 <= num_dimensions <= MAX_DIMENSIONS:
            raise self._broken(f"the tensor {name!r} has {num_dimensions} dimensions")
        shape = tuple(self._number("Q") for _ in range(num_dimensions))[::-1]
        type_number, offset = self._number("I"), self._number("Q")
        if type_number not in TENSOR_TYPES:
            known = ", ".join(type_name for type_name, _, _ in TENSOR_TYPES.values())
            raise ValueError(f"{self._path}: {name!r} has type {type_number}; only {known} are read: quantise it so")
        block_len = TENSOR_TYPES[type_number][1]
        if 0 in shape or shape[-1] % block_len:
            raise self._broken(f"the tensor {name!r} of shape {shape} is not made of blocks of {block_len}")
        return name, type_number, shape, offset

    def _value(self, type_number: int) -> Any:
        if type_number == STRING:
            return self._string()
        if type_number == ARRAY:
            return self._array(self._number("I"), self._number("Q"))
        number = self._number(self._scalar_format(type_number))
        # The decimal that config.json held: 1e-05, and not what is left of it after a float32.
        return float(str(numpy.float32(number))) if type_number == FLOAT32 else number

    def _array(self, type_number: int, length: int) -> list[Any]:
        if length > len(self._memory):  # every element takes at least a byte
            raise self._broken("a list is longer than the file")
        if type_number == STRING:
            return [self._string() for _ in range(length)]
        layout = struct.Struct(f"<{length}{self._scalar_format(type_number)}")
        return list(layout.unpack(self._take(layout.size)))

    def _scalar_format(self, type_number: int) -> str:
        if type_number not in SCALAR_FORMATS:
            raise self._broken(f"a value has the unknown type {type_number}")
        return SCALAR_FORMATS[type_number]

    def _number(self, scalar_format: str) -> Any:
        return struct.unpack(f"<{scalar_format}", self._take(struct.calcsize(f"<{scalar_format}")))[0]

    def _string(self) -> str:
        content = self._take(self._number("Q"))
        try:
            return content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise self._broken(f"a text is not UTF-8 ({error})") from error

    def _take(self, num_bytes: int) -> bytes:
        end = self._position + num_bytes
        if end > len(self._memory):
            raise self._broken("it ends in the middle of its header")
        content = self._memory[self._position : end]
        self._position = end
        return content

    def _broken(self, reason: str) -> ValueError:
        return ValueError(f"{self._path} is truncated or damaged: {reason}; download or convert it again")


def _import_gguf() -> ModuleType:
    try:
        import gguf
    except ImportError as error:
        raise ValueError("quantised GGUF files need the gguf package: pip install gguf") from error
    return gguf


def _dequantise(raw: numpy.ndarray, entry: TensorEntry) -> numpy.ndarray:
    gguf = _import_gguf()
    _, block_len, block_bytes = TENSOR_TYPES[entry.type_number]
    rows = raw.reshape(-1, entry.shape[-1] // block_len * block_bytes)
    return gguf.quants.dequantize(rows, gguf.GGMLQuantizationType(entry.type_number))
