"""A decoder block, or several, as one native call: the same kernels and the same bits as step by step, less time in
Python."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.host_memory import results
from outrider.kernels import native
from outrider.kernels.packed import Packed
from outrider.types import Batch

# block_layer, block_call and stack_call of block.c: eight bytes a field
_LAYER = struct.Struct("@" + native.MATRIX * 4 + f"10q 6q 6d {native.PAGES} {native.PAGES}")
_CALL = struct.Struct("@11q 6q")
_STACK = struct.Struct("@6q 11q 6q")
MATRICES = ("qkv", "output", "gate_up", "down")
VECTORS = ("qkv_bias", "q_norm", "k_norm", "output_bias", "mlp_norm", "gate_up_bias", "down_bias")
NORMS = ("attention_norm", "attended_norm", "fed_norm")  # those that not every block has


@dataclass(frozen=True)
class BlockShape:
    num_heads: int
    window: int
    eps: float
    head_eps: float
    scale: float
    norm_offset: float = 0.0
    head_offset: float = 0.0
    gelu: bool = False


class NativeBlock:
    """A block's addresses, packed once. Holds on to the tensors, so that the addresses stay good."""

    def __init__(
        self,
        shape: BlockShape,
        matrices: Mapping[str, tuple[Tensor, Packed | None]],
        vectors: Mapping[str, Tensor | None],
        pages: tuple[Tensor, Tensor],
    ) -> None:
        self._kept = (matrices, vectors)
        self.pages = pages
        qkv, output, gate_up = (matrices[name][0] for name in ("qkv", "output", "gate_up"))
        self.hidden_size, self.input_size = output.shape[0], qkv.shape[1]
        intermediate_size = gate_up.shape[0] // 2
        attention_width = qkv.shape[0] + 2 * output.shape[1]  # qkv, queries, attended values
        self.scratch_width = 3 * self.hidden_size + max(attention_width, 3 * intermediate_size)
        tensors = [vectors.get(name) for name in (*VECTORS, *NORMS)]
        packed = _LAYER.pack(
            *(field for name in MATRICES for field in native.matrix_fields(*matrices[name])),
            *(0 if tensor is None else native._address(tensor) for tensor in tensors),
            self.hidden_size,
            qkv.shape[1],
            shape.num_heads,
            intermediate_size,
            shape.window,
            shape.gelu,
            shape.eps,
            shape.head_eps,
            shape.scale,
            0.0,
            shape.norm_offset,
            shape.head_offset,
            *native.page_view(pages[0]),
            *native.page_view(pages[1]),
        )
        self._layer = ctypes.create_string_buffer(packed, len(packed))
        self.address = ctypes.addressof(self._layer)

    def __call__(self, residual: Tensor, inputs: Tensor, batch: Batch, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """residual [T, H] and the attention's input [T, in] -> the residual stream after the block [T, H]."""
        num_rows = len(residual)
        residual, inputs = residual.contiguous(), inputs.contiguous()
        out = residual.new_empty(num_rows, self.hidden_size)
        scratch = results.empty(num_rows * self.scratch_width)
        call = _CALL.pack(
            self.address,
            residual.data_ptr(),
            inputs.data_ptr(),
            *_batch_fields(batch, rotary),
            scratch.data_ptr(),
            out.data_ptr(),
            num_rows,
            *batch.page_table.shape,
            rotary[0].shape[1],
            batch.first_key,
            torch.get_num_threads(),
        )
        native._native().block(call)
        return out


class NativeStack:
    """Blocks that follow each other, in one call; each norms its input itself."""

    def __init__(self, blocks: Sequence[NativeBlock], angles_of: Sequence[int], taps: Sequence[int] = ()) -> None:
        """angles_of: which of the rotary tables each one turns by. taps: after how many blocks the stream is wanted."""
        self._blocks, self._taps = blocks, taps
        places = {count: number for number, count in enumerate(taps)}
        after = [places.get(number + 1, -1) for number in range(len(blocks))]
        tables = ([block.address for block in blocks], angles_of, after)
        self._tables = [torch.tensor(table, dtype=torch.int64, device="cpu") for table in tables]
        self.hidden_size = blocks[0].hidden_size
        self.scratch_width = max(block.scratch_width for block in blocks)

    def __call__(
        self, residual: Tensor, batch: Batch, rotaries: Sequence[tuple[Tensor, Tensor]]
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """The residual stream before the first block [T, H] -> after the last one, and its taps."""
        num_rows, residual = len(residual), residual.contiguous()
        out = residual.new_empty(num_rows, self.hidden_size)
        taps = residual.new_empty(len(self._taps), num_rows, self.hidden_size)
        scratch = results.empty(num_rows * self.scratch_width)
        fields = [_batch_fields(batch, rotary) for rotary in rotaries]
        angles = b"".join(
            struct.pack("@3q", *each[:2], rotary[0].shape[1]) for each, rotary in zip(fields, rotaries, strict=True)
        )
        kept = ctypes.create_string_buffer(angles, len(angles))
        addresses, angles_of, tap_after = (table.data_ptr() for table in self._tables)
        work = _STACK.pack(
            addresses,
            angles_of,
            ctypes.addressof(kept),
            tap_after,
            taps.data_ptr(),
            len(self._blocks),
            0,
            residual.data_ptr(),
            0,
            *fields[0],
            scratch.data_ptr(),
            out.data_ptr(),
            num_rows,
            *batch.page_table.shape,
            0,
            batch.first_key,
            torch.get_num_threads(),
        )
        native._native().stack(work)
        return out, taps.unbind()


def _batch_fields(batch: Batch, rotary: tuple[Tensor, Tensor]) -> tuple[int, ...]:
    """Addresses of what all layers share in a pass, checked once."""
    key = ("native", id(rotary[0]))
    if key not in batch.memo:
        cos, sin = rotary
        addresses = (
            native._address(cos),
            native._address(sin),
            native._address(batch.write_locations, torch.int64),
            native._address(batch.indices, torch.int64),
            native._address(batch.page_table, torch.int32),
            native._address(batch.query_start, torch.int32),
        )
        batch.memo[key] = addresses
    return batch.memo[key]
