"""The GGUF container, read strictly: its metadata, and where each tensor lies."""

import math
import mmap
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy

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
SCALAR_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
FLOAT32, STRING, ARRAY = 6, 8, 9
MAX_DIMENSIONS = 4
REQUIRED = object()


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

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the last dimension."""
        _, block_len, block_bytes = TENSOR_TYPES[self.type_number]
        return self.shape[-1] // block_len * block_bytes


@dataclass(frozen=True)
class Listing:
    """A list in the file, read whenever it is asked for: a vocabulary's texts, kept for as long as the weights are
    read, would leave their memory behind in pieces that nobody can use."""

    read: Callable[[], list[Any]]


class Metadata:
    """The file's keys and values; a value that is missing or of another kind is an error that names the key."""

    def __init__(self, values: dict[str, Any], path: Path) -> None:
        self.values = values
        self.path = path

    def has_list(self, key: str) -> bool:
        return isinstance(self.values.get(key), (list, Listing))

    def get(self, key: str, kind: type, default: Any = REQUIRED) -> Any:
        value = self.values.get(key, default)
        if value is REQUIRED:
            raise ValueError(f"{self.path} lacks the key {key!r}; convert the model to GGUF again")
        if kind is float and type(value) is int:
            value = float(value)
        if isinstance(value, Listing):
            value = value.read()
        if key in self.values and type(value) is not kind:
            found = type(value).__name__
            raise ValueError(f"{self.path}: {key!r} is a {found}, not a {kind.__name__}; convert the model again")
        return value


class HeaderReader:
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

    def _array(self, type_number: int, length: int) -> Listing:
        if length > len(self._memory):  # every element takes at least a byte
            raise self._broken("a list is longer than the file")
        if type_number == STRING:
            return self._strings(length)
        layout = struct.Struct(f"<{length}{self._scalar_format(type_number)}")
        begin = self._position
        self._skip(layout.size)
        return Listing(lambda: list(layout.unpack_from(self._memory, begin)))

    def _strings(self, count: int) -> Listing:
        """As `count` times _string, without the ways between: a vocabulary has hundreds of thousands."""
        memory, size, position = self._memory, len(self._memory), self._position
        read_length = struct.Struct("<Q").unpack_from
        listing = Listing(partial(self._texts, position, count))
        try:
            for _ in range(count):
                position += 8 + read_length(memory, position)[0]
        except (struct.error, OverflowError) as error:
            raise self._broken("it ends in the middle of its header") from error
        if position > size:
            raise self._broken("it ends in the middle of its header")
        self._position = position
        return listing

    def _texts(self, position: int, count: int) -> list[str]:
        memory, read_length, found = self._memory, struct.Struct("<Q").unpack_from, []
        try:
            for _ in range(count):
                end = position + 8 + read_length(memory, position)[0]
                found.append(memory[position + 8 : end].decode("utf-8"))
                position = end
        except UnicodeDecodeError as error:
            raise self._broken(f"a text is not UTF-8 ({error})") from error
        return found

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
        begin = self._position
        self._skip(num_bytes)
        return self._memory[begin : self._position]

    def _skip(self, num_bytes: int) -> None:
        end = self._position + num_bytes
        if end > len(self._memory):
            raise self._broken("it ends in the middle of its header")
        self._position = end

    def _broken(self, reason: str) -> ValueError:
        return ValueError(f"{self._path} is truncated or damaged: {reason}; download or convert it again")
