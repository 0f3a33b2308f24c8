"""A decoder block as one native call: the same kernels and the same bits as step by step, less time in Python."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels import native
from outrider.kernels.packed import Packed
from outrider.types import Batch

# block_layer and block_call of block.c: eight bytes a field
_LAYER = struct.Struct("@16q 7q 5q 4d 6q 6q")
_CALL = struct.Struct("@11q 6q")
MATRICES = ("qkv", "output", "gate_up", "down")
VECTORS = ("qkv_bias", "q_norm", "k_norm", "output_bias", "mlp_norm", "gate_up_bias", "down_bias")


@dataclass(frozen=True)
class BlockShape:
    num_heads: int
    window: int
    eps: float
    head_eps: float
    scale: float


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
        self.hidden_size = output.shape[0]
        intermediate_size = gate_up.shape[0] // 2
        attention_width = qkv.shape[0] + 2 * output.shape[1]  # qkv, queries, attended values
        self._scratch_width = 3 * self.hidden_size + max(attention_width, 3 * intermediate_size)
        tensors = [vectors[name] for name in VECTORS]
        packed = _LAYER.pack(
            *(field for name in MATRICES for field in native.matrix_fields(*matrices[name])),
            *(0 if tensor is None else native._address(tensor) for tensor in tensors),
            self.hidden_size,
            qkv.shape[1],
            shape.num_heads,
            intermediate_size,
            shape.window,
            shape.eps,
            shape.head_eps,
            shape.scale,
            0.0,
            *native._page_view(pages[0]),
            *native._page_view(pages[1]),
        )
        self._layer = ctypes.create_string_buffer(packed, len(packed))
        self._address = ctypes.addressof(self._layer)

    def __call__(self, residual: Tensor, inputs: Tensor, batch: Batch, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """residual [T, H] and the attention's input [T, in] -> the residual stream after the block [T, H]."""
        num_rows = len(residual)
        residual, inputs = residual.contiguous(), inputs.contiguous()
        out = residual.new_empty(num_rows, self.hidden_size)
        scratch = residual.new_empty(num_rows * self._scratch_width)
        call = _CALL.pack(
            self._address,
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
