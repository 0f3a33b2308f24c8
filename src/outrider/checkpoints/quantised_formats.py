"""The formats of quantised checkpoints, one class each: fp8, compressed-tensors, gptq, awq, mxfp4.
A format says which stored tensors are parts of a weight, and puts them together; N rows, K columns, E experts."""

# Device and dtype are named throughout, because models are built while torch has other defaults.

import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from outrider.checkpoints.quantised_weight import (
    FLOAT8_TYPES,
    PER_ROW,
    PER_TENSOR,
    Blocks,
    Settings,
    Shape,
    Size,
    Stored,
    num_words,
    unpack,
)
from outrider.kernels.quantised import Kind, Quantised, is_packable, joined, pack_numbers

Suffixes = Mapping[str, tuple[str, str]]
# Stored beside the weight of a layer for its activations, which we leave as they are.
ACTIVATION_SUFFIXES = {
    f".{kind}_{part}": (".weight", f"{kind}_{part}")
    for kind in ("input", "output", "activation")
    for part in ("scale", "zero_point", "global_scale")
}
FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


class Format(ABC):
    """How the weights of a checkpoint are stored."""

    suffixes: ClassVar[Suffixes]  # end of a stored name -> end of the dense name, and the part it plays there
    needed: ClassVar[frozenset[str]] = frozenset()  # the parts that packed numbers cannot do without
    made_up_biases: ClassVar[bool] = False  # a layer without a bias may have been given one of zeros
    bytes_per_number: ClassVar[float] = 1.125  # that a CPU keeps, at most: 8 bits, and a scale for 32 of them

    @abstractmethod
    def __init__(self, settings: Settings) -> None: ...

    @abstractmethod
    def shape(self, stored: Stored) -> Shape: ...

    @abstractmethod
    def blocks(self, stored: Stored) -> Blocks:
        """Of a matrix, or of several."""

    def dense(self, stored: Stored) -> Tensor:
        return self.blocks(stored).dense()

    def quantised(self, stored: Stored) -> Quantised | None:
        """A matrix, or several one below the other, as kernels compute with them; None where they know no such form."""
        return self.blocks(stored).quantised()


class Fp8(Format):
    """Eight-bit floats with a scale for each block, each row or all of it; [N, K], or experts stacked, [E, N, K]."""

    suffixes: ClassVar = {
        "_scale_inv": ("", "scale"),  # of X.weight, and of stacked experts that are called X alone
        ".weight_scale": (".weight", "scale"),
        "_activation_scale": ("", "activation_scale"),
        **ACTIVATION_SUFFIXES,
    }

    def __init__(self, settings: Settings) -> None:
        self._sizes: list[Size] = [PER_ROW, PER_TENSOR]
        if settings.values.get("weight_block_size", []) is not None:  # null: no blocks; missing: the usual ones
            self._sizes.insert(0, settings.block_size("weight_block_size", [128, 128]))

    def shape(self, stored: Stored) -> Shape:
        return stored.shape("values")

    def blocks(self, stored: Stored) -> Blocks:
        values = stored.tensor("values")
        if values.dtype not in FLOAT8_TYPES or values.ndim < 2:
            raise stored.broken("values", f"is {values.dtype} of shape {tuple(values.shape)}, not a float8 matrix")
        return Blocks(values, *stored.per_block("scale", tuple(values.shape), self._sizes))


@dataclass(frozen=True)
class Scheme:
    """How compressed-tensors stored the weights of some modules."""

    targets: list[str]
    num_bits: int
    kind: str
    size: Size
    symmetric: bool

    @classmethod
    def read(cls, targets: list[str], settings: Settings) -> "Scheme":
        kind = settings.get("type", str, "int")
        if kind not in ("int", "float"):
            raise settings.unsupported("type", kind, "int, float")
        num_bits = settings.get("num_bits", int, 8)
        if num_bits not in ((2, 4, 8) if kind == "int" else (8,)):  # of others there are two ways to pack them
            raise settings.unsupported("num_bits", num_bits, "8, and with type int 2 and 4")
        return cls(targets, num_bits, kind, cls._read_size(settings), settings.get("symmetric", bool, True))

    @staticmethod
    def _read_size(settings: Settings) -> Size:
        implied = {None: "tensor", -1: "channel"}.get(settings.get("group_size", int, None), "group")
        strategy = settings.get("strategy", str, implied)
        if strategy == "group":
            return settings.group_size(default=0)
        if strategy == "block":
            return settings.block_size("block_structure", [])
        if strategy not in ("tensor", "channel"):
            raise settings.unsupported("strategy", strategy, "tensor, channel, group, block")
        return PER_TENSOR if strategy == "tensor" else PER_ROW

    def names(self, module: str) -> bool:
        return module in self.targets

    def describes(self, module: str) -> bool:
        return any(re.match(target[3:], module) for target in self.targets if target.startswith("re:"))

    def names_class(self, module: str) -> bool:
        return any(target.isidentifier() for target in self.targets)  # of no known module, so it may be this one


class CompressedTensors(Format):
    """Floats or integers of eight bits as they are, or integers packed into words along the columns."""

    suffixes: ClassVar = {
        ".weight_packed": (".weight", "packed"),
        ".weight_scale": (".weight", "scale"),
        ".weight_shape": (".weight", "shape"),
        ".weight_zero_point": (".weight", "zero"),
        ".weight_g_idx": (".weight", "groups"),
        **ACTIVATION_SUFFIXES,
    }
    needed = frozenset({"scale", "shape"})
    LAYOUTS = ("float-quantized", "int-quantized", "naive-quantized", "pack-quantized")

    def __init__(self, settings: Settings) -> None:
        sparsity = settings.within("sparsity_config")
        if sparsity.get("format", str, "dense") != "dense":
            raise sparsity.unsupported("format", sparsity.values["format"], "dense")
        transforms = settings.within("transform_config").get("config_groups", dict, {})
        if transforms:  # the layers' inputs would have to be transformed as well
            raise settings.unsupported("transform_config", list(transforms), "none")
        layout = settings.get("format", str, "missing")
        self._schemes: list[Scheme] = []
        for name in settings.get("config_groups", dict, {}):
            self._read_group(settings.within("config_groups").within(name), layout)

    def shape(self, stored: Stored) -> Shape:
        return tuple(stored.tensor("shape").tolist()) if "packed" in stored.parts else stored.shape("values")

    def blocks(self, stored: Stored) -> Blocks:
        scheme, shape = self._scheme_of(stored), self.shape(stored)
        if len(shape) < 2:
            raise stored.broken("scale", f"belongs to a weight of shape {shape}, which is no matrix")
        if not scheme.symmetric and "zero" not in stored.parts:
            raise stored.broken("scale", f"comes without {stored.name}_zero_point")
        scale, size = stored.per_block("scale", shape, [scheme.size])
        if "packed" in stored.parts:
            words = (*shape[:-1], num_words(shape[-1], scheme.num_bits))
            values = unpack(stored.sized("packed", words, torch.int32), -1, shape[-1], scheme.num_bits)
        else:
            values = stored.sized("values", shape, torch.int8 if scheme.kind == "int" else torch.float8_e4m3fn)
        zero, groups = self._zero(stored, scheme, tuple(scale.shape)), None
        if "groups" in stored.parts and not (stored.tensor("groups") == -1).all():  # -1: the columns are in order
            groups = stored.groups("groups", shape[-1], scale.shape[-1])
        return Blocks(values, scale, size, zero, groups, scheme.num_bits)

    def _zero(self, stored: Stored, scheme: Scheme, grid: Shape) -> Tensor | None:
        """Zero points, one a block. Numbers are packed without sign, moved up by half their range, and so are these."""
        middle = 1 << (scheme.num_bits - 1) if "packed" in stored.parts else 0
        if "zero" not in stored.parts:
            return torch.full(grid, middle, device=stored.device) if middle else None
        if middle and stored.tensor("zero").dtype == torch.int32:  # packed as well, along the rows
            words = (*grid[:-2], num_words(grid[-2], scheme.num_bits), grid[-1])
            return unpack(stored.sized("zero", words), -2, grid[-2], scheme.num_bits)
        return stored.per_block("zero", self.shape(stored), [scheme.size])[0].float() + middle

    def _read_group(self, settings: Settings, layout: str) -> None:
        if settings.get("weights", dict, None) is None:  # about activations only
            return
        layout = settings.get("format", str, layout)
        if layout not in self.LAYOUTS:
            raise settings.unsupported("format", layout, ", ".join(self.LAYOUTS))
        self._schemes.append(Scheme.read(settings.get("targets", list, []), settings.within("weights")))

    def _scheme_of(self, stored: Stored) -> Scheme:
        """A module's own name says more than a pattern, and that says more than the name of a class."""
        found, module = self._schemes, stored.name.removesuffix(".weight")
        if len(found) > 1:
            ways = (Scheme.names, Scheme.describes, Scheme.names_class)
            fitting = ([scheme for scheme in self._schemes if way(scheme, module)] for way in ways)
            found = next((schemes for schemes in fitting if schemes), [])
        if len(found) != 1:
            raise stored.broken("scale", f"belongs to {len(found)} config_groups of quantization_config, not to one")
        return found[0]


class Gptq(Format):
    """Integers packed into words along the columns of the weight, which lies transposed; zero points along its rows."""

    suffixes: ClassVar = {
        ".qweight": (".weight", "packed"),
        ".scales": (".weight", "scale"),
        ".qzeros": (".weight", "zero"),
        ".g_idx": (".weight", "groups"),
    }
    needed = frozenset({"scale", "zero"})
    made_up_biases = True

    def __init__(self, settings: Settings) -> None:
        self._num_bits = settings.get("bits", int, 0)
        if self._num_bits not in (2, 4, 8):
            raise settings.unsupported("bits", self._num_bits, "2, 4, 8")
        version = settings.get("checkpoint_format", str, None) or settings.get("format", str, "gptq")
        if version not in ("gptq", "gptq_v2") or settings.get("is_marlin_format", bool, False):
            raise settings.unsupported("checkpoint_format", version, "gptq, gptq_v2 (and not is_marlin_format)")
        changed = [pattern for pattern in settings.get("dynamic", dict, {}) if not pattern.startswith("-:")]
        if changed:
            raise settings.unsupported("dynamic", changed, 'patterns that begin with "-:"')
        # The first version stores zero points less one. One was taken off all numbers of a word at once, with a borrow
        # where a number was 0 already, so it is added likewise.
        self._ones = sum(1 << place for place in range(0, 32, self._num_bits)) if version == "gptq" else 0
        self._size = settings.group_size(default=128)
        self._reordered = settings.get("desc_act", bool, False)

    def shape(self, stored: Stored) -> Shape:
        num_columns, num_rows = stored.shape("packed", 2)
        if "groups" in stored.parts:
            return (num_rows, *stored.shape("groups", 1))
        return (num_rows, num_columns * 32 // self._num_bits)

    def blocks(self, stored: Stored) -> Blocks:
        num_rows, num_columns = self.shape(stored)
        group_size = self._size[1] or num_columns
        num_groups = math.ceil(num_columns / group_size)
        packed = stored.sized("packed", (num_words(num_columns, self._num_bits), num_rows), torch.int32)
        zeros = stored.sized("zero", (num_groups, num_words(num_rows, self._num_bits)), torch.int32)
        blocks = Blocks(
            unpack(packed, 0, num_columns, self._num_bits).T,
            stored.sized("scale", (num_groups, num_rows)).T,
            (1, group_size),
            unpack(zeros + self._ones, 1, num_rows, self._num_bits).T,
            num_bits=self._num_bits,
        )
        in_order = torch.arange(num_columns, device=stored.device) // group_size
        groups = stored.groups("groups", num_columns, num_groups) if "groups" in stored.parts else in_order
        if "groups" not in stored.parts and self._reordered:
            raise stored.broken("packed", f"comes without {stored.name.removesuffix('.weight')}.g_idx (desc_act is on)")
        if torch.equal(groups, in_order):
            return blocks
        if not self._reordered:
            raise stored.broken("groups", "changes the order of the columns, though desc_act is off")
        return replace(blocks, groups=groups)


class Awq(Format):
    """Four-bit integers packed into words along the rows of the weight, which lies transposed; in an odd order."""

    suffixes: ClassVar = {
        ".qweight": (".weight", "packed"),
        ".scales": (".weight", "scale"),
        ".qzeros": (".weight", "zero"),
    }
    needed = frozenset({"scale", "zero"})
    SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)  # where in a word each of its eight numbers lies

    def __init__(self, settings: Settings) -> None:
        bits = settings.get("bits", int, settings.get("w_bit", int, 4))
        if bits != 4:
            raise settings.unsupported("bits", bits, "4")
        for key in ("version", "format", "checkpoint_format"):
            layout = settings.get(key, str, "gemm")
            if layout.lower() != "gemm":
                raise settings.unsupported(key, layout, "gemm")
        if settings.get("backend", str, "auto") == "llm-awq":
            raise settings.unsupported("backend", "llm-awq", "autoawq")
        self._size = settings.group_size(default=settings.get("q_group_size", int, 128))

    def shape(self, stored: Stored) -> Shape:
        num_columns, words = stored.shape("packed", 2)
        return (words * 8, num_columns)

    def blocks(self, stored: Stored) -> Blocks:
        num_rows, num_columns = self.shape(stored)
        group_size = self._size[1] or num_columns
        num_groups = math.ceil(num_columns / group_size)
        packed = stored.sized("packed", (num_columns, num_rows // 8), torch.int32)
        zeros = stored.sized("zero", (num_groups, num_rows // 8), torch.int32)
        return Blocks(
            unpack(packed, 1, num_rows, 4, self.SHIFTS).T,
            stored.sized("scale", (num_groups, num_rows)).T,
            (1, group_size),
            unpack(zeros, 1, num_rows, 4, self.SHIFTS).T,
            num_bits=4,
        )


class Mxfp4(Format):
    """Experts as four-bit floats, two a byte, in blocks of 32 along the columns, whose scales are powers of two."""

    bytes_per_number: ClassVar = 2.0
    suffixes: ClassVar = {"_blocks": ("", "packed"), "_scales": ("", "scale")}
    needed = frozenset({"scale"})

    def __init__(self, settings: Settings) -> None:
        pairs = [[FP4_VALUES[byte & 15], FP4_VALUES[byte >> 4]] for byte in range(256)]
        self._pairs = torch.tensor(pairs, dtype=torch.float32, device="cpu")

    def shape(self, stored: Stored) -> Shape:
        """Dense experts have their inputs first, [E, K, N]."""
        num_experts, num_rows, num_blocks, _ = stored.shape("packed", 4)
        return (num_experts, num_blocks * 32, num_rows)

    def blocks(self, stored: Stored) -> Blocks:
        grid, packed = self._packed(stored)
        values = functional.embedding(packed.int(), self._pairs).flatten(-2)
        return Blocks(values, stored.sized("scale", grid, torch.uint8), (1, 32))

    def dense(self, stored: Stored) -> Tensor:
        grid, packed = self._packed(stored)
        scale = stored.sized("scale", grid, torch.uint8)
        dense = torch.empty(*grid[:2], 32 * grid[2], dtype=torch.float32, device="cpu")
        for expert in range(len(dense)):  # one by one, for unpacking takes several times the memory
            values = functional.embedding(packed[expert].int(), self._pairs).flatten(1)
            dense[expert] = Blocks(values, scale[expert], (1, 32)).dense()
        return dense.mT

    def quantised(self, stored: Stored) -> Quantised | None:
        """Rows as they are stored: outputs, one expert below the other."""
        grid, packed = self._packed(stored)
        scale = stored.sized("scale", grid, torch.uint8)
        if not is_packable(32 * grid[2], 32, Kind.FP4):
            return None
        numbers = (
            torch.stack([each & 15, each >> 4], -1).flatten(1) for each in packed
        )  # two a byte, the low one first
        return joined([pack_numbers(Kind.FP4, *each) for each in zip(numbers, scale, strict=True)])

    def _packed(self, stored: Stored) -> tuple[Shape, Tensor]:
        num_experts, num_columns, num_rows = self.shape(stored)
        grid = (num_experts, num_rows, num_columns // 32)
        return grid, stored.sized("packed", (*grid, 16), torch.uint8)


FORMATS: dict[str, type[Format]] = {
    "fp8": Fp8,
    "compressed-tensors": CompressedTensors,
    "gptq": Gptq,
    "awq": Awq,
    "mxfp4": Mxfp4,
}
