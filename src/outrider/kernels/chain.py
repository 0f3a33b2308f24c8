"""A head that feeds its own state back, token after token, as one native call: the same kernels and the same bits as
step by step, without the time that a dozen small operations a token take in Python."""

from __future__ import annotations

import struct
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.kernels import native
from outrider.kernels.block import NativeBlock
from outrider.kernels.native_sampling import NO_DRAW, Drawing
from outrider.kernels.packed import Packed
from outrider.types import Batch

_CHAIN = struct.Struct(f"@3q {native.MATRIX} {native.MATRIX} 4q 5q d 11q 6q 10q 3q 2d")  # chain_call of chain.c


@dataclass(frozen=True)
class ChainParts:
    """What a head of one layer is made of."""

    embedding: tuple[Tensor, Packed | None]  # [V, H]
    embedding_norm: Tensor
    state_norm: Tensor
    final_norm: Tensor
    eps: float
    head: tuple[Tensor, Packed | None]  # [V_draft, H]
    ids: Tensor | None  # [V_draft] the target's ids; None: the same
    residual_is_normed: bool
    head_reads_normed: bool
    feeds_normed: bool


class NativeChain:
    def __init__(self, block: NativeBlock, parts: ChainParts) -> None:
        self.block, self.parts = block, parts

    def __call__(
        self, tokens: Tensor, state: Tensor, ahead: Batch, rotary: tuple[Tensor, Tensor], drawing: Drawing | None = None
    ) -> None:
        """tokens [depth, B], of which the first row is known: the others are written. state [B, H] belongs to the row
        before them. `ahead`: the rows [depth - 1, B] that follow it, as flat as `rotary` is. `drawing`: of all places
        [depth, B]; None: tokens are the best."""
        parts, block = self.parts, self.block
        depth, rows = tokens.shape
        num_outputs, hidden = parts.head[0].shape
        state = state.contiguous()
        scratch = state.new_empty(rows * (block.input_size + 3 * hidden + num_outputs))
        block_scratch = state.new_empty(rows * block.scratch_width)
        norms = (parts.embedding_norm, parts.state_norm, parts.final_norm)
        places = (depth - 1) * rows
        work = _CHAIN.pack(
            *map(native._address, norms),
            *native.matrix_fields(*parts.embedding),
            *native.matrix_fields(*parts.head),
            0 if parts.ids is None else native._address(parts.ids, torch.int64, num_outputs),
            native._address(state, size=rows * hidden),
            native._address(tokens, torch.int64),
            scratch.data_ptr(),
            depth,
            num_outputs,
            parts.residual_is_normed,
            parts.head_reads_normed,
            parts.feeds_normed,
            parts.eps,
            block.address,
            0,
            0,
            native._address(rotary[0], size=places * rotary[0].shape[1]),
            native._address(rotary[1], size=places * rotary[0].shape[1]),
            native._address(ahead.write_locations, torch.int64, places),
            native._address(ahead.indices, torch.int64, places),
            native._address(ahead.page_table, torch.int32),
            native._address(ahead.query_start, torch.int32, rows + 1),
            block_scratch.data_ptr(),
            0,
            rows,
            *ahead.page_table.shape,
            rotary[0].shape[1],
            ahead.first_key,
            torch.get_num_threads(),
            *(NO_DRAW if drawing is None else drawing.fields(rows, num_outputs)),
        )
        native._native().chain(work)
